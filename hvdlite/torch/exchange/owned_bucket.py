"""Buckets of gradients that go to the owners of their parameters, by a reducescatter (ZeRO-2).

The gradients are packed into *flat* tensors, one for each dtype and device, owner after owner. Each
owner's part of one of them ends with flags, which that owner gets: whether there is a gradient, for
each of its parameters; the number of the step, and a one. A gradient belongs to its owner from then
on: `grad` is None on the other ranks, and on the owner until the result is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite import basics
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.submit import (
    Reduction,
    Submission,
    start_reducescatter,
    take_received,
)
from hvdlite.torch.collectives.tensors import check, spec
from hvdlite.torch.exchange.gradient_bucket import STEPS, GradientBucket
from hvdlite.torch.exchange.gradient_memory import COMMON_FLAGS, flags_dtype
from hvdlite.torch.exchange.layout import layout_spec
from hvdlite.torch.exchange.ownership import Ownership


@dataclass
class _Flat:
    """The gradients of one dtype and device."""

    dtype: torch.dtype
    device: torch.device
    of: list[list[int]]  # Each owner's parameters have these positions in the bucket.
    has_flags: bool = False


class OwnedBucket(GradientBucket):
    """A bucket each of whose gradients one rank gets."""

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        owners: Ownership,
        process_set: ProcessSet,
        sparse_as_dense: bool,
        waiting: list[OwnedBucket],
        layout: int | None = None,
    ) -> None:
        """Make it on a member of the process set, of parameters that have owners in it."""
        super().__init__(name, params, names)
        self._own = process_set.ranks.index(basics.rank())
        self._sparse_as_dense = sparse_as_dense  # Sparse gradients are an error without it.
        self._waiting = waiting  # The results of these buckets have not arrived.
        self._layout = layout  # All ranks must have the same number, see `layout`.
        self._flats: list[_Flat] = []
        self._of = [owners.positions(params, owner) for owner in range(len(process_set.ranks))]
        for owner, positions in enumerate(self._of):
            for position in positions:
                param = params[position]
                self._flat(param.dtype, param.device).of[owner].append(position)
        first = params[0]
        self._flagged = self._flat(flags_dtype(first.dtype), first.device)
        self._flagged.has_flags = True
        self._handle: Submission | None = None
        self._step = 0
        # These are unusual strides of the own gradients.
        self._strides: dict[int, tuple[int, ...]] = {}
        self._like: list[torch.Tensor] = []  # These empty tensors have the kinds of what was sent.
        self._results: list[torch.Tensor] | None = None

    def _flat(self, dtype: torch.dtype, device: torch.device) -> _Flat:
        for flat in self._flats:
            if (flat.dtype, flat.device) == (dtype, device):
                return flat
        self._flats.append(_Flat(dtype, device, [[] for _ in self._of]))
        return self._flats[-1]

    @property
    def submitted(self) -> bool:
        """Whether the gradients are in flight."""
        return self._handle is not None

    @property
    def operations(self) -> list[str]:
        """The names of the operations that are in flight."""
        return [] if self._handle is None else [self._name]

    def submit(self, reduction: Reduction, blocking: bool, step: int) -> None:
        """Submit the gradients, and free them; see `GradientBucket.submit`."""
        for bucket in list(self._waiting):
            bucket.collect()
        with torch.no_grad():
            gradients = [self._gradient(position) for position in range(len(self.params))]
            sources = [self._pack(flat, gradients, step) for flat in self._flats]
        splits = [
            self._count(flat, owner) for flat in self._flats for owner in range(len(self._of))
        ]
        specs = [spec(f"{self._name}.{i}", one, None) for i, one in enumerate(sources)]
        self._like = [one.new_empty(0) for one in sources]
        if self._layout is not None:
            specs.append(layout_spec(f"{self._name}.layout", self._layout, sources[0]))
            splits += [0] * len(self._of)
            self._like.append(sources[0].new_empty(0, self._layout))
        self._handle = start_reducescatter(self._name, specs, reduction, sources, blocking, splits)
        self._step = step
        self._waiting.append(self)
        for param in self.params:
            param.grad = None

    def _gradient(self, position: int) -> torch.Tensor | None:
        """Return a gradient that can be sent, or None."""
        param, name = self.params[position], self._names[position]
        gradient = param.grad
        self._strides.pop(position, None)
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            if not self._sparse_as_dense:
                raise ArgumentError(
                    f"the gradient of {name} is sparse, and ShardedOptimizer with stage=2 sends "
                    "dense ones; give it sparse_as_dense=True, or stage=1"
                )
            gradient = gradient.to_dense()
        check(gradient, name)
        if not gradient.is_contiguous():
            self._strides[position] = torch.empty_like(gradient).stride()
        return gradient

    def _pack(
        self, flat: _Flat, gradients: Sequence[torch.Tensor | None], step: int
    ) -> torch.Tensor:
        parts = []
        for owner, positions in enumerate(flat.of):
            for position in positions:
                gradient = gradients[position]
                if gradient is None:
                    parts.append(self.params[position].new_zeros(self.params[position].numel()))
                else:
                    parts.append(gradient.reshape(-1))
            if flat.has_flags:
                flags = [float(gradients[position] is not None) for position in self._of[owner]]
                flags += [1.0 + step % STEPS, 1.0]
                parts.append(torch.tensor(flags, dtype=flat.dtype, device=flat.device))
        return torch.cat(parts)

    def _count(self, flat: _Flat, owner: int) -> int:
        """Count the elements that an owner gets."""
        count: int = sum(self.params[position].numel() for position in flat.of[owner])
        return count + (len(self._of[owner]) + COMMON_FLAGS if flat.has_flags else 0)

    def collect(self) -> None:
        """Take the results if they are there, so that what was sent is freed."""
        # On a GPU the stream of the thread that finishes has to wait for them.
        on_gpu = any(one.is_cuda for one in self._like)
        if self._handle is None or on_gpu or not self._handle.done():
            return
        with contextlib.suppress(HvdliteError):  # `finish` raises it.
            self._take(self._handle)

    def _take(self, handle: Submission) -> list[torch.Tensor]:
        if self in self._waiting:
            self._waiting.remove(self)
        handle.wait()
        if self._results is None:
            self._results = [one.tensor for one in take_received(handle, self._like)]
        return self._results

    def finish(self, counts: bool, dropped: bool = False) -> None:
        """Wait, and put the own gradients into `grad`; see `GradientBucket.finish`."""
        assert self._handle is not None
        results = self._take(self._handle)
        self.reset()
        present, common = self._read_flags(results[self._flats.index(self._flagged)])
        for name, param in self.named_parameters:
            if not dropped and param.grad is not None:
                raise self._changed(name)
        if not dropped:
            self._check_step(self._step, common)
        for flat, result in zip(self._flats, results, strict=False):
            begin = 0
            for position in flat.of[self._own]:
                count = self.params[position].numel()
                own = result[begin : begin + count]
                begin += count
                self.params[position].grad = (
                    self._shaped(own, position) if present[position] else None
                )

    def _read_flags(self, result: torch.Tensor) -> tuple[dict[int, bool], list[float]]:
        """Return whether some rank had a gradient, by own position, and the bucket's own flags."""
        positions = self._of[self._own]
        flags = result[result.numel() - len(positions) - COMMON_FLAGS :].tolist()
        present = {i: flag > 0 for i, flag in zip(positions, flags, strict=False)}
        return present, flags[-COMMON_FLAGS:]

    def _shaped(self, values: torch.Tensor, position: int) -> torch.Tensor:
        """Return a gradient of these values, with the strides of the one that was sent."""
        shaped = values.view(self.params[position].shape)
        if position not in self._strides:
            return shaped
        strides = self._strides[position]
        return torch.empty_strided(
            shaped.shape, strides, dtype=shaped.dtype, device=shaped.device
        ).copy_(shaped)

    def reset(self) -> None:
        """Forget these gradients in flight."""
        self._handle = None
        self._results = None
        if self in self._waiting:
            self._waiting.remove(self)
