"""How drafts fared, under the names of ``Engine.stats``."""

from glmjax.serving.plan import Sampled

ACCEPTED_AT = "num_accepted_tokens_at_"  # and a position of the drafts


class DraftCounts:
    """Counts over all requests; ``most`` drafts in a step at most."""

    def __init__(self, most: int):
        self._steps = 0  # of a request, in which drafts were verified
        self._drafts = 0
        self._accepted = [0] * most  # by position

    def add(self, sampled: Sampled) -> None:
        if sampled.num_drafts:
            self._steps += 1
            self._drafts += sampled.num_drafts
            for position in range(len(sampled.token_ids) - 1):
                self._accepted[position] += 1

    def gauges(self) -> dict[str, int]:
        """Nothing where nothing is drafted."""
        if not self._accepted:
            return {}
        counts = {"num_drafts": self._steps, "num_draft_tokens": self._drafts}
        counts["num_accepted_tokens"] = sum(self._accepted)
        return counts | {f"{ACCEPTED_AT}{i}": count for i, count in enumerate(self._accepted)}
