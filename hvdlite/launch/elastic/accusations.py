"""Whom to evict when links break and nobody died.

A worker *accuses* another one when its link to it broke, or when it could not connect to it. A link
has two ends, so an accusation is evidence and not a verdict. It also often is the consequence of a
death that is about to be reported. So the verdict waits a moment, and a death in that moment makes
all accusations moot. If the network between two workers is silent, the one that dials says so for
both of them, because the other one only waits: such an accusation is *mutual*.

Example:
    >>> accusations = Accusations()
    >>> for accuser, accused in [(0, 2), (1, 2), (2, 0)]:
    ...     accusations.add(accuser, accused, "the link broke", now=5.0)
    >>> accusations.verdict_at == 5.0 + GRACE
    True
    >>> accusations.worst({0, 1, 2})
    (2, 'worker 0 and 1 more reported: the link broke')
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

GRACE = 0.3  # seconds from the first accusation to the verdict


@dataclass(frozen=True)
class _Accusation:
    accused: int
    reason: str
    reporter: int


class Accusations:
    """The accusations of one gathering, at most one by each worker."""

    def __init__(self) -> None:
        self._by_accuser: dict[int, _Accusation] = {}
        self._implied: dict[int, _Accusation] = {}  # of those who have not said it themselves
        self._moot = False
        self._explained: set[tuple[int, int]] = set()
        self.verdict_at: float | None = None

    def add(
        self,
        accuser: int,
        accused: int,
        reason: str,
        now: float,
        anew: bool = False,
        mutual: bool = False,
    ) -> None:
        """Take an accusation, unless somebody has gone in this gathering.

        Args:
            accuser: who reports it.
            accused: the other end of the link.
            reason: what the accuser has seen, for sentences.
            now: the time, in seconds.
            anew: whether it was seen just now. A worker repeats what its last engine has seen until
                it has another one, and what was explained once does not count again.
            mutual: whether the accused would say the same of the accuser.
        """
        if self._moot:
            self._explained.add((accuser, accused))
        if self._moot or ((accuser, accused) in self._explained and not anew):
            return
        self._by_accuser[accuser] = _Accusation(accused, reason, accuser)
        if mutual:
            self._implied[accused] = _Accusation(accuser, reason, accuser)
        if self.verdict_at is None:
            self.verdict_at = now + GRACE

    def dismiss(self) -> None:
        """Somebody has gone, which explains broken links: drop all, and take no more."""
        self._explained |= {(one, two.accused) for one, two in self._by_accuser.items()}
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
        self._by_accuser.clear()
        self._implied.clear()
        self.verdict_at = None

    def ripe(self, now: float) -> bool:
        """Return whether there are accusations, and the moment has passed."""
        return self.verdict_at is not None and now >= self.verdict_at

    def worst(self, members: Set[int]) -> tuple[int, str] | None:
        """Return the member with most accusers, on a tie the highest, and what they say."""
        votes: dict[int, list[_Accusation]] = {}
        for accuser in sorted(members):
            said = (self._by_accuser.get(accuser), self._implied.get(accuser))
            counts = [one for one in said if one is not None and one.accused in members]
            if counts:
                votes.setdefault(counts[0].accused, []).append(counts[0])
        if not votes:
            return None
        worst = max(votes, key=lambda accused: (len(votes[accused]), accused))
        first, reason = votes[worst][0].reporter, votes[worst][0].reason
        others = f" and {len(votes[worst]) - 1} more" if len(votes[worst]) > 1 else ""
        return worst, f"worker {first}{others} reported: {reason or 'the link broke'}"
