"""Buckets of gradients that all ranks get, reduced by an allreduce.

A *bucket* is a list of parameters whose gradients are submitted as one operation. A parameter is
*present* on a rank that has a gradient for it; the other ranks send zeros, and `BucketFlags` tell.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlite import _core, basics
from hvdlite.errors import HvdliteError
from hvdlite.ops import NoneCompressor, cast_in_core, dtype_number
from hvdlite.torch.bucket_memory import (
    COMMON_FLAGS,
    FLAGS,
    BucketPlaces,
    GradientMemory,
    Place,
    digest,
    flags_dtype,
    form_buckets,
    layout_spec,
)
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.sparse import RowGathering, SparseWays, is_sparse
from hvdlite.torch.collectives.submit import Reduction, Submission, start_allreduce
from hvdlite.torch.collectives.tensors import NUMBER_OF, check, lies_otherwise, spec

Weight = float | Callable[[], float] | None


@dataclass
class Settings:
    """How gradients are reduced; see `DistributedOptimizer` for each."""

    reduction: Reduction
    compression: Any
    passes: int = 1
    groups: int | Sequence[Sequence[torch.Tensor]] = 0
    sparse_as_dense: bool = False
    cap_bytes: int | None = None
    weight: Weight = None
    bucket_view: bool = False  # Users call it gradient_as_bucket_view.
    overlap: bool | None = None  # Backward submits buckets before its end; None chooses.
    virtual_size: int | None = None  # The mean is over so many virtual ranks.


class GradientExchange:
    """How the gradients of one reducer travel: an allreduce for each bucket.

    A mode that sends other things, or in another way, is a subclass in a file of its own.
    """

    # The threads that use the reducer call it. In a cycle a reducer calls `begin`, and `reduction`
    # for each bucket that it submits. It calls `begin_anew` when ranks have missed steps.

    of_one_step = True  # It says whether all gradients that are reduced together are of one step.
    in_step = False  # It says whether step() alone sends something, and backward() nothing.

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name  # It begins the names of all operations, and is unique on this rank.
        self.settings = settings

    def make_buckets(
        self, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> Sequence[Bucket]:
        """Make the buckets of these parameters, whose order is the same on all ranks."""
        formed = form_buckets(params, self.settings.groups, self.settings.cap_bytes)
        named = [[names[param] for param in bucket] for bucket in formed]
        memory = GradientMemory(formed) if self.settings.bucket_view else None
        layout = digest(named)
        return [
            Bucket(
                f"{self.name}.{number}",
                bucket,
                named[number],
                self.settings,
                None if memory is None else functools.partial(memory.of, number),
                layout if number == 0 else None,
            )
            for number, bucket in enumerate(formed)
        ]

    def frozen(self, groups: Sequence[Mapping[str, Any]]) -> Iterable[torch.Tensor]:
        """List parameters that belong to the next cycle also if they are frozen."""
        return ()

    def begin_anew(self) -> None:
        """Forget what other ranks may not remember alike; each bucket does the same."""

    def begin(self) -> None:
        """Begin a cycle."""

    def reduction(self, reduction: Reduction, fresh: bool) -> Reduction:
        """Return how a bucket is combined; `fresh` says that this rank has a gradient."""
        return reduction

    def after_step(self) -> None:
        """Note the end of the optimizer's step; ranks may meet here."""


