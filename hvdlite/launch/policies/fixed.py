"""The policy of a job whose ranks stay: the first failure ends it."""

from __future__ import annotations

from hvdlite.launch.control import AnyRank, Next, Policy
from hvdlite.launch.process import Ending


class FixedRanks(Policy):
    """Ends the job with the first failure of a rank."""

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        """End the job, unless the rank has done its work or was told to end."""
        return Next.GO_ON if ending.well or excused else Next.FAIL
