"""The backend of Ray Train: `HvdliteTrainer`, and the `HvdliteConfig` that it is made of.

Ray Train starts the workers, calls `on_start`, which gives every worker its rank, and runs the
training function in a thread of each. When Ray Train restarts the workers, `on_start` runs again,
and the new ranks get a fresh secret and the next epoch, so that what is left of the former ones is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from hvdlite import basics
from hvdlite.errors import ArgumentError
from hvdlite.ray.group import import_ray, own_place
from hvdlite.rendezvous.assignments import Place, assignments, start_store
from hvdlite.rendezvous.environment import assign_rank
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store

import_ray()

import ray  # noqa: E402
from ray.train.backend import Backend, BackendConfig  # noqa: E402
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402

_store: Store | None = None  # Rank 0's worker has it.


@dataclass
class HvdliteConfig(BackendConfig):  # type: ignore[misc]
    """Has Ray Train make its workers the ranks of a world: `backend_config` of its trainers.

    Attributes:
        start_timeout_s: seconds that `hvd.init()` waits for the other ranks; 0 for no limit.
        interfaces: names of the network interfaces by which nodes reach each other; by default
            the addresses by which Ray reaches them.

    Example:
        >>> HvdliteConfig(start_timeout_s=120).start_timeout_s
        120
    """

    start_timeout_s: float = 60
    interfaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the timeout.

        Raises:
            ArgumentError: it is not a number of seconds.
        """
        if not self.start_timeout_s >= 0:
            raise ArgumentError(
                f"HvdliteConfig(start_timeout_s={self.start_timeout_s}): give a number of seconds, "
                "or 0 for no limit"
            )

    @property
    def backend_cls(self) -> type[HvdliteBackend]:
        """The class that starts the backend."""
        return HvdliteBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """What is entered around the training function."""
        return _training

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, for what Ray shows of a run."""
        return {"start_timeout_s": self.start_timeout_s, "interfaces": list(self.interfaces)}


class HvdliteTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Trains a function on workers of Ray Train, which are the ranks of a world.

    Everything but the communication is Ray Train's: reports, checkpoints, data sets, restarts.

    Args:
        train_loop_per_worker: the training function, without arguments or with a dictionary.
        hvdlite_config: settings of the communication.
        **others: those of Ray's DataParallelTrainer, such as `train_loop_config` (the dictionary),
            `scaling_config`, `run_config` and `datasets`.

    Example:
        >>> from ray.train import ScalingConfig
        >>> def loop(config):
        ...     import hvdlite.torch as hvd
        ...     hvd.init()
        ...     ...
        >>> HvdliteTrainer(loop, scaling_config=ScalingConfig(num_workers=4)).fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        hvdlite_config: HvdliteConfig | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            backend_config=hvdlite_config or HvdliteConfig(),
            **others,
        )


class HvdliteBackend(Backend):  # type: ignore[misc]
    """Gives the workers their ranks. Ray keeps one object of this class in its controller."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._starts = 0

    def on_start(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        """Let the workers meet: each gets its assignment, and rank 0 serves the store."""
        places: list[Place] = worker_group.execute(own_place)
        job, self._starts = Job.drawn(self._starts), self._starts + 1
        store = worker_group.execute_single(0, _serve, places, job)
        settings = {
            "launcher": "Ray Train",
            "interfaces": backend_config.interfaces,
            "start_timeout": float(backend_config.start_timeout_s),
        }
        given = assignments(places, store, job, **settings)
        ray.get([worker_group.execute_single_async(one.rank, assign_rank, one) for one in given])

    def on_shutdown(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        """Have all workers leave their world; some may be dead, which Ray handles."""
        ray.get(worker_group.execute_async(_leave), timeout=_GOODBYE_SECONDS)


_GOODBYE_SECONDS = 5.0


def _serve(places: Sequence[Place], job: Job) -> str:
    """Serve the store in this worker; return its address."""
    global _store
    if _store is not None:
        _store.close()
    _store = start_store(places, job)
    return _store.address


def _leave() -> None:
    """Leave the world, and stop serving the store."""
    global _store
    basics.shutdown()
    assign_rank(None)
    if _store is not None:
        _store.close()
        _store = None


@contextmanager
def _training() -> Iterator[None]:
    """Tell the other ranks of an exception."""
    # Python tells of those of the main thread alone, and Ray Train calls the function in another.
    try:
        yield
    except BaseException as error:
        basics.tell_peers(error)
        raise
