"""The mean of all ranks' changes in a round of local SGD, on its way.

An exchange sends when it is made, so that training goes on meanwhile, and `wait` returns the mean,
with the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvdlite import ops
from hvdlite.compression import cast_in_core
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.gather import allgather_async, alltoall_async
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import grouped
from hvdlite.torch.compression import BLOCK, BlockCompressor


class Exchange(Protocol):
    """A mean on its way."""

    def advance(self) -> None:
        """Send what follows from what has arrived; all ranks call it in the same steps."""

    def wait(self) -> list[torch.Tensor]:
        """Wait for the mean, and return it."""


class MeanExchange:
    """One allreduce of all tensors."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        compression: Any,
        weight: float | None,
        process_set: ProcessSet,
    ) -> None:
        """Send contiguous tensors, to be overwritten; all ranks give a weight, or none does."""
        wire, self._compression = cast_in_core(compression, ops.Average)
        packed = [self._compression.compress(tensor) for tensor in tensors]
        self._contexts = [context for _, context in packed]
        reduction = Reduction(ops.Average, weight=weight, process_set=process_set, wire=wire)
        sent = grouped("allreduce", [one for one, _ in packed], name, process_set)
        self._handle = start_reducing(sent, reduction, in_place=True)

    def advance(self) -> None:
        """Do nothing: one operation is all."""

    def wait(self) -> list[torch.Tensor]:
        """Wait for the mean, and return it."""
        means = zip(self._handle.wait(), self._contexts, strict=True)
        return [self._compression.decompress(mean, context) for mean, context in means]


class PackedExchange:
    """Each rank gets a share of all ranks' packed blocks, sums it, and sends the packed mean."""

    # All ranks unpack the same bytes. A rank that has joined cannot be left out.

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        compression: type[BlockCompressor],
        weight: float | None,
        process_set: ProcessSet,
    ) -> None:
        """Send each member its share; arguments as for `MeanExchange`."""
        if weight is not None and not 0.0 <= weight < float("inf"):
            raise ArgumentError(f"'{name}': a weight is a finite number, zero or more")
        self._name, self._compression, self._process_set = name, compression, process_set
        self._tensors = tensors
        device = tensors[0].device
        flat = torch.cat([_real(one).reshape(-1).to(device, torch.float32) for one in tensors])
        rows = compression.pack(flat)
        self._rows = len(rows)
        members = len(process_set.ranks)
        shares = [self._rows // members + (i < self._rows % members) for i in range(members)]
        self._members, self._share = members, shares[process_set.rank() or 0]
        self._parts = alltoall_async(rows, shares, f"{name}.parts", process_set)
        self._weights: Any = None
        if weight is not None:
            mine = torch.tensor([weight], dtype=torch.float64, device="cpu")
            self._weights = allgather_async(mine, f"{name}.weights", process_set)
        self._means: Any = None

    def advance(self) -> None:
        """Sum this rank's share, in ascending order of the ranks, and send the mean."""
        if self._means is not None:
            return
        received, _ = self._parts.wait()
        self._check(len(received), self._share * self._members)
        numbers = self._compression.unpack(received)
        parts = numbers.view(self._members, self._share * BLOCK)
        weights = [1.0] * self._members
        if self._weights is not None:
            weights = self._weights.wait().tolist()
        self._check(len(weights), self._members)
        total = torch.zeros_like(parts[0])
        for part, weight in zip(parts, weights, strict=True):
            if weight:
                total += part * weight
        mean = self._compression.pack(total / (sum(weights) or 1.0))
        self._means = allgather_async(mean, f"{self._name}.means", self._process_set)

    def wait(self) -> list[torch.Tensor]:
        """Wait for the mean, and return it."""
        self.advance()
        rows = self._means.wait()
        self._check(len(rows), self._rows)
        flat = self._compression.unpack(rows)
        means, begin = [], 0
        for tensor in self._tensors:
            real = _real(tensor)
            mean = flat[begin : begin + real.numel()].view(real.shape)
            mean = mean.to(tensor.device, real.dtype)
            means.append(torch.view_as_complex(mean) if tensor.is_complex() else mean)
            begin += real.numel()
        return means

    def _check(self, found: int, expected: int) -> None:
        if found != expected:
            raise HvdliteError(
                f"'{self._name}': a rank has called join() during a packed round; with "
                "Compression.int8 or int4 give every rank the same number of steps"
            )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor; a complex one has two for each element."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def start_exchange(
    name: str,
    tensors: Sequence[torch.Tensor],
    compression: Any,
    weight: float | None,
    process_set: ProcessSet,
) -> Exchange:
    """Send tensors in the way that the compression asks for."""
    kind = compression if isinstance(compression, type) else type(compression)
    if issubclass(kind, BlockCompressor):
        return PackedExchange(name, tensors, kind, weight, process_set)
    return MeanExchange(name, tensors, compression, weight, process_set)
