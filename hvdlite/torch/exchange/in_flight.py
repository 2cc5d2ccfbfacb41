"""What a bucket has in flight between its submission and the arrival of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlite.torch.bucket_memory import Place
from hvdlite.torch.collectives.sparse import RowGathering
from hvdlite.torch.collectives.submit import Reduction, Submission


@dataclass
class InFlight:
    """One gradient in flight."""

    param: torch.Tensor
    gradient: torch.Tensor  # It is the parameter's own gradient, or zeros.
    version: int  # It is `gradient._version` at submission; -1 if the parameter had no gradient.
    address: int  # Its memory had this address at submission.
    wire: torch.Tensor  # This tensor is reduced; it may be `gradient` itself.
    context: Any  # The compressor made it.
    target: torch.Tensor  # The core writes the result here; it is most often `wire`.
    sparse: bool = False  # The gradient is sparse, and travels dense.
    place: Place | None = None  # It is the part of the gradient memory for `grad`.

    @property
    def present(self) -> bool:
        """Whether this rank had a gradient."""
        return self.version >= 0

    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return tensors that keep alive the memory that the core reads and writes."""
        # The gradient itself is not enough: the script may replace its `data` meanwhile.
        wire = self.wire.detach() if self.wire is self.gradient else self.wire
        return (wire,) if self.target is self.wire else (wire, self.target)

    def untouched(self) -> bool:
        """Return whether the gradient was neither replaced nor written since its submission."""
        if not self.present:
            return self.param.grad is None
        same: bool = self.param.grad is self.gradient and self.gradient._version == self.version
        return same and address_of(self.gradient) == self.address


def address_of(gradient: torch.Tensor) -> int:
    """Return the address of a gradient's values."""
    address: int = (gradient._values() if gradient.is_sparse else gradient).data_ptr()
    return address


@dataclass
class Sent:
    """One submission of a bucket."""

    reduction: Reduction
    step: int
    cast: int | None  # The core sends this dtype; None is that of the gradients.
    by_hand: Any  # This is the part of the compression that is not a cast in the core.
    plain: Any = None  # These are all gradients, if plain: see `fast_path.read_gradients`.
    flights: list[InFlight] = field(default_factory=list)  # It has no gradients while `plain` does.
    handle: Submission | None = None  # The operation with the flags has it, once it is submitted.
    # These are positions of parameters whose rows are in flight, and their operation.
    rows: tuple[list[int], RowGathering] | None = None

    def first_changed(self) -> int | None:
        """Return the position of the first gradient that the script changed; None: none was."""
        if self.plain is not None:
            first: int = self.plain.first_changed()
            return None if first < 0 else first
        return next((i for i, flight in enumerate(self.flights) if not flight.untouched()), None)

    def each(self, params: Sequence[torch.Tensor]) -> list[InFlight]:
        """Return all gradients in flight, plain ones as well."""
        if self.plain is None:
            return self.flights
        pairs = zip(params, self.plain.gradients, strict=True)
        return [InFlight(p, g, g._version, g.data_ptr(), g, None, g) for p, g in pairs]
