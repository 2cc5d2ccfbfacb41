"""`connect()`, and what a group offers to torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike

from hvdlite.errors import UndividedRateWarning
from hvdlite.parameter_server import group as neutral
from hvdlite.parameter_server.storage import Storage
from hvdlite.parameter_server.tensors import TensorSpec
from hvdlite.torch.parameter_server.replica import NamedParameters, Replica
from hvdlite.torch.parameter_server.storage import MakeOptimizer, TorchStorage


class Group(neutral.Group):
    """The servers and workers of a job, as one of them sees them; `connect` makes it."""

    def serve(
        self,
        make_optimizer: MakeOptimizer,
        save: str | PathLike[str] | None = None,
        save_every: float = 60.0,
        load: str | PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> None:
        """Serve until all workers have ended, or SIGTERM asks this process to end.

        Args:
            make_optimizer: takes a list of parameters, what this server holds, and returns their
                optimizer. Divide the rate by `group.workers`: every worker's push is one step.
            save: the path of checkpoints, of which each server writes its own file: `ps.ckpt` is
                `ps.ckpt.0-of-2` and `ps.ckpt.1-of-2`. If there is one at the start, the servers go
                on from it; their number must be the same.
            save_every: seconds between two checkpoints; the last one is written at the end.
            load: the path of another checkpoint to begin with.
            check_finite: whether to refuse a push with a NaN or an infinity; its worker gets an
                ArgumentError.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a worker, or has served
                already.

        Example:
            def make_optimizer(params):
                return torch.optim.SGD(params, lr=0.1 / group.workers, momentum=0.9)

            group.serve(make_optimizer, save="ps.ckpt", save_every=600)
        """

        def make_storage(tensors: Sequence[TensorSpec]) -> Storage:
            storage = TorchStorage(tensors, make_optimizer, check_finite)
            self._warn_of_the_rate(storage)
            return storage

        self.serve_storage(make_storage, save, save_every, load)

    def _warn_of_the_rate(self, storage: TorchStorage) -> None:
        """Warn once of a momentum at a rate that does not depend on the number of workers."""
        known, self.knows_workers = self.knows_workers, True
        workers = self.workers
        if known or self.index > 0 or workers == 1 or not storage.has_momentum:
            return
        warnings.warn(
            f"the optimizer of the parameter servers has a momentum, and its rate does not depend "
            f"on group.workers: each of {workers} workers makes a step of the whole rate, and such "
            "training usually diverges. Divide the rate: lr=0.1 / group.workers",
            UndividedRateWarning,
            stacklevel=2,
        )

    def replica(
        self,
        named_parameters: NamedParameters,
        staleness: int | None = None,
        push_every: int = 1,
        pull_every: int = 1,
    ) -> Replica:
        """Register the parameters of this worker's model, and pull their values.

        The first worker's values become those of all, unless the servers have a checkpoint.
        Parameters that do not require a gradient, and buffers, stay each worker's own.

        Args:
            named_parameters: `model.named_parameters()`, the same model on every worker.
            staleness: how many steps this worker may be ahead of the slowest one when it pulls;
                0 keeps workers in step, None waits for nobody.
            push_every: in every how many steps the sum of the gradients is pushed.
            pull_every: in every how many steps values are pulled.

        Returns:
            The replica, whose `step()` comes after each backward pass.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a server.
            MismatchError: another worker, or the checkpoint, has another model.
            RankFailedError: a server died.

        Example:
            replica = group.replica(model.named_parameters(), staleness=3)
            for batch in batches:
                loss_of(model, batch).backward()
                replica.step()
        """
        return Replica(self.client, named_parameters, staleness, push_every, pull_every)


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
