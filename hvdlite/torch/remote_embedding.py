"""`RemoteEmbedding`: an embedding whose table only the parameter servers hold."""

from __future__ import annotations

import gc
import itertools
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.client import RemoteCollection, Rows
from hvdlite.parameter_server.tensors import Filling, TensorSpec
from hvdlite.torch import parameter_server
from hvdlite.torch.collectives.memory import NAMES, bytes_of

# Each group has the numbers of the tables that are made in it.
_tables: WeakKeyDictionary[parameter_server.Group, itertools.count[int]] = WeakKeyDictionary()


class RemoteEmbedding(torch.nn.Module):  # type: ignore[misc]
    """An embedding of so many rows; this worker holds those of one batch at a time.

    The forward pass pulls the rows of its batch from the servers, and the backward pass pushes
    their gradients at once, without a `step()`. So a table may exceed the memory of a worker, and
    that of one server, because the rows are divided among the servers. The servers fill it.

    The servers' optimizer has to take sparse gradients: SGD without momentum, Adagrad, SparseAdam.

    Attributes:
        rows: the number of rows.
        width: the number of elements of a row.
        clock: the number of backward passes that this worker has done.

    Example:
        >>> table = hvd.RemoteEmbedding(100_000_000, 64, group)
        >>> loss_of(table(words)).backward()  # words: any shape of int64
    """

    def __init__(
        self,
        rows: int,
        width: int,
        group: parameter_server.Group,
        *,
        name: str | None = None,
        std: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        staleness: int | None = None,
        scaler: Any = None,
    ) -> None:
        """Register the table with the servers; nothing is pulled yet.

        Args:
            rows: the number of rows.
            width: the number of elements of a row.
            group: what `parameter_server.connect()` has returned on this worker.
            name: of the table, the same on every worker; by default tables are counted.
            std: servers fill a new table with normally distributed values of this deviation.
            seed: these values depend on it, and not on the number of servers.
            dtype: of the elements.
            staleness: how many backward passes this worker may be ahead of the slowest one when it
                pulls; None waits for nobody.
            scaler: the GradScaler that scales the loss. Its scale is taken off what is pushed, and
                rows with a gradient that is not finite are not pushed. False: there is one in this
                program, and it does not scale this loss.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a server.
            MismatchError: another worker, or a checkpoint, has another table of this name.
            RankFailedError: a server died.
        """
        super().__init__()
        _check(rows, width, std, dtype, staleness)
        self.rows, self.width = rows, width
        number = next(_tables.setdefault(group, itertools.count()))
        self.name = f"embedding.{number}" if name is None else name
        self.staleness = staleness
        self._scaler = scaler
        self._dtype = dtype
        spec = TensorSpec("rows", NAMES[dtype], (rows, width), Filling(std, seed))
        self._collection: RemoteCollection = group.client.register(self.name, [spec], [None])
        self.clock = self._collection.clock

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Pull the rows of these numbers.

        Args:
            numbers: of rows, as integers of any shape.

        Returns:
            The rows, in a new last dimension.

        Raises:
            ArgumentError: a number is not that of a row.
            RankFailedError: a server died.
        """
        if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
            raise ArgumentError(
                f"RemoteEmbedding {self.name!r} takes numbers of rows as integers, not as "
                f"{numbers.dtype}"
            )
        wanted, places = torch.unique(numbers.cpu().long().reshape(-1), return_inverse=True)
        if len(wanted) and not (int(wanted[0]) >= 0 and int(wanted[-1]) < self.rows):
            raise ArgumentError(
                f"RemoteEmbedding {self.name!r} has the rows 0 to {self.rows - 1}, and a batch has "
                f"the numbers {int(wanted[0])} to {int(wanted[-1])}"
            )
        values = torch.empty(len(wanted), self.width, dtype=self._dtype, device="cpu")
        if len(wanted):
            self._collection.pull_rows(
                0, Rows(_numbers(wanted), bytes_of(values)), self.clock, self.staleness
            )
        if torch.is_grad_enabled() and len(wanted):
            values.requires_grad_()
            values.register_post_accumulate_grad_hook(lambda rows: self._push(wanted, rows))
        device = numbers.device
        found = torch.nn.functional.embedding(places.to(device), values.to(device))
        return found.reshape(*numbers.shape, self.width)

    def _push(self, wanted: torch.Tensor, values: torch.Tensor) -> None:
        gradient, values.grad = values.grad, None
        assert gradient is not None
        wanted, gradient = self._without_scale(wanted, gradient)
        self.clock += 1
        rows = Rows(_numbers(wanted), bytes_of(gradient.contiguous()))
        self._collection.step(self.clock, {0: rows}, None, self.staleness)

    def _without_scale(
        self, wanted: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the loss's scale off a gradient; keep no row where it has overflowed."""
        if self._scaler is None:
            # Nobody has said whether the GradScaler of this program scales this loss.
            if _some_scaler_is_in_use():
                raise ArgumentError(
                    f"RemoteEmbedding {self.name!r} pushes gradients inside of backward(), and a "
                    "GradScaler of this program may have scaled them: give it scaler=, or "
                    "scaler=False where it scales another loss"
                )
            self._scaler = False
        if not self._scaler or not self._scaler.is_enabled():
            return wanted, gradient
        gradient = gradient / self._scaler.get_scale()
        if bool(torch.isfinite(gradient).all()):
            return wanted, gradient
        return wanted[:0], gradient[:0]

    def extra_repr(self) -> str:
        """Return the size and the name of the table, for `print(model)`."""
        return f"{self.rows}, {self.width}, name={self.name!r}"


def _some_scaler_is_in_use() -> bool:
    """Look for a GradScaler of this program, since autograd does not tell who scaled a loss."""
    kinds = torch.amp.GradScaler
    found = (one for one in gc.get_objects() if issubclass(type(one), kinds))
    return any(one.is_enabled() and one.get_scale() != 1.0 for one in found)


def _check(rows: Any, width: Any, std: Any, dtype: Any, staleness: Any) -> None:
    for what, value in (("rows", rows), ("width", width)):
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{what}={value!r} is not a number from 1 on")
    if not std >= 0:
        raise ArgumentError(f"std={std!r} is not a standard deviation from 0 on")
    if dtype not in NAMES:
        raise ArgumentError(f"dtype={dtype!r}: servers hold {', '.join(NAMES.values())}")
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ArgumentError(f"staleness={staleness!r} is not None, 0 or a number of steps")


def _numbers(rows: torch.Tensor) -> memoryview:
    return bytes_of(rows).cast("q")
