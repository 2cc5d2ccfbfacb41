"""Three judgements of the membership: when to call members, whom to evict, when to give up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from hvdlite.launch.elastic.state import Stage, Worker


class Notices:
    """When the members are told to come to the next boundary."""

    # A notice says that somebody joins or leaves, or that data is to be distributed anew because a
    # worker has gone. It is due once for each such reason, and again in each new epoch.

    def __init__(self) -> None:
        self.deal_anew = False
        # When joiners that are ready stop waiting for others; None if none does.
        self.complete_at: float | None = None
        self._version = 0
        self._told: object = None

    def begin(self, at_boundary: bool) -> None:
        """Begin anew: an epoch was formed, or goes on; at a boundary with data distributed anew."""
        self._told = None
        if at_boundary:
            self.deal_anew = False

    def due(
        self, members: Sequence[Worker], fit: Sequence[Worker], now: float
    ) -> tuple[int, bool] | None:
        """Return the version of a notice that is due now, and whether nobody joins by it."""
        # `fit` are those for whom there is room: who waits to join, and who still starts.
        joiners = [one for one in fit if one.stage is Stage.WAITING]
        starting = [one for one in fit if one.stage is Stage.STARTING and one.draining is None]
        until = -math.inf
        if joiners and starting:
            # A new host starts several workers at once, and their start-up differs. One change of
            # hosts is to be one epoch, so the first one waits as long again as its start has taken.
            first = min(joiners, key=lambda one: one.ready_at)
            until = 2 * first.ready_at - first.expected_at
        self.complete_at = until if now < until else None
        told = [] if now < until else [worker.number for worker in joiners]
        leavers = [worker.number for worker in members if worker.draining is not None]
        reasons = (told, leavers, self.deal_anew)
        if not any(reasons) or reasons == self._told:
            return None
        self._told = reasons
        self._version += 1
        return self._version, not joiners


_VERDICT_SECONDS = 0.3  # from the first report of a broken link


@dataclass(frozen=True)
class _Report:
    suspect: int
    reason: str
    reporter: int
    mutual: bool


class BrokenLinks:
    """Whom to evict when links break and nobody died: the reports of one gathering.

    A worker *suspects* another one when its link to it broke, or when it could not connect to it. A
    link has two ends, so a report is evidence and not a verdict. It also often is the consequence
    of a death that is about to be reported. So the verdict waits a moment, and a death in that
    moment explains all reports. If the network between two workers is silent, the one that dials
    says so for both of them, because the other one only waits: such a report is *mutual*. It also
    explains what other workers report, to whom these two hang up when they cannot connect.
    """

    def __init__(self) -> None:
        self._by_reporter: dict[int, _Report] = {}  # at most one by each worker
        self._implied: dict[int, _Report] = {}  # They have not said it themselves.
        self._someone_went = False
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
        """Take a report, unless somebody has gone in this gathering.

        `anew` says whether it was seen just now: a worker repeats what its last engine has seen
        until it has another one, and what was explained once does not count again. `mutual` says
        whether the suspect would say the same of the reporter.
        """
        if self._someone_went:
            self._explained.add((reporter, suspect))
        if self._someone_went or ((reporter, suspect) in self._explained and not anew):
            return
        before = self._by_reporter.get(reporter)
        if mutual or before is None or not before.mutual:
            self._by_reporter[reporter] = _Report(suspect, reason, reporter, mutual)
        if mutual:
            self._implied[suspect] = _Report(reporter, reason, reporter, mutual)
        if self.verdict_at is None:
            self.verdict_at = now + _VERDICT_SECONDS

    def explain(self) -> None:
        """Somebody has gone, which explains broken links: drop all, and take no more."""
        self._explained |= {(one, two.suspect) for one, two in self._by_reporter.items()}
        self.begin()
        self._someone_went = True

    def begin(self) -> None:
        """Begin anew: the members of another epoch connect."""
        self._by_reporter.clear()
        self._implied.clear()
        self._someone_went = False
        self.verdict_at = None

    def forget(self) -> None:
        """Begin anew: an epoch was formed, and the workers have other engines."""
        self.begin()
        self._explained.clear()

    def due(self, now: float) -> bool:
        return self.verdict_at is not None and now >= self.verdict_at

    def worst(self, members: Set[int]) -> tuple[int, str] | None:
        """Return the member that most suspect, on a tie the highest, and what they say."""
        votes: dict[int, list[_Report]] = {}
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


_MOST_IN_VAIN = 3  # epochs in a row that may end before a step is committed
_REASONS_SHOWN = 3


class Progress:
    """When the job is given up: too many resets, or epochs that never commit a step."""

    def __init__(self, reset_limit: int | None) -> None:
        self._limit = reset_limit
        self._resets = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS_SHOWN)
        self._in_vain = 0
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
        """Judge the epoch that ends; return why the job must be given up, or None.

        `steps` says how many steps the epoch has committed, if the workers report it, and `trouble`
        whether something went wrong in it.
        """
        complaint = None
        progressed = self._progressed(commits, steps)
        if not self._judged:
            self._judged = True
            if progressed:
                self._in_vain = 0
            elif trouble:
                self._in_vain += 1
                if self._in_vain == 1:
                    self._first_reason = reason
                if self._in_vain >= _MOST_IN_VAIN:
                    complaint = (
                        f"{_MOST_IN_VAIN} worlds in a row ended before a step was committed; the "
                        f"first ended because {self._first_reason}"
                    )
        if complaint is None and self._limit is not None and self._resets >= self._limit:
            last = "; ".join(self._reasons) or reason
            complaint = (
                f"--reset-limit {self._limit}: the ranks may not be formed anew once more, unless "
                "it is raised; "
                f"last: {last}"
            )
        self._reasons.append(reason)
        return complaint

    def _progressed(self, commits: Mapping[str, int], steps: int | None) -> bool:
        if steps is not None:
            return steps > 0
        progressed = any(count > self._commits.get(name, 0) for name, count in commits.items())
        for name, count in commits.items():
            self._commits[name] = max(count, self._commits.get(name, 0))
        return progressed
