"""When an elastic job is given up: too many resets, or epochs that never commit a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_MOST_FRUITLESS = 3  # epochs in a row that may end before a step is committed
_REASONS_SHOWN = 3


class Patience:
    """Counts epochs, and how many of them in a row came to nothing."""

    def __init__(self, reset_limit: int | None) -> None:
        self._limit = reset_limit
        self._resets = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS_SHOWN)
        self._fruitless = 0
        self._first_reason = ""
        self._judged = True  # until an epoch was formed, nothing came to nothing
        self._commits: dict[str, int] = {}

    def formed(self, counts: bool) -> None:
        """An epoch was formed, or goes on after an error; `counts` if it is a reset."""
        self._judged = False
        if counts:
            self._resets += 1

    def judge(
        self, commits: Mapping[str, int], steps: int | None, reason: str, trouble: bool
    ) -> str | None:
        """Judge the epoch that ends; return why the job must be given up, or None."""
        # `steps` says how many steps the epoch has committed, if the workers report it.
        # `trouble` says whether something went wrong in the epoch.
        complaint = self._judge_fruits(commits, steps, reason, trouble)
        if complaint is None and self._limit is not None and self._resets >= self._limit:
            last = "; ".join(self._reasons) or reason
            complaint = (
                f"--reset-limit {self._limit}: the ranks may not be formed anew once more, unless "
                "it is raised; "
                f"last: {last}"
            )
        self._reasons.append(reason)
        return complaint

    def _judge_fruits(
        self, commits: Mapping[str, int], steps: int | None, reason: str, trouble: bool
    ) -> str | None:
        fruitful = self._progressed(commits, steps)
        if self._judged:
            return None
        self._judged = True
        if fruitful:
            self._fruitless = 0
        if fruitful or not trouble:
            return None
        self._fruitless += 1
        if self._fruitless == 1:
            self._first_reason = reason
        if self._fruitless < _MOST_FRUITLESS:
            return None
        return (
            f"{_MOST_FRUITLESS} worlds in a row ended before a step was committed; the first "
            f"ended because {self._first_reason}"
        )

    def _progressed(self, commits: Mapping[str, int], steps: int | None) -> bool:
        if steps is not None:
            return steps > 0
        progressed = any(count > self._commits.get(name, 0) for name, count in commits.items())
        for name, count in commits.items():
            self._commits[name] = max(count, self._commits.get(name, 0))
        return progressed
