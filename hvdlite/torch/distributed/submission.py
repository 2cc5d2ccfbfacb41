"""How an operation of a process group begins: its name, its timeout, and what the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from hvdlite import _core
from hvdlite.bootstrap.deadline import seconds_of
from hvdlite.errors import CollectiveTimeoutError
from hvdlite.torch.distributed.numbering import SLOTS, Numbering
from hvdlite.torch.distributed.work import Finish, Work

Submit = Callable[[str, bool], _core.Handle]


class Submissions:
    """One member of a process group, and its engine.

    Args:
        engine: of the group.
        rank: this process's rank in the group.
        size: how many members the group has.
        name: of the group, for messages.
        timeout: how long an operation may take.
    """

    def __init__(
        self, engine: _core.Engine, rank: int, size: int, name: str, timeout: timedelta
    ) -> None:
        self._engine = engine
        self._own_rank = rank
        self._members = size
        self._title = name
        self._timeout = timeout
        self._numbering = Numbering()

    def _start(
        self,
        signature: str,
        submit: Submit,
        outputs: Sequence[torch.Tensor],
        finish: Finish | None,
        options: Any,
        slots: int = SLOTS,
    ) -> Work:
        """Submit an operation; wait for it unless the caller wants to do so.

        Args:
            signature: see `numbering`.
            submit: submits it under a name; the second argument is the engine's hint `blocking`.
            outputs: the tensors that it writes.
            finish: copies the results there; None if the engine writes to them.
            options: of the call, such as AllreduceOptions.
            slots: how many operations of this signature may be in flight.
        """
        blocking = not options.asyncOp
        timeout = options.timeout
        seconds = seconds_of(self._timeout if timeout.days < 0 else timeout)
        try:
            name = self._numbering.next(signature, slots, seconds)
        except TimeoutError:
            self._give_up(signature, seconds)
        handle = submit(name, blocking)
        self._numbering.note(name, handle)
        work = Work(handle, outputs, finish, seconds, lambda late: self._give_up(signature, late))
        if blocking:
            work.wait()  # The engine expects this thread to do the work.
        return work

    def _give_up(self, signature: str, seconds: float) -> NoReturn:
        """End the group, because an operation takes longer than its timeout."""
        text = (
            f"rank {self._own_rank} of process group '{self._title}' waited {seconds:g} s for "
            f"{signature}, the timeout of the group: some rank did not call it, or calls other "
            "operations, or is slow; give a longer timeout= to init_process_group or new_group"
        )
        self._engine.abort(text)
        raise CollectiveTimeoutError(text)
