"""Buckets of gradients that all ranks get, reduced by an allreduce; see `gradient_bucket`.

A vector of flags, one per parameter, travels with the gradients: if no rank had a gradient, every
rank leaves `grad` at None. Further flags have the numbers of rows of sparse gradients, from which
all ranks choose how these travel next: as rows, by a second operation, or dense (see `sparse`).
They arrive sparse either way. The last flags have the number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import _core, ops
from hvdlite.compression import NoneCompressor, cast_in_core, is_packed, of_rows
from hvdlite.ops import dtype_number
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.sparse import GatheredRows, RowGathering, SparseWays, is_sparse
from hvdlite.torch.collectives.submit import Reduction, Submission, start_allreduce
from hvdlite.torch.collectives.tensors import NUMBER_OF, check, lies_otherwise, spec
from hvdlite.torch.exchange.device_steps import DeviceSteps
from hvdlite.torch.exchange.gradient_bucket import STEPS, GradientBucket
from hvdlite.torch.exchange.gradient_memory import (
    COMMON_FLAGS,
    FLAGS,
    BucketPlaces,
    Place,
    flags_dtype,
)
from hvdlite.torch.exchange.layout import layout_spec

_Steps = tuple[int, list[float]]  # this rank's step, and the flags that met there


@dataclass
class InFlight:
    """One gradient in flight."""

    param: torch.Tensor
    gradient: torch.Tensor  # the parameter's own gradient, or zeros
    version: int  # `gradient._version` at submission; -1 if the parameter had no gradient
    address: int  # the address of its memory at submission
    wire: torch.Tensor  # the tensor that is reduced; may be `gradient` itself
    context: Any  # of the compressor
    target: torch.Tensor  # the tensor to which the core writes the result; most often `wire`
    rows: int = 0  # the number of rows of a sparse gradient that travels dense
    place: Place | None = None  # the part of the gradient memory for `grad`

    @property
    def present(self) -> bool:
        """Whether this rank had a gradient."""
        return self.version >= 0

    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return tensors that keep alive the memory that the core reads and writes.

        The gradient itself is not enough: the script may replace its `data` meanwhile.
        """
        wire = self.wire.detach() if self.wire is self.gradient else self.wire
        return (wire,) if self.target is self.wire else (wire, self.target)

    def untouched(self) -> bool:
        """Return whether the gradient was neither replaced nor written since its submission."""
        if not self.present:
            return self.param.grad is None
        same: bool = self.param.grad is self.gradient and self.gradient._version == self.version
        return same and _address_of(self.gradient) == self.address


def _address_of(gradient: torch.Tensor) -> int:
    address: int = (gradient._values() if gradient.is_sparse else gradient).data_ptr()
    return address


def _shorten(name: str, limit: int) -> str:
    """Cut a name to `limit` bytes: the core accepts at most 512."""
    return _core.utf8_of_name(name)[:limit].decode(errors="ignore")


