"""Asynchronous training with parameter servers in Keras: `hvd.parameter_server.connect()`.

Start the script by `hvdlite-run -np 8 --servers 2 python train.py`: the first two processes serve,
and the other six train. Nobody calls `hvd.init()`. Servers have optimizers of Keras, on either
backend, and a worker compiles its model with `group.optimizer()`.

Example:
    group = hvd.parameter_server.connect()
    if group.serves:
        group.serve(lambda: keras.optimizers.SGD(0.1 / group.workers))
        raise SystemExit
    model.compile(optimizer=group.optimizer(), loss="mse", jit_compile=False)
    model.fit(data)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from hvdlite.keras.parameter_server.remote_optimizer import RemoteOptimizer
from hvdlite.keras.parameter_server.storage import KerasStorage
from hvdlite.parameter_server import group as neutral
from hvdlite.parameter_server.report import Report, ServerReport, WorkerReport
from hvdlite.parameter_server.storage import Storage
from hvdlite.parameter_server.tensors import TensorSpec

__all__ = ["Group", "RemoteOptimizer", "Report", "ServerReport", "WorkerReport", "connect"]


class Group(neutral.Group):
    """The servers and workers of a job, as one of them sees them; `connect` makes it."""

    def serve(
        self,
        make_optimizer: Callable[[], Any],
        save: str | PathLike[str] | None = None,
        save_every: float = 60.0,
        load: str | PathLike[str] | None = None,
    ) -> None:
        """Serve until all workers have ended, or SIGTERM asks this process to end.

        Args:
            make_optimizer: returns a new optimizer of Keras; it is called for each tensor that
                this server holds. Divide the rate by `group.workers`: every worker's push is one
                step.
            save: the path of checkpoints, of which each server writes its own file: `ps.ckpt` is
                `ps.ckpt.0-of-2` and `ps.ckpt.1-of-2`. If there is one at the start, the servers go
                on from it; their number must be the same.
            save_every: seconds between two checkpoints; the last one is written at the end.
            load: the path of another checkpoint to begin with.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a worker, or has served
                already.

        Example:
            group.serve(lambda: keras.optimizers.SGD(0.1 / group.workers), save="ps.ckpt")
        """

        def make_storage(tensors: Sequence[TensorSpec]) -> Storage:
            return KerasStorage(make_optimizer, tensors)

        self.serve_storage(make_storage, save, save_every, load)

    def optimizer(
        self,
        staleness: int | None = None,
        push_every: int = 1,
        pull_every: int = 1,
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
    ) -> RemoteOptimizer:
        """Make the optimizer of a worker's model, which leaves the updates to the servers.

        The first worker's values become those of all, unless the servers have a checkpoint. The
        state of other layers, such as the moments of BatchNormalization, is each worker's own.

        Args:
            staleness: how many steps this worker may be ahead of the slowest one when it pulls;
                0 keeps workers in step, None waits for nobody.
            push_every: in every how many steps the sum of the gradients is pushed.
            pull_every: in every how many steps values are pulled.
            clipvalue: the largest value of this worker's gradients, as in Keras' optimizers.
            clipnorm: the largest norm of the gradient of a variable.
            global_clipnorm: the largest norm of all gradients together.

        Returns:
            The optimizer, for `compile()` with jit_compile=False, or for a loop of your own.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a server.
            ValueError: more than one of the three bounds is given.

        Example:
            model.compile(optimizer=group.optimizer(), loss="mse", jit_compile=False)
        """
        return RemoteOptimizer(
            self.client, staleness, push_every, pull_every, clipvalue, clipnorm, global_clipnorm
        )


def connect() -> Group:
    """Connect this process to its job: a worker to all servers.

    Returns:
        The group; close it, or use it in a `with` statement, when the training is over.

    Raises:
        BootstrapError: the job has no servers, or they cannot be reached in time.

    Example:
        with hvd.parameter_server.connect() as group:
            ...
    """
    return Group(neutral.environment_of_this_process())