class Bucket:
    """The gradients of some parameters, cycle after cycle: `submit`, then `finish`."""

    # Between these calls the gradients belong to the core. It is not thread-safe.

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        settings: Settings,
        places: Callable[[], BucketPlaces] | None,
        layout: int | None,
    ) -> None:
        self.params = list(params)
        self._name = name  # It begins the names of its operations, on all ranks.
        self._names = list(names)
        # The core has these names of the parameters; it accepts at most 512 bytes.
        self._labels = [_core.utf8_of_name(one)[:400].decode(errors="ignore") for one in names]
        self._compression = settings.compression
        self._find_places = places  # Without gradient memory gradients are reduced in place.
        self._layout = layout  # All ranks must have the same number, see `digest`.
        self._places: BucketPlaces | None = None  # This is the memory of this step.
        # The keys are casts; the specs are of the places.
        self._plain_specs: dict[int | None, list[_core.Tensor]] = {}
        self._ways = SparseWays(self.params, settings.sparse_as_dense)
        self._flags = BucketFlags(self.params, self._ways)
        self._sent: Sent | None = None

    @property
    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self._names, self.params, strict=True))

    @property
    def submitted(self) -> bool:
        return self._sent is not None

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
            positions = sorted(by_rows)
            with torch.no_grad():
                gathering = RowGathering(
                    [flights[position].wire for position in positions],
                    [self._labels[position] for position in positions],
                    f"{self._name}.rows",
                    sent.reduction,
                    self._compression,
                )
            sent.rows = positions, gathering
        keep = memory, flags
        sent.handle = start_allreduce(self._name, specs, sent.reduction, keep, blocking)

    def _leave(self, sent: Sent, position: int) -> InFlight:
        """Return this rank's gradient, or zeros, with the tensor to send for it."""
        param = self.params[position]
        gradient = param.grad
        present = gradient is not None
        if position in self._ways.by_rows:
            rows = self._ways.rows_of(position)
            return InFlight(param, gradient if present else rows, rows, present)
        place = None if self._places is None else self._places.gradients[position]
        if place is not None and not place.suits(param):
            place = None
        if gradient is None and place is not None:
            gradient = place.view.zero_()
        elif gradient is None:
            gradient = torch.zeros_like(param, memory_format=torch.contiguous_format)
        elif gradient.layout != torch.strided and self._ways.as_dense:
            # The gradient becomes dense permanently.
            gradient = param.grad = gradient.to_dense()
        sparse = is_sparse(gradient)
        dense = gradient.coalesce().to_dense() if sparse else gradient
        check(dense, self._names[position])
        if lies_otherwise(dense):
            dense = dense.resolve_conj().resolve_neg()
        flight = InFlight(param, gradient, dense, present, sparse, place)
        wire, flight.context = sent.by_hand.compress(dense if place is None else place.wire(dense))
        flight.wire = flight.target = wire.contiguous()
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
        self.reset()
        if changed is not None:
            raise HvdliteError(
                f"the gradient of {self._names[changed]} was changed while it was being reduced, "
                "and is wrong now; call optimizer.synchronize() after backward(), before clipping, "
                "unscaling, zeroing or a second backward()"
            )
        if not dropped and steps is not None:
            self._check_step(*steps)
        with torch.no_grad():
            for i, flight in enumerate(flights):
                if not present[i]:
                    flight.param.grad = None
                elif i in gathered:
                    flight.param.grad = gathered[i]
                else:
                    result = sent.by_hand.decompress(flight.target, flight.context)
                    if flight.place is not None:
                        result = flight.place.take(result)
                    if sparse[i]:
                        result = self._ways.to_sparse(i, result)
                    elif flight.kept and result is not flight.gradient:
                        result = flight.gradient.copy_(result)
                    flight.param.grad = result

    def reset(self) -> None:
        self._sent = None

    def _check_step(self, step: int, flags: Sequence[float]) -> None:
        # The flags are the means of the ranks' flags of their steps, and of ones.
        of_steps, ones = flags
        if ones > 0 and abs(of_steps / ones - (1.0 + step % STEPS)) > 0.25:
            raise HvdliteError(
                f"rank {basics.rank()}: the gradients of its step {step + 1}, in "
                f"'{self._name}', met those of another step of other ranks and are wrong now. Call "
                "backward() and step() equally often on every rank; run further backward() calls "
                "of one rank under optimizer.no_sync(), and end uneven data with hvd.join()"
            )


