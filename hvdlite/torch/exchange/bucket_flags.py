"""The flags that travel with the gradients of a bucket: what each rank has to say of its own.

A vector has, for each parameter: whether the rank had a gradient, whether that was sparse and
travels dense, and its sparse dimensions. Then come the number of the rank's step, and a one: all
ranks learn from the reduced ones how many counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite.torch.bucket_memory import COMMON_FLAGS, FLAGS, flags_dtype
from hvdlite.torch.collectives.sparse import SparseWays, is_sparse
from hvdlite.torch.exchange.device_steps import DeviceSteps
from hvdlite.torch.exchange.in_flight import Sent

STEPS = 8  # Step numbers are modulo this: few, so that rounding of 16-bit floats does not matter.


class Told(NamedTuple):
    """What the reduced flags say."""

    present: list[bool]  # This says by position whether some rank had a gradient.
    sparse: list[bool]  # This says by position whether a sparse gradient travelled dense.
    # This rank's step and the flags are for `Bucket._check_step`, when they are known.
    steps: tuple[int, list[float]] | None


class BucketFlags:
    """The flags of one bucket, cycle after cycle. Not thread-safe."""

    def __init__(self, params: Sequence[torch.Tensor], ways: SparseWays) -> None:
        """Make them for the parameters of a bucket, whose sparse gradients travel in these ways."""
        # The flags have their own memory or lie in the gradient memory.
        self.tensor = torch.empty(0, device="cpu")
        self._params = params
        self._ways = ways
        self._device_steps: DeviceSteps | None = None  # These are flags that are not waited for.

    def write(self, sent: Sent) -> None:
        """Write the flags of what is about to be submitted."""
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
            values += [self._ways.dimensions_of(flight.gradient) for flight in flights]
            values += [step, 1.0]
            written = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=flags.is_cuda)
            flags.copy_(written, non_blocking=True)

    def read(self, sent: Sent, counts: bool) -> Told:
        """Read the reduced flags; `counts` says whether this rank's weight is not zero."""
        size, ways = len(self._params), self._ways
        if ways.dense_for_good and counts and all(flight.present for flight in sent.flights):
            self._device_steps = self._device_steps or DeviceSteps()
            steps = self._device_steps.look(self.tensor, sent.step)
            return Told([True] * size, [False] * size, steps)
        self._device_steps = None
        *flags, step, ones = self.tensor.tolist()
        known = sent.step, [step, ones]
        present = [flag > 0 for flag in flags[:size]]
        if ways.dense_for_good:
            return Told(present, [False] * size, known)
        sparse = flags[size : 2 * size]
        for i, dimensions in enumerate(flags[2 * size :]):
            if sparse[i] > 0:
                ways.agree(i, dimensions / sparse[i])
        any_rows = any(sparse) or sent.rows is not None
        ways.dense_for_good = self.tensor.is_cuda and all(present) and not any_rows
        return Told(present, [flag > 0 for flag in sparse], known)
