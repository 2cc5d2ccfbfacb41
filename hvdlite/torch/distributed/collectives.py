"""The collectives of a process group, over an engine of its own.

The methods have the names, arguments and meanings of `torch.distributed.ProcessGroup`; `opts` is
always given. Tensors travel as one dimension: their shapes matter to the callers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.torch.collectives.sparse import is_sparse
from hvdlite.torch.collectives.tensors import readable
from hvdlite.torch.distributed.memory import (
    as_written,
    check,
    check_received,
    combine_bits,
    copying,
    counts,
    deliver,
    is_bitwise,
    kind_of,
    one_dtype,
    place_of,
    reduction_of,
    spec,
    spec_of_reduced,
    units_of,
)
from hvdlite.torch.distributed.submission import Submissions
from hvdlite.torch.distributed.work import Work

Tensors = Sequence[torch.Tensor]


class Collectives(Submissions):
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any) -> Work:
        targets = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if targets and all(is_sparse(target) and target.is_cpu for target in targets):
            return self._of_torch("cpu", "gloo").allreduce(targets, opts)
        check("allreduce", targets)
        memories = [as_written(target) for target in targets]
        return self._reduce("allreduce", memories, memories, targets, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Work:
        return Collectives.allreduce(self, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor in place on rank `opts.rootRank`; on the others it does not change."""
        check("reduce", tensors)
        if self._own_rank == opts.rootRank:
            memories = [as_written(tensor) for tensor in tensors]
            return self._reduce(f"reduce.{opts.rootRank}", memories, memories, tensors, opts)
        sources = [readable(tensor) for tensor in tensors]
        unused = [torch.empty_like(source) for source in sources]
        return self._reduce(f"reduce.{opts.rootRank}", sources, unused, unused, opts)

    def _reduce(
        self,
        verb: str,
        sources: Tensors,
        memories: Tensors,
        targets: Tensors,
        opts: Any,
        parts: Sequence[int] | None = None,
    ) -> Work:
        """Reduce plain tensors into other ones, and copy these to `targets` if they differ.

        With `parts` this rank gets a part of each: `parts[r]` elements are for rank r, or as many
        for each rank if `parts` is empty.
        """
        if is_bitwise(opts.reduceOp, sources[0].dtype):
            return self._combine_bits(verb, sources, memories, targets, opts, parts)
        how = reduction_of(verb, opts.reduceOp, [*sources, *memories])
        rows = None
        if parts is not None:
            rows = sources[0].numel() if parts else self._members

        def submit(name: str, blocking: bool) -> _core.Handle:
            specs = [
                spec_of_reduced(f"{name}.{index}", source, memory, how, rows)
                for index, (source, memory) in enumerate(zip(sources, memories, strict=True))
            ]
            given, keep = (name, specs, how.op, how.prescale), (sources, memories)
            if parts is None:
                return self._engine.allreduce(*given, keep=keep, blocking=blocking)
            return self._engine.reducescatter(*given, keep=keep, blocking=blocking, splits=parts)

        signature = f"{verb}{'.uneven' if parts else ''}.{how.word}.{counts(sources)}"
        return self._start(signature, submit, targets, copying(memories, targets), opts)

    def _combine_bits(
        self,
        verb: str,
        sources: Tensors,
        memories: Tensors,
        targets: Tensors,
        opts: Any,
        parts: Sequence[int] | None,
    ) -> Work:
        """Do as `_reduce`, for an operation on bits: the engine has no arithmetic for it.

        Every rank gathers the tensors of all ranks, and combines what it needs.
        """
        kind, dtype = kind_of(opts.reduceOp), one_dtype(verb, [*sources, *memories])
        everything = [source.new_empty(self._members, source.numel()) for source in sources]
        copy = copying(memories, targets)

        def submit(name: str, blocking: bool) -> _core.Handle:
            specs = [
                spec(f"{name}.{index}", source, whole.data_ptr(), whole.nbytes)
                for index, (source, whole) in enumerate(zip(sources, everything, strict=True))
            ]
            keep = sources, everything
            return self._engine.allgather(name, specs, keep=keep, blocking=blocking)

        def finish(handle: _core.Handle) -> None:
            for memory, whole in zip(memories, everything, strict=True):
                begin, count = 0, memory.numel()
                if parts is not None:
                    begin = sum(parts[: self._own_rank]) if parts else self._own_rank * count
                combine_bits(kind, whole[:, begin : begin + count], memory)
            if copy is not None:
                copy(handle)

        return self._start(
            f"{verb}.{kind}.{dtype}.{counts(sources)}", submit, targets, finish, opts
        )

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any) -> Work:
        targets = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        check("broadcast", targets)
        memories = [as_written(target) for target in targets]
        root = opts.rootRank

        def submit(name: str, blocking: bool) -> _core.Handle:
            specs = [
                spec(f"{name}.{index}", memory, memory.data_ptr())
                for index, memory in enumerate(memories)
            ]
            return self._engine.broadcast(name, specs, root, keep=memories, blocking=blocking)

        signature = f"broadcast.{root}.{memories[0].dtype}.{counts(memories)}"
        return self._start(signature, submit, targets, copying(memories, targets), opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Give every rank the tensors of all ranks: `outputs[0][r]` is that of rank r."""
        return self._gather("allgather", inputs, outputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Do several `allgather` together: `outputs[r][i]` is `inputs[i]` of rank r."""
        if any(len(row) != len(inputs) for row in outputs):
            raise ArgumentError(
                f"allgather_coalesced: {len(inputs)} input tensors, and another number of output "
                "tensors for some rank"
            )
        rows = [[row[index] for row in outputs] for index in range(len(inputs))]
        return self._gather("allgather_coalesced", inputs, rows, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Work:
        return self._gather("all_gather_single", [source], [[output]], opts, by_rank=False)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        targets = [[output] for output in outputs]
        return self._gather("all_gather_single", inputs, targets, opts, by_rank=False)

    def _gather(
        self,
        verb: str,
        inputs: Tensors,
        targets: Sequence[Tensors],
        opts: Any,
        by_rank: bool = True,
    ) -> Work:
        """Gather each input of all ranks into a tensor for each rank; not `by_rank`: into one."""
        for target, tensor in zip(targets, inputs, strict=True):
            check(verb, [*target, tensor])
            if by_rank and len(target) != self._members:
                raise ArgumentError(
                    f"{verb}: {len(target)} output tensors for {self._members} ranks; give one each"
                )
        sources = [readable(tensor) for tensor in inputs]
        places = [
            place_of(verb, target, source) for target, source in zip(targets, sources, strict=True)
        ]

        def submit(name: str, blocking: bool) -> _core.Handle:
            specs = [
                spec(f"{name}.{index}", source, place.address, place.capacity)
                for index, (source, place) in enumerate(zip(sources, places, strict=True))
            ]
            return self._engine.allgather(name, specs, keep=(sources, places), blocking=blocking)

        def finish(handle: _core.Handle) -> None:
            rows = handle.first_dimensions
            for index, place in enumerate(places):
                arrived = rows[index * self._members : (index + 1) * self._members]
                check_received(verb, place, arrived if by_rank else [sum(arrived)])
                deliver(place)

        totals = "+".join(str(sum(one.numel() for one in target)) for target in targets)
        signature = f"{verb}.{sources[0].dtype}.{totals}"
        outputs = [one for target in targets for one in target]
        return self._start(signature, submit, outputs, finish, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Reduce `inputs[0][r]` over all ranks into `outputs[0]` of rank r."""
        (output,), (parts,) = outputs, inputs
        check("reduce_scatter", [*parts, output])
        joined = torch.cat([readable(part).reshape(-1) for part in parts])
        splits = [part.numel() for part in parts]
        uneven = splits if len(set(splits)) > 1 else ()
        return self._scatter_reduced("reduce_scatter", [output], [joined], opts, uneven)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Work:
        return Collectives.reduce_scatter_single_coalesced(self, [output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        check("reduce_scatter_single", [*outputs, *inputs])
        return self._scatter_reduced("reduce_scatter_single", outputs, inputs, opts)

    def _scatter_reduced(
        self,
        verb: str,
        outputs: Tensors,
        inputs: Tensors,
        opts: Any,
        splits: Sequence[int] = (),
    ) -> Work:
        """Reduce tensors; rank r gets its r-th part of each, or `splits[r]` elements of the one."""
        for output, tensor in zip(outputs, inputs, strict=True):
            if not splits and tensor.numel() != self._members * output.numel():
                raise ArgumentError(
                    f"{verb}: an input of {tensor.numel()} elements for an output of "
                    f"{output.numel()}; {self._members} ranks need {self._members} times as many"
                )
            if splits and output.numel() != splits[self._own_rank]:
                raise ArgumentError(
                    f"{verb}: an output of {output.numel()} elements for the part of this rank, "
                    f"which has {splits[self._own_rank]}"
                )
        sources = [readable(tensor) for tensor in inputs]
        memories = [as_written(output) for output in outputs]
        return self._reduce(verb, sources, memories, outputs, opts, splits)

    # Ranks send different things to different ranks: all of these are an alltoall of the engine,
    # with different splits.

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send slices of rows of `source` to all ranks, and put what they send into `output`."""
        check("all_to_all_single", [output, source])
        counts = self._elements("input", source, input_split_sizes)
        wanted = self._elements("output", output, output_split_sizes)
        return self._exchange("all_to_all_single", readable(source), counts, [output], wanted, opts)

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

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
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
        return self._exchange("all_to_all", joined, counts, outputs, wanted, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Give rank `opts.rootRank` the tensors of all ranks: `outputs[0][r]` is that of rank r."""
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

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Work:
        """Give rank `opts.rootRank` the tensors of all ranks, one behind the other."""
        root, is_root = opts.rootRank, self._own_rank == opts.rootRank
        target = output if is_root else output.new_empty(0)
        check("gather_single", [target, source])
        counts = [source.numel() if rank == root else 0 for rank in range(self._members)]
        wanted = [part.numel() for part in target.flatten().tensor_split(self._members)]
        verb, outputs = f"gather_single.{root}", [target] if is_root else []
        return self._exchange(verb, readable(source), counts, outputs, wanted, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Send `inputs[0][r]` of rank `opts.rootRank` to rank r, which has it in `outputs[0]`."""
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
        return self._exchange(f"scatter.{root}", joined, counts, [target], wanted, opts)

    def _exchange(
        self,
        verb: str,
        source: torch.Tensor,
        counts: Sequence[int],
        outputs: Tensors,
        wanted: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send `counts` elements of a plain tensor, by rank; receive `wanted` into `outputs`."""
        # The parts of `source` lie one behind the other. The outputs are a tensor for all that
        # arrives, or one for each rank; without any, this rank receives nothing.
        units = units_of(source.dtype)
        place = place_of(verb, outputs, source)

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
            deliver(place)

        return self._start(f"{verb}.{source.dtype}", submit, outputs, finish, opts)

    # Transfers are matched by their order for each pair of ranks and tag, as in MPI. A send is not
    # buffered: it completes when the other rank has received it.

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Work:
        check("send", tensors)
        source = readable(tensors[0])

        def submit(name: str) -> _core.Handle:
            return self._engine.send(name, spec(name, source), to, keep=source)

        return self._start_transfer(f"send.{self._own_rank}.{to}.{tag}", submit, [], None)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Work:
        check("recv", tensors)
        memory = as_written(tensors[0])

        def submit(name: str) -> _core.Handle:
            place = spec(name, memory, memory.data_ptr())
            return self._engine.recv(name, place, source, keep=memory)

        finish = copying([memory], tensors)
        way = f"send.{source}.{self._own_rank}.{tag}"
        return self._start_transfer(way, submit, tensors, finish)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        # The engine matches by names, in which both ranks count the transfers of their pair. This
        # one would get its number when it has met a sender, and each later `recv` that names a
        # source would have to wait for that: rank 0 would have to match sends by source, tag and
        # order.
        raise UnsupportedError(
            "recv: the backend 'hvdlite' of torch.distributed receives from a rank that you name; "
            'give src=, or use a group dist.new_group(backend="gloo")'
        )

    def barrier(self, opts: Any) -> Work:
        def submit(name: str, blocking: bool) -> _core.Handle:
            return self._engine.barrier(name, blocking=blocking)

        return self._start("barrier", submit, [], None, opts)
