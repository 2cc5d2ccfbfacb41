"""Buckets of gradients that all ranks get, reduced by an allreduce.

A *bucket* is a list of parameters whose gradients are submitted as one operation. A parameter is
*present* on a rank that has a gradient for it; the other ranks send zeros. Flags travel with the
gradients (see `bucket_flags`): if no rank had a gradient, every rank leaves `grad` at None. Without
the number of the step among them, if a rank called backward() more often than the others, its
gradients would be reduced with those of their next step unnoticed. Sparse gradients travel dense
once, and then as rows, by a second operation (see `sparse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import _core, basics
from hvdlite.errors import HvdliteError
from hvdlite.ops import NoneCompressor, cast_in_core, dtype_number
from hvdlite.torch.bucket_memory import BucketPlaces
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.sparse import RowGathering, SparseWays, is_sparse
from hvdlite.torch.collectives.submit import Reduction, start_allreduce
from hvdlite.torch.collectives.tensors import NUMBER_OF, check, lies_otherwise, spec
from hvdlite.torch.exchange.bucket_flags import STEPS, BucketFlags
from hvdlite.torch.exchange.in_flight import InFlight, Sent, address_of
from hvdlite.torch.exchange.layout import layout_spec


class Bucket:
    """The gradients of some parameters, cycle after cycle: `submit`, then `finish`."""

    # Between these calls the gradients belong to the core. It is not thread-safe.

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
        """Make it; `name` identifies its operations on all ranks."""
        self.params = list(params)
        self._name = name
        self._names = list(names)
        # The core has these names of the parameters; it accepts at most 512 bytes.
        self._labels = [_core.utf8_of_name(one)[:400].decode(errors="ignore") for one in names]
        self._compression = compression
        self._find_places = places  # Without gradient memory gradients are reduced in place.
        self._layout = layout  # All ranks must have the same number, see `layout`.
        self._places: BucketPlaces | None = None  # This is the memory of this step.
        # The keys are casts; the specs are of the places.
        self._plain_specs: dict[int | None, list[_core.Tensor]] = {}
        self._ways = SparseWays(self.params, sparse_as_dense)
        self._flags = BucketFlags(self.params, self._ways)
        self._sent: Sent | None = None

    @property
    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters and their names."""
        return list(zip(self._names, self.params, strict=True))

    @property
    def submitted(self) -> bool:
        """Whether the gradients are in flight."""
        return self._sent is not None and self._sent.handle is not None

    @property
    def operations(self) -> list[str]:
        """The names of the operations that are in flight."""
        sent = self._sent
        if sent is None or sent.handle is None:
            return []
        return [self._name, *([] if sent.rows is None else [f"{self._name}.rows"])]

    def begin_anew(self) -> None:
        """Let all gradients travel dense next, because some ranks have missed steps."""
        self._ways.begin_anew()

    def submit(self, reduction: Reduction, blocking: bool, step: int) -> None:
        """Submit the gradients, and zeros for missing ones; if it raises, nothing was submitted."""
        # All ranks count `step` alike. With `blocking` the caller will wait at once.
        if self._find_places is not None:
            places = self._find_places()
            if places is not self._places:
                self._places, self._flags.tensor = places, places.flags
        sent = Sent(reduction, step, *cast_in_core(self._compression, reduction.op))
        sent.plain = self._read_plain(sent)
        with torch.no_grad():
            if sent.plain is None:
                sent.flights = [self._leave(sent, position) for position in range(len(self.params))]
            self._flags.write(sent)
        self._send(sent, blocking)
        self._sent = sent

    def _read_plain(self, sent: Sent) -> Any:
        """Read all gradients in one call if the core can reduce them as they lie; else None."""
        if self._ways.by_rows or self._places or sent.by_hand is not NoneCompressor:
            return None
        if sent.cast not in self._plain_specs:
            self._plain_specs[sent.cast] = self._describe_plain(sent.cast)
        return fast_path.read_gradients(self.params, self._plain_specs[sent.cast])

    def _describe_plain(self, cast: int | None) -> list[_core.Tensor]:
        """Describe gradients that lie like their parameters; nothing if a parameter is special."""
        for param in self.params:
            ordinary = type(param) in (torch.Tensor, torch.nn.Parameter)
            if not ordinary or param.device.type not in ("cpu", "cuda"):
                return []
            if param.layout != torch.strided or param.dtype not in NUMBER_OF:
                return []
        labelled = zip(self._labels, self.params, strict=True)
        return [spec(label, param, None, cast) for label, param in labelled]

    def _send(self, sent: Sent, blocking: bool) -> None:
        """Submit all gradients and the flags."""
        by_rows, flights, flags = self._ways.by_rows, sent.flights, self._flags.tensor
        if sent.plain is not None:
            specs = list(self._plain_specs[sent.cast])
            memory: list[Any] = [sent.plain, *(sent.plain.gradients if flags.is_cuda else ())]
        else:
            specs = [
                spec(self._labels[i], flight.wire, flight.target, sent.cast)
                for i, flight in enumerate(flights)
                if i not in by_rows
            ]
            memory = [flight.memory() for i, flight in enumerate(flights) if i not in by_rows]
        # float16 is too narrow for the share of a rank with a small weight.
        narrow = None if sent.cast == dtype_number("float16") else sent.cast
        if self._layout is not None:
            specs.append(layout_spec(f"{self._name}.layout", self._layout, flags, narrow))
        specs.append(spec(f"{self._name}.flags", flags, flags, narrow))
        if by_rows:
            self._gather(sent, sorted(by_rows))
        keep = memory, flags
        sent.handle = start_allreduce(self._name, specs, sent.reduction, keep, blocking)

    def _gather(self, sent: Sent, positions: list[int]) -> None:
        with torch.no_grad():
            gathering = RowGathering(
                [sent.flights[position].wire for position in positions],
                [self._labels[position] for position in positions],
                f"{self._name}.rows",
                sent.reduction,
                self._compression,
            )
        sent.rows = positions, gathering

    def _leave(self, sent: Sent, position: int) -> InFlight:
        param = self.params[position]
        if position in self._ways.by_rows:
            gradient, wire = param.grad, self._ways.rows_of(position)
            version = -1 if gradient is None else gradient._version
            gradient = wire if gradient is None else gradient
            return InFlight(param, gradient, version, address_of(gradient), wire, None, wire)
        return self._compress(sent, self._own(position))

    def _own(self, position: int) -> InFlight:
        """Return this rank's gradient, or zeros, as a dense tensor that can be sent."""
        param = self.params[position]
        gradient, version = param.grad, -1
        place = None if self._places is None else self._places.gradients[position]
        if place is not None and not place.suits(param):
            place = None
        if gradient is None and place is not None:
            gradient = place.view.zero_()
        elif gradient is None:
            gradient = torch.zeros_like(param, memory_format=torch.contiguous_format)
        else:
            if gradient.layout != torch.strided and self._ways.as_dense:
                # The gradient becomes dense permanently.
                gradient = param.grad = gradient.to_dense()
            version = gradient._version
        sparse = is_sparse(gradient)
        dense = gradient.coalesce().to_dense() if sparse else gradient
        check(dense, self._names[position])
        if lies_otherwise(dense):
            dense = dense.resolve_conj().resolve_neg()
        address = address_of(gradient)
        return InFlight(param, gradient, version, address, dense, None, dense, sparse, place)

    def _compress(self, sent: Sent, flight: InFlight) -> InFlight:
        """Make of a dense gradient what travels."""
        dense, place = flight.wire, flight.place
        if place is not None:
            dense = place.wire(dense)
        wire, flight.context = sent.by_hand.compress(dense)
        flight.wire = wire.contiguous()
        flight.target = flight.wire
        if place is not None and place.takes(flight.wire):
            flight.target = place.memory
        return flight

    def finish(self, counts: bool, dropped: bool = False) -> None:
        """Wait, and put the results into `grad`; raise if that failed or a gradient was changed."""
        # `counts` says whether this rank's weight is not zero. If the results are `dropped`,
        # changed gradients are not an error.
        sent = self._sent
        assert sent is not None and sent.handle is not None
        sent.handle.wait()
        changed = None if dropped else sent.first_changed()
        gathered: dict[int, torch.Tensor] = {}
        if sent.rows is not None:
            positions, gathering = sent.rows
            gathered = dict(zip(positions, gathering.finish(), strict=True))
        present, sparse, steps = self._flags.read(sent, counts)
        arrived = sent.plain is not None and all(present) and not any(sparse)
        flights = [] if arrived else sent.each(self.params)
        # All ranks do this, before any of them raises below.
        masks = self._send_masks(sparse, flights, sent.reduction) if any(sparse) else {}
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
                    flight.param.grad = gathered[i]
                else:
                    self._arrive(sent, flight, masks.get(i))

    def _send_masks(
        self, sparse: Sequence[bool], flights: Sequence[InFlight], reduction: Reduction
    ) -> dict[int, torch.Tensor]:
        """Reduce the masks of gradients that were not expected to be sparse, and wait."""
        with torch.no_grad():
            masks = {
                i: self._ways.mask_of(i, flight.gradient if flight.present else None)
                for i, flight in enumerate(flights)
                if sparse[i]
            }
        specs = [spec(f"{self._labels[i]}.mask", mask, mask) for i, mask in masks.items()]
        start_allreduce(f"{self._name}.masks", specs, reduction, masks, blocking=True).wait()
        return masks

    def _arrive(self, sent: Sent, flight: InFlight, mask: torch.Tensor | None) -> None:
        """Put the result of a gradient into `grad`."""
        result = sent.by_hand.decompress(flight.target, flight.context)
        if flight.place is not None:
            result = flight.place.take(result)
        if mask is not None:
            flight.param.grad = self._ways.to_sparse(result, mask)
        elif flight.present and flight.place is None and result is not flight.gradient:
            flight.gradient.copy_(result)
        elif not flight.present or result is not flight.gradient:
            flight.param.grad = result

    def reset(self) -> None:
        """Forget what was submitted in this cycle."""
        self._sent = None

    def _check_step(self, step: int, flags: Sequence[float]) -> None:
        """Raise an error if gradients of different steps were reduced together."""
        # The flags are the means of the ranks' flags of their steps, and of ones.
        of_steps, ones = flags
        if ones > 0 and abs(of_steps / ones - (1.0 + step % STEPS)) > 0.25:
            raise HvdliteError(
                f"rank {basics.rank()}: the gradients of its step {step + 1}, in "
                f"'{self._name}', met those of another step of other ranks and are wrong now. Call "
                "backward() and step() equally often on every rank; run further backward() calls "
                "of one rank under optimizer.no_sync(), and end uneven data with hvd.join()"
            )

    def _changed(self, name: str) -> HvdliteError:
        error: HvdliteError = HvdliteError(
            f"the gradient of {name} was changed while it was being reduced, and is wrong "
            "now; call optimizer.synchronize() after backward(), before clipping, "
            "unscaling, zeroing or a second backward()"
        )
        return error
