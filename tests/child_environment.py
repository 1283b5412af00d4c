"""What processes that tests start find in their environment."""

import os


def without_devices() -> dict[str, str]:
    """As here, but nobody has said how many CPU devices there are."""
    flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in x]
    return {**os.environ, "XLA_FLAGS": " ".join(flags)}