@dataclass(eq=False)
class InFlight:
    param: torch.Tensor
    gradient: torch.Tensor  # It is the parameter's own gradient if it has one, or zeros.
    wire: torch.Tensor  # This tensor is reduced; it may be `gradient` itself.
    present: bool = True  # The parameter has a gradient.
    sparse: bool = False  # The gradient is sparse, and travels dense.
    place: Place | None = None  # It is the part of the gradient memory for `grad`.
    context: Any = None  # The compressor made it.

    def __post_init__(self) -> None:
        self.target = self.wire  # The core writes the result here.
        self._submitted_as = self.gradient._version, address_of(self.gradient)

    @property
    def kept(self) -> bool:
        """Whether the parameter keeps its own gradient, to which the result is copied."""
        return self.present and self.place is None

    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return tensors that keep alive the memory that the core reads and writes."""
        # The gradient itself is not enough: the script may replace its `data` meanwhile.
        wire = self.wire.detach() if self.wire is self.gradient else self.wire
        return (wire,) if self.target is self.wire else (wire, self.target)

    def untouched(self) -> bool:
        if not self.present:
            return self.param.grad is None
        now = self.gradient._version, address_of(self.gradient)
        return self.param.grad is self.gradient and now == self._submitted_as


def address_of(gradient: torch.Tensor) -> int:
    address: int = (gradient._values() if gradient.is_sparse else gradient).data_ptr()
    return address


@dataclass
class Sent:
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
        """Return the position of the first gradient that the script has changed."""
        if self.plain is not None:
            first: int = self.plain.first_changed()
            return None if first < 0 else first
        return next((i for i, flight in enumerate(self.flights) if not flight.untouched()), None)

    def each(self, params: Sequence[torch.Tensor]) -> list[InFlight]:
        """Return all gradients in flight, plain ones as well."""
        if self.plain is None:
            return self.flights
        pairs = zip(params, self.plain.gradients, strict=True)
        return [InFlight(param, gradient, gradient) for param, gradient in pairs]


STEPS = 8  # Step numbers are modulo this: few, so that rounding of 16-bit floats does not matter.


class BucketFlags:
    """The flags that travel with the gradients of a bucket: what each rank has to say of its own.

    For each parameter they say whether the rank had a gradient, whether that was sparse and travels
    dense, and its sparse dimensions. Then come the number of the rank's step, and a one: all ranks
    learn from the reduced ones how many counted. Without the step, gradients of a rank that called
    backward() more often would be reduced with those of the others' next step unnoticed.
    """

    def __init__(self, params: Sequence[torch.Tensor], ways: SparseWays) -> None:
        # The flags have their own memory or lie in the gradient memory.
        self.tensor = torch.empty(0, device="cpu")
        self._params = params
        self._ways = ways
        self._device_steps: DeviceSteps | None = None  # These are flags that are not waited for.

    def write(self, sent: Sent) -> None:
        count, flights = len(self._params), sent.flights
        step = 1.0 + sent.step % STEPS
        size = FLAGS * count + COMMON_FLAGS
        as_params = sent.plain is not None or is_sparse(flights[0].wire)
        dtype = flags_dtype((self._params[0] if as_params else flights[0].wire).dtype)
        flags, device = self.tensor, self._params[0].device
        if (flags.numel(), flags.dtype, flags.device) != (size, dtype, device):
            flags = self.tensor = torch.empty(size, dtype=dtype, device=device)
        if all(flight.present and not flight.sparse for flight in flights):
            flags.fill_(1)  # `flags[i] = 1` would make the host wait for a GPU.
            flags[count:-2].zero_()
            flags[-2:-1].fill_(step)
        else:
            values: list[float] = [flight.present for flight in flights]
            values += [flight.sparse for flight in flights]
            values += [one.gradient.sparse_dim() if one.sparse else 0 for one in flights]
            values += [step, 1.0]
            written = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=flags.is_cuda)
            flags.copy_(written, non_blocking=True)

    def read(self, sent: Sent, counts: bool) -> tuple[list[bool], list[bool], Steps | None]:
        """Read the reduced flags; `counts` says whether this rank's weight is not zero.

        By position: whether some rank had a gradient, and whether a sparse one travelled dense.
        Then come a step of this rank and its reduced flags, once they are known.
        """
        size, ways = len(self._params), self._ways
        if ways.dense_for_good and counts and all(flight.present for flight in sent.flights):
            self._device_steps = self._device_steps or DeviceSteps()
            steps = self._device_steps.look(self.tensor, sent.step)
            return [True] * size, [False] * size, steps
        self._device_steps = None
        *flags, step, ones = self.tensor.tolist()
        known = sent.step, [step, ones]
        present = [flag > 0 for flag in flags[:size]]
        if ways.dense_for_good:
            return present, [False] * size, known
        sparse = flags[size : 2 * size]
        for i, dimensions in enumerate(flags[2 * size :]):
            if sparse[i] > 0:
                ways.agree(i, dimensions / sparse[i])
        any_rows = any(sparse) or sent.rows is not None
        ways.dense_for_good = self.tensor.is_cuda and all(present) and not any_rows
        return present, [flag > 0 for flag in sparse], known


Steps = tuple[int, list[float]]
BEHIND = 2  # The host may be as many steps ahead of its GPU.


class DeviceSteps:
    """Copies a bucket's last flags to the host, and reads them `BEHIND` steps later."""

    # So the host seldom waits for the GPU, and all ranks learn of a step in the same later step.
    # Ranks that are at different steps stay so, and all of them raise an error there.

    def __init__(self) -> None:
        self._copies: deque[tuple[int, torch.Tensor, torch.cuda.Event]] = deque()
        self._engine: object = None  # The copies are from this engine's world.

    def look(self, flags: torch.Tensor, step: int) -> Steps | None:
        """Start a copy of reduced flags; return step and flags of `BEHIND` steps ago, if any."""
        found = None
        if self._engine is not basics.engine():
            self._engine = basics.engine()
            self._copies.clear()  # What a world that failed has left may be anything.
        if len(self._copies) == BEHIND:
            then, copy, arrived = self._copies.popleft()
            arrived.synchronize()
            found = then, copy.tolist()
        else:
            copy = torch.empty(COMMON_FLAGS, dtype=flags.dtype, device="cpu", pin_memory=True)
            arrived = torch.cuda.Event()
        copy.copy_(flags[-COMMON_FLAGS:], non_blocking=True)
        arrived.record(torch.cuda.current_stream(flags.device))
        self._copies.append((step, copy, arrived))
        return found
