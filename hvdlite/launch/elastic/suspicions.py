"""Whom to evict when links break and nobody died.

A worker *suspects* another one when its link to it broke, or when it could not connect to it. A
link has two ends, so a suspicion is evidence and not a verdict. It also often is the consequence of
a death that is about to be reported. So the verdict waits a moment, and a death in that moment
makes all suspicions moot. If the network between two workers is silent, the one that dials says so
for both of them, because the other one only waits: such a suspicion is *mutual*. It also explains
what other workers report, to whom these two hang up when they cannot connect.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

GRACE = 0.3  # seconds from the first suspicion to the verdict


@dataclass(frozen=True)
class _Suspicion:
    suspect: int
    reason: str
    reporter: int
    mutual: bool


class Suspicions:
    """The suspicions of one gathering, at most one by each worker."""

    def __init__(self) -> None:
        self._by_reporter: dict[int, _Suspicion] = {}
        self._implied: dict[int, _Suspicion] = {}  # They have not said it themselves.
        self._moot = False
        self._explained: set[tuple[int, int]] = set()
        self.verdict_at: float | None = None

    def add(
        self,
        reporter: int,
        suspect: int,
        reason: str,
        now: float,
        anew: bool = False,
        mutual: bool = False,
    ) -> None:
        """Take a suspicion, unless somebody has gone in this gathering."""
        # `anew` says whether it was seen just now. A worker repeats what its last engine has seen
        # until it has another one, and what was explained once does not count again.
        # `mutual` says whether the suspect would say the same of the reporter.
        if self._moot:
            self._explained.add((reporter, suspect))
        if self._moot or ((reporter, suspect) in self._explained and not anew):
            return
        before = self._by_reporter.get(reporter)
        if mutual or before is None or not before.mutual:
            self._by_reporter[reporter] = _Suspicion(suspect, reason, reporter, mutual)
        if mutual:
            self._implied[suspect] = _Suspicion(reporter, reason, reporter, mutual)
        if self.verdict_at is None:
            self.verdict_at = now + GRACE

    def dismiss(self) -> None:
        """Somebody has gone, which explains broken links: drop all, and take no more."""
        self._explained |= {(one, two.suspect) for one, two in self._by_reporter.items()}
        self._clear()
        self._moot = True

    def begin(self) -> None:
        """Begin anew: the members of another epoch connect."""
        self._clear()
        self._moot = False

    def forget(self) -> None:
        """Begin anew: an epoch was formed, and the workers have other engines."""
        self.begin()
        self._explained.clear()

    def _clear(self) -> None:
        self._by_reporter.clear()
        self._implied.clear()
        self.verdict_at = None

    def ripe(self, now: float) -> bool:
        """Return whether there are suspicions, and the moment has passed."""
        return self.verdict_at is not None and now >= self.verdict_at

    def worst(self, members: Set[int]) -> tuple[int, str] | None:
        """Return the member that most suspect, on a tie the highest, and what they say."""
        votes: dict[int, list[_Suspicion]] = {}
        for reporter in sorted(members):
            said = (self._by_reporter.get(reporter), self._implied.get(reporter))
            counts = [one for one in said if one and one.suspect in members]
            counts = [one for one in counts if one.mutual or not self._implied]
            if counts:
                votes.setdefault(counts[0].suspect, []).append(counts[0])
        if not votes:
            return None
        worst = max(votes, key=lambda suspect: (len(votes[suspect]), suspect))
        first, reason = votes[worst][0].reporter, votes[worst][0].reason
        others = f" and {len(votes[worst]) - 1} more" if len(votes[worst]) > 1 else ""
        return worst, f"worker {first}{others} reported: {reason or 'the link broke'}"