class Bucket(GradientBucket):
    """A bucket whose gradients all ranks get."""

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        compression: Any,
        sparse_as_dense: bool,
        places: Callable[[], BucketPlaces] | None = None,
        layout: int | None = None,
    ) -> None:
        """Make it.

        Args:
            name: identifies its operations on all ranks.
            params: the parameters whose gradients it reduces.
            names: the names of the parameters.
            compression: how gradients are compressed while they travel.
            sparse_as_dense: whether sparse gradients become dense.
            places: returns the bucket's gradient memory; without it gradients are reduced in place.
            layout: a number that must be the same on all ranks, see
                `hvdlite.torch.exchange.layout`.
        """
        super().__init__(name, params, names)
        self._labels = [_shorten(one, 400) for one in names]  # their names in the core
        self._compression = compression
        self._by_hand = compression  # the part of it that is not a cast in the core
        self._sparse_as_dense = sparse_as_dense
        self._find_places = places
        self._layout = layout
        self._places: BucketPlaces | None = None  # of this step
        self._flights: list[InFlight] = []  # none while `_plain` is
        self._plain: Any = None  # all gradients, if they are plain: see `fast_path.read_gradients`
        self._plain_specs: dict[int | None, list[_core.Tensor]] = {}  # of them, by the cast
        self._flags = torch.empty(0, device="cpu")
        self._device_steps: DeviceSteps | None = None  # of flags that are not waited for
        self._handle: Submission | None = None
        self._operation = name  # the name of the operation that `_handle` is of
        self._cast: int | None = None  # the dtype as which the core sends
        self._ways = SparseWays(self.params, self._names)
        self._gathered: list[int] = []  # positions of the parameters whose rows are in flight
        self._gathering: RowGathering | None = None
        self._reduction: Reduction | None = None
        self._masks: dict[int, torch.Tensor] = {}  # masks in flight, by position

    @property
    def submitted(self) -> bool:
        """Whether the gradients are in flight."""
        return self._handle is not None

    @property
    def operations(self) -> list[str]:
        """The names of the operations that are in flight."""
        if self._handle is None:
            return []
        return [self._operation, *([] if self._gathering is None else [f"{self._name}.rows"])]

    def submit(self, reduction: Reduction, blocking: bool, step: int) -> None:
        """Submit the gradients; see `GradientBucket.submit`."""
        self._ways.begin()
        self._cast, self._by_hand = cast_in_core(self._compression, reduction.op)
        if self._find_places is not None:
            places = self._find_places()
            if places is not self._places:
                self._places, self._flags = places, places.flags
        self._plain = self._read_plain()
        with torch.no_grad():
            self._flights = [] if self._plain is not None else self._leave_all()
            self._write_flags(1.0 + step % STEPS)
        self._step = step
        self._reduction = reduction
        self._start(reduction, blocking)

    def _start(self, reduction: Reduction, blocking: bool) -> None:
        """Submit what goes first."""
        self._send(self._name, self._layout, reduction, blocking)

    def _read_plain(self) -> Any:
        """Read all gradients in one call if the core can reduce them as they lie; else None."""
        special = self._ways.by_rows or self._ways.with_mask or self._places
        if special or self._by_hand is not NoneCompressor:
            return None
        if self._cast not in self._plain_specs:
            self._plain_specs[self._cast] = self._describe_plain()
        return fast_path.read_gradients(self.params, self._plain_specs[self._cast])

    def _describe_plain(self) -> list[_core.Tensor]:
        """Describe gradients that lie like their parameters; nothing if a parameter is special."""
        for param in self.params:
            ordinary = type(param) in (torch.Tensor, torch.nn.Parameter)
            if not ordinary or param.device.type not in ("cpu", "cuda"):
                return []
            if param.layout != torch.strided or param.dtype not in NUMBER_OF:
                return []
        labelled = zip(self._labels, self.params, strict=True)
        return [spec(label, param, None, self._cast) for label, param in labelled]

    def _send(self, name: str, layout: int | None, reduction: Reduction, blocking: bool) -> None:
        """Submit all gradients and the flags."""
        by_rows, flights, flags = self._ways.by_rows, self._flights, self._flags
        if self._plain is not None:
            specs = list(self._plain_specs[self._cast])
            memory: list[Any] = [self._plain, *(self._plain.gradients if flags.is_cuda else ())]
        else:
            specs = [
                spec(self._labels[i], flight.wire, flight.target, self._cast)
                for i, flight in enumerate(flights)
                if i not in by_rows
            ]
            memory = [flight.memory() for i, flight in enumerate(flights) if i not in by_rows]
        # float16 is too narrow for the share of a rank with a small weight, and int8 for any share.
        exact = is_packed(self._cast) or self._cast == dtype_number("float16")
        narrow = None if exact else self._cast
        if layout is not None:
            specs.append(layout_spec(f"{self._name}.layout", layout, flags, narrow))
        specs.append(spec(f"{self._name}.flags", flags, flags, narrow))
        masks = self._make_masks(sorted(self._ways.with_mask), flights)
        specs += self._mask_specs(masks)
        if by_rows:
            self._gather(sorted(by_rows), flights, reduction)
        keep = memory, flags, masks
        self._handle = start_allreduce(name, specs, reduction, keep, blocking)
        self._operation = name
        self._masks = masks

    def _gather(
        self, positions: list[int], flights: Sequence[InFlight], reduction: Reduction
    ) -> None:
        with torch.no_grad():
            self._gathering = RowGathering(
                [flights[position].wire for position in positions],
                [self._labels[position] for position in positions],
                f"{self._name}.rows",
                reduction,
                of_rows(self._compression, reduction.op),
                blocking=False,
            )
        self._gathered = positions

    def _plain_flights(self) -> list[InFlight]:
        """Return plain gradients in flight, for what follows if other ranks have other ones."""
        pairs = zip(self.params, self._plain.gradients, strict=True)
        return [InFlight(p, g, g._version, g.data_ptr(), g, None, g) for p, g in pairs]

    def _leave_all(self) -> list[InFlight]:
        by_rows = self._ways.by_rows
        return [self._leave(position, by_rows) for position in range(len(self.params))]

    def _leave(self, position: int, by_rows: set[int]) -> InFlight:
        param = self.params[position]
        if position in by_rows:
            gradient, wire = param.grad, self._ways.rows_of(position)
            version = -1 if gradient is None else gradient._version
            gradient = wire if gradient is None else gradient
            return InFlight(param, gradient, version, _address_of(gradient), wire, None, wire)
        as_dense = self._sparse_as_dense or self._ways.dense_for_good
        return self._compress(position, self._own(position, as_dense))

    def _own(self, position: int, as_dense: bool) -> InFlight:
        """Return this rank's gradient, or zeros, as a dense tensor that can be sent.

        Args:
            position: of the parameter.
            as_dense: whether a sparse gradient becomes dense for good.
        """
        param = self.params[position]
        gradient, version, rows = param.grad, -1, 0
        place = None if self._places is None else self._places.gradients[position]
        if place is not None and not place.suits(param):
            place = None
        if gradient is None and place is not None:
            gradient = place.view.zero_()
        elif gradient is None:
            gradient = torch.zeros_like(param, memory_format=torch.contiguous_format)
        else:
            if gradient.layout != torch.strided and as_dense:
                gradient = param.grad = gradient.to_dense()
            version = gradient._version
        dense = gradient
        if is_sparse(gradient):
            dense, rows = self._ways.to_dense(position, gradient)
        check(dense, self._names[position])
        if lies_otherwise(dense):
            dense = dense.resolve_conj().resolve_neg()
        address = _address_of(gradient)
        return InFlight(param, gradient, version, address, dense, None, dense, rows, place)

    def _compress(self, position: int, flight: InFlight) -> InFlight:
        """Make of a dense gradient what travels."""
        dense, place = flight.wire, flight.place
        if place is not None:
            dense = place.wire(dense)
        wire, flight.context = self._by_hand.compress(dense)
        flight.wire = wire.contiguous()
        flight.target = flight.wire
        if place is not None and place.takes(flight.wire):
            flight.target = place.memory
        return flight

    def _write_flags(self, step: float) -> None:
        count, flights = len(self.params), self._flights
        further = self._further_flags()
        size = FLAGS * count + len(further) + COMMON_FLAGS
        as_params = self._plain is not None or is_sparse(flights[0].wire)
        dtype = flags_dtype((self.params[0] if as_params else flights[0].wire).dtype)
        flags, device = self._flags, self.params[0].device
        if (flags.numel(), flags.dtype, flags.device) != (size, dtype, device):
            flags = self._flags = torch.empty(size, dtype=dtype, device=device)
        if all(flight.present and not flight.rows for flight in flights):
            flags.fill_(1)  # `flags[i] = 1` would make the host wait for a GPU.
            flags[count:-2].zero_()
            flags[-2:-1].fill_(step)
            for place, value in enumerate(further, FLAGS * count):
                flags[place : place + 1].fill_(value)
        else:
            values: list[float] = [flight.present for flight in flights]
            values += [flight.rows for flight in flights]
            values += [flight.rows > 0 for flight in flights]
            values += [self._ways.dimensions_of(flight.gradient) for flight in flights]
            values += [*further, step, 1.0]
            written = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=flags.is_cuda)
            flags.copy_(written, non_blocking=True)

    def _further_flags(self) -> list[float]:
        """Return flags of this rank as a whole."""
        return []

    def _read_further_flags(self, means: list[float]) -> None:
        """Take the means of the ranks' further flags."""

    def finish(self, counts: bool, dropped: bool = False) -> None:
        """Wait, and put the results into `grad`; see `GradientBucket.finish`."""
        handle, reduction = self._handle, self._reduction
        gathering, positions = self._gathering, self._gathered
        assert handle is not None and reduction is not None
        handle.wait()
        changed = None if dropped else self._find_changed()
        gathered: dict[int, GatheredRows] = {}
        if gathering is not None:
            gathered = dict(zip(positions, gathering.finish(), strict=True))
        present, rows, steps = self._read_flags(counts, handle.members, reduction.op)
        arrived = self._plain is not None and all(present) and not any(rows)
        flights = self._flights if arrived or self._plain is None else self._plain_flights()
        masks = self._masks
        late = [i for i in range(len(flights)) if rows[i] > 0 and i not in masks]
        if late:
            # All ranks do this, before any of them raises below.
            masks = masks | self._send_masks(late, flights, reduction)
        self.reset()
        if changed is not None:
            raise self._changed(self._names[changed])
        if not dropped and steps is not None:
            self._check_step(*steps)
        with torch.no_grad():
            for i, flight in enumerate(flights):
                if not present[i]:
                    flight.param.grad = None
                elif i in gathered:
                    flight.param.grad = gathered[i].tensor
                    rows[i] = gathered[i].rows
                else:
                    self._arrive(i, flight, masks[i] if rows[i] > 0 else None)
                self._ways.choose(i, rows[i])

    def _find_changed(self) -> int | None:
        """Return the position of the first gradient that the script changed; None: none was."""
        if self._plain is not None:
            first: int = self._plain.first_changed()
            return None if first < 0 else first
        return next((i for i, flight in enumerate(self._flights) if not flight.untouched()), None)

    def _read_flags(
        self, counts: bool, members: int, op: int
    ) -> tuple[list[bool], list[float], _Steps | None]:
        """Return, by position, whether some rank had a gradient, and the rows that travelled dense.

        The rows are those of sparse gradients, of all ranks together. The third is what
        `_check_step` looks at; None if nothing is known.
        """
        size, ways = len(self.params), self._ways
        if ways.dense_for_good and counts and all(flight.present for flight in self._flights):
            self._device_steps = self._device_steps or DeviceSteps()
            steps = self._device_steps.look(self._flags, self._step)
            return [True] * size, [0.0] * size, steps
        self._device_steps = None
        factor = members if op == ops.Average else 1
        *flags, step, ones = self._flags.tolist()
        self._read_further_flags(flags[FLAGS * size :])
        steps = self._step, [step, ones]
        present = [flag > 0 for flag in flags[:size]]
        if ways.dense_for_good:
            return present, [0.0] * size, steps
        rows = [flag * factor for flag in flags[size : 2 * size]]
        for i, (sparse, dimensions) in enumerate(
            zip(flags[2 * size : 3 * size], flags[3 * size : FLAGS * size], strict=True)
        ):
            if sparse > 0:
                ways.agree(i, dimensions / sparse)
        any_rows = any(rows) or self._gathering is not None
        ways.dense_for_good = self._flags.is_cuda and all(present) and not any_rows
        return present, rows, steps

    def _make_masks(
        self, positions: Sequence[int], flights: Sequence[InFlight]
    ) -> dict[int, torch.Tensor]:
        with torch.no_grad():
            return {
                i: self._ways.mask_of(i, flights[i].gradient if flights[i].present else None)
                for i in positions
            }

    def _mask_specs(self, masks: Mapping[int, torch.Tensor]) -> list[_core.Tensor]:
        return [spec(f"{self._labels[i]}.mask", mask, mask) for i, mask in masks.items()]

    def _send_masks(
        self, positions: Sequence[int], flights: Sequence[InFlight], reduction: Reduction
    ) -> dict[int, torch.Tensor]:
        """Reduce the masks of gradients that were not expected to be sparse, and wait."""
        masks = self._make_masks(positions, flights)
        specs = self._mask_specs(masks)
        start_allreduce(f"{self._name}.masks", specs, reduction, masks, blocking=True).wait()
        return masks

    def _arrive(self, position: int, flight: InFlight, mask: torch.Tensor | None) -> None:
        """Put the result of the gradient at this position into `grad`."""
        result = self._by_hand.decompress(flight.target, flight.context)
        if flight.place is not None:
            result = flight.place.take(result)
        if mask is not None:
            flight.param.grad = self._ways.to_sparse(result, mask)
        elif flight.present and flight.place is None and result is not flight.gradient:
            flight.gradient.copy_(result)
        elif not flight.present or result is not flight.gradient:
            flight.param.grad = result

    def reset(self) -> None:
        """Forget what was submitted."""
        self._handle = None
        self._gathering = None
        self._masks = {}
        self._flights = []
        self._plain = None
        self.missing = len(self.params)
