"""Where the reference data lies: checkpoints, logits and golden bytes that other programs made (spec/model.md 6)."""

import os
from pathlib import Path

REFERENCE = Path(os.environ.get("GLMJAX_REFERENCE") or Path(__file__).parents[1].parent / "shared" / "reference")

if not REFERENCE.is_dir():
    raise FileNotFoundError(f"{REFERENCE} is not a folder: set GLMJAX_REFERENCE to where the reference data lies")
