"""A step's gradients as one transaction of an elastic job.

The results of a transaction are handed out together, on all ranks or on none. So all gradients of a
step come from the same ranks, also when a rank dies in the middle of it.
"""

from __future__ import annotations

from hvdlite import _core, basics
from hvdlite.elastic import steps
from hvdlite.errors import HvdliteError
from hvdlite.process_sets import ProcessSet, member_id


class StepTransaction:
    """The transaction of one reducer, step after step. Used by one thread at a time."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        """Make it for a reducer, by its name, which is unique on this rank."""
        self.name = name  # The collectives of a step have it, too.
        self._process_set = process_set
        self._commit: _core.Handle | None = None
        self.begun = False  # It says whether a step has gradients that are not used yet.
        steps.announced()

    def begin(self) -> None:
        """Note the first gradient of a step."""
        self.begun = True
        steps.begun()

    def end(self) -> None:
        """Submit the commit behind the step's collectives, or raise; later calls do nothing."""
        # It wakes the engine's thread: the first wait is for a bucket, which ends with the commit.
        if self._commit is None:
            process_set = member_id(self._process_set)
            self._commit = basics.engine().commit(f"{self.name}.commit", self.name, process_set)

    def finish(self, dropped: bool) -> HvdliteError | None:
        """Wait for the commit, and return its error."""
        commit, self._commit, self.begun = self._commit, None, False
        if commit is None:
            return None
        try:
            commit.wait()
        except HvdliteError as error:
            steps.dropped()
            failure: HvdliteError = error
            return failure
        if dropped:
            steps.dropped()
        else:
            steps.committed(commit.epoch)
        return None

    def drop(self) -> None:
        """Forget a step that was not finished."""
        self._commit, self.begun = None, False
        steps.dropped()


def step_transaction(name: str, process_set: ProcessSet) -> StepTransaction | None:
    """Make the transaction of a reducer; in a job that is not elastic there is none."""
    return StepTransaction(name, process_set) if basics.in_elastic_job() else None
