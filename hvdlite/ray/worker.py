"""The worker: the actor that is one rank of `hvdlite.ray.run` or of an executor."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite import basics
from hvdlite.errors import RankFailedError
from hvdlite.launch.call import Returned, pickled_error
from hvdlite.ray.cluster import import_ray, own_place
from hvdlite.rendezvous.assignments import Place, start_store
from hvdlite.rendezvous.environment import WorkerEnvironment, assign_rank, show_gpus
from hvdlite.rendezvous.store import Store


@dataclass(frozen=True)
class Arrival:
    """What a worker says of itself when it has started."""

    place: Place  # the node that it runs on
    pid: int  # its process id
    gpus: tuple[str, ...]  # the numbers of the GPUs that Ray gave it


@dataclass(frozen=True)
class Answer:
    """What a method of a worker returned, or raised."""

    value: Any = None  # the result
    raised: Returned | None = None  # the exception; None without one


class Worker:
    """One rank. Ray calls its methods one after the other."""

    # Attributes are set by `sit` and `build`; the store exists in the worker of rank 0 alone.

    def __init__(self) -> None:
        self._store: Store | None = None
        self._rank = 0
        self._object: Any = None

    def arrive(self) -> Arrival:
        """Say where this worker runs."""
        gpus = tuple(str(one) for one in import_ray().get_gpu_ids())
        return Arrival(own_place(), os.getpid(), gpus)

    def serve(self, places: Sequence[Place], token: bytes, job_id: bytes) -> str:
        """Serve the store until this worker ends; return its address."""
        self._store = start_store(places, token, job_id, epoch=0)
        return self._store.address

    def sit(self, assignment: WorkerEnvironment, gpus: Sequence[str]) -> None:
        """Take a rank, and see all GPUs of the workers of this node."""
        # Ray shows each worker its own GPUs alone. With those of its neighbours, local ranks number
        # the GPUs, as under any other launcher, and NCCL can use memory of the neighbours.
        self._rank = assignment.rank
        if gpus:
            show_gpus(gpus)
        assign_rank(assignment)

    def build(
        self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the object that `execute` works on."""
        with self._told():
            self._object = cls(*args, **kwargs)

    def call(self, what: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]) -> Any:
        """Call a function with its arguments, and return its result."""
        fn, args, kwargs = what
        with self._told():
            return fn(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the object of this worker."""
        with self._told():
            return fn(self._object)

    def answer(self, method: str, *arguments: Any) -> Answer:
        """Call a method of this worker, and pack what it raises together with its traceback."""
        try:
            return Answer(getattr(self, method)(*arguments))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return Answer(raised=Returned(error=pickled_error(error), text=text))

    def leave(self) -> None:
        """Leave the world, so that the next `hvd.init()` makes a new one."""
        basics.shutdown()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the other ranks of an exception, as the end of a script would."""
        # SystemExit becomes an error, because for Ray it means that the actor ends as it should.
        try:
            yield
        except SystemExit as error:
            basics.tell_peers(error)
            failure = RankFailedError(
                f"rank {self._rank} called sys.exit({error.code!r}) in a function that Ray runs; "
                "let the function return instead"
            )
            failure.failed_rank = self._rank
            raise failure from None
        except BaseException as error:
            basics.tell_peers(error)
            raise
