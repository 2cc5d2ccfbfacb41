"""Process groups in gloo's place, for programs that name gloo: `hvdlite-run --replace-gloo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed

from hvdlite.errors import CollectiveTimeoutError, UnsupportedError
from hvdlite.rendezvous.deadline import Deadline, seconds_of
from hvdlite.torch.distributed.group import NAME, HvdliteGroup

_said = False


class Options(NamedTuple):
    """What torch tells a group of gloo, by the names that it has where it makes other groups."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str = "gloo"  # Torch gives the name afterwards.


class GlooGroup(HvdliteGroup):
    """A process group that torch.distributed takes for one of gloo."""

    # getBackendName() stays hvdlite's: torch's C++ code looks for a ProcessGroupGloo in each group
    # that has gloo's.

    def __init__(self, options: Any) -> None:
        global _said
        if not _said and options.group_rank == 0:
            text = "torch.distributed's backend gloo is hvdlite (HVDLITE_REPLACE_GLOO)"
            print(f"hvdlite: {text}", file=sys.stderr, flush=True)
        _said = True
        super().__init__(options)
        self._barriers = 0

    def _backends(self) -> dict[str, str]:
        return {
            device: NAME if device == "cpu" else backend
            for device, backend in super()._backends().items()
        }

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> NoReturn:
        raise UnsupportedError(
            "recv from any rank: hvdlite, which is in gloo's place, has to know who sends; give "
            "src=, or start without --replace-gloo (HVDLITE_REPLACE_GLOO)"
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, which tell rank 0 that they are there by the group's store.

        Raises:
            CollectiveTimeoutError: On every rank that came, where another one did not come in
                time. It names the first such rank, or with `wait_all_ranks` on rank 0 all of them.
        """
        seconds = seconds_of(timeout or self._timeout)
        self._barriers += 1
        store = distributed.PrefixStore(f"monitored/{self._barriers}", self._member.store)
        if self._own_rank == 0:
            missing = self._missing(store, Deadline(seconds), wait_all_ranks)
            verdict = ""
            if missing:
                word = "Rank" if len(missing) == 1 else "Ranks"
                verdict = (
                    f"{word} {', '.join(map(str, missing))} failed to pass monitoredBarrier of "
                    f"process group '{self._title}' in {seconds:g} s"
                )
            store.set("verdict", verdict)
        else:
            store.set(str(self._own_rank), "")
            verdict = self._verdict(store, seconds)
        if verdict:
            raise CollectiveTimeoutError(verdict)

    def _missing(self, store: Any, deadline: Deadline, all_of_them: bool) -> list[int]:
        missing: list[int] = []
        for rank in range(1, self._members):
            try:
                store.wait([str(rank)], timedelta(seconds=max(0.001, deadline.seconds_left)))
            except RuntimeError:
                missing.append(rank)
                if not all_of_them:
                    break
        return missing

    def _verdict(self, store: Any, seconds: float) -> str:
        try:
            store.wait(["verdict"], timedelta(seconds=seconds))
        except RuntimeError:
            return (
                f"rank {self._own_rank} reached monitoredBarrier of process group "
                f"'{self._title}', and rank 0 did not let it pass in {seconds:g} s"
            )
        return store.get("verdict").decode()
