"""The operations of a process group in which ranks send different things to different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from hvdlite import _core
from hvdlite.errors import ArgumentError
from hvdlite.torch.collectives.tensors import readable
from hvdlite.torch.distributed.memory import check, spec, units_of
from hvdlite.torch.distributed.received import Target, deliver, place_of
from hvdlite.torch.distributed.submission import Submissions
from hvdlite.torch.distributed.work import Work

Tensors = Sequence[torch.Tensor]


class Exchanges(Submissions):
    """All of them are an alltoall of the engine, with different splits."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send slices of rows of `source` to all ranks, and put what they send into `output`."""
        check("all_to_all_single", [output, source])
        counts = self._elements("input", source, input_split_sizes)
        wanted = self._elements("output", output, output_split_sizes)
        opts = opts or distributed.AllToAllOptions()
        return self._exchange("all_to_all_single", readable(source), counts, output, wanted, opts)

    def _elements(self, what: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Return how many elements of a tensor belong to each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self._members:
                raise ArgumentError(
                    f"all_to_all_single: the {what} has {rows} rows, which do not divide among "
                    f"{self._members} ranks; give {what}_split_sizes"
                )
            splits = [rows // self._members] * self._members
        if len(splits) != self._members or sum(splits) != rows or min(splits) < 0:
            raise ArgumentError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} do not fit an {what} of "
                f"{rows} rows and {self._members} ranks"
            )
        per_row = tensor.numel() // rows if rows else 0
        return [count * per_row for count in splits]

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send `inputs[r]` to rank r, and put what rank r sends into `outputs[r]`."""
        check("all_to_all", [*outputs, *inputs])
        for tensors in (outputs, inputs):
            if len(tensors) != self._members:
                raise ArgumentError(
                    f"all_to_all: {len(tensors)} tensors for {self._members} ranks; give one each"
                )
        joined = torch.cat([readable(tensor).reshape(-1) for tensor in inputs])
        counts = [tensor.numel() for tensor in inputs]
        wanted = [tensor.numel() for tensor in outputs]
        opts = opts or distributed.AllToAllOptions()
        return self._exchange("all_to_all", joined, counts, list(outputs), wanted, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Give rank `opts.rootRank` the tensors of all ranks: `outputs[0][r]` is that of rank r."""
        opts = opts or distributed.GatherOptions()
        root = opts.rootRank
        targets = list(outputs[0]) if self._own_rank == root else []
        check("gather", [*targets, *inputs])
        if self._own_rank == root and len(targets) != self._members:
            raise ArgumentError(
                f"gather: {len(targets)} output tensors for {self._members} ranks; give one each"
            )
        source = readable(inputs[0])
        counts = [source.numel() if rank == root else 0 for rank in range(self._members)]
        wanted = [one.numel() for one in targets] or [0] * self._members
        return self._exchange(f"gather.{root}", source, counts, targets, wanted, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Send `inputs[0][r]` of rank `opts.rootRank` to rank r, which has it in `outputs[0]`."""
        opts = opts or distributed.ScatterOptions()
        root, target = opts.rootRank, outputs[0]
        sources = list(inputs[0]) if self._own_rank == root else []
        check("scatter", [*sources, target])
        if self._own_rank == root and len(sources) != self._members:
            raise ArgumentError(
                f"scatter: {len(sources)} input tensors for {self._members} ranks; give one each"
            )
        counts = [one.numel() for one in sources] or [0] * self._members
        joined = torch.cat([readable(one).reshape(-1) for one in sources] or [target.new_empty(0)])
        wanted = [target.numel() if rank == root else 0 for rank in range(self._members)]
        return self._exchange(f"scatter.{root}", joined, counts, target, wanted, opts)

    def _exchange(
        self,
        verb: str,
        source: torch.Tensor,
        counts: Sequence[int],
        target: Target,
        wanted: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send `counts` elements of a plain tensor, by rank; receive `wanted` into `target`."""
        # The parts of `source` lie one behind the other. A target is a tensor for all that arrives,
        # or a list of one tensor for each rank; an empty list receives nothing.
        units = units_of(source.dtype)
        place = place_of(verb, target, source)

        def submit(name: str, blocking: bool) -> _core.Handle:
            splits = [count * units for count in counts]
            exchanged = spec(name, source, place.address, place.capacity)
            return self._engine.alltoall(
                name, exchanged, splits, keep=(source, place), blocking=blocking
            )

        def finish(handle: _core.Handle) -> None:
            arrived = [count // units for count in handle.first_dimensions]
            if arrived != list(wanted):
                raise ArgumentError(
                    f"{verb}: {arrived} elements arrived from the ranks, and the outputs of rank "
                    f"{self._own_rank} are for {list(wanted)}; compare the split sizes of the ranks"
                )
            deliver(target, place)

        outputs = target if isinstance(target, list) else [target]
        return self._start(f"{verb}.{source.dtype}", submit, outputs, finish, opts)
