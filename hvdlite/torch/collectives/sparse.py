"""Sparse gradients: the rows of all ranks are gathered, and equal indices added up.

A sparse tensor travels as *rows*: it is coalesced, so that each index is sent once, and its indices
and values are sent by one grouped allgather. A rank without a gradient does not know that the
gradient would be sparse. So in the first step every gradient travels dense, together with a flag
that says whether it is sparse. If it is, it becomes sparse again where it arrives, without rows of
zeros, and from the next step on all ranks send rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.ops import NoneCompressor, next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id
from hvdlite.torch.collectives.autograd import Handle
from hvdlite.torch.collectives.submit import Received, Reduction, submit, take_received
from hvdlite.torch.collectives.tensors import check, readable, spec
from hvdlite.torch.dynamo import outside_graphs


class SparseHandle(Handle):
    """A handle that may also be called for its result, like the handles of Horovod."""

    def __call__(self) -> torch.Tensor:
        return self.wait()


class _Rows(NamedTuple):
    shape: torch.Size
    indices: torch.Tensor  # [rows, sparse dimensions], int64
    values: torch.Tensor  # [rows, ...], compressed
    context: Any  # of the compressor


def is_sparse(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.layout == torch.sparse_coo


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool | None = None
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        device=values.device,
        check_invariants=False,
        is_coalesced=is_coalesced,
    )


def _take_rows(tensor: torch.Tensor, compression: Any, scale: float) -> _Rows:
    tensor = tensor.detach().coalesce()
    values = tensor.values() if scale == 1.0 else tensor.values() * scale
    wire, context = compression.compress(values.contiguous())
    return _Rows(tensor.shape, tensor.indices().t().contiguous(), readable(wire), context)


class RowGathering:
    """A grouped allgather of the rows of some tensors, in flight."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        name: str,
        reduction: Reduction,
        compression: Any,
    ) -> None:
        """Submit an allgather of sparse tensors for a mean or sum; a zero weight sends no rows."""
        self._reduction = reduction
        self._compression = compression
        self._rows = [_take_rows(one, compression, reduction.prescale) for one in tensors]
        if reduction.weight == 0:
            self._rows = [
                row._replace(indices=row.indices[:0], values=row.values[:0]) for row in self._rows
            ]
        weight = torch.tensor([reduction.weight or 0.0], dtype=torch.float64, device="cpu")
        self._sources = [part for row in self._rows for part in (row.indices, row.values)]
        self._sources.append(weight)
        labels = [f"{one}.{part}" for one in names for part in ("indices", "values")]
        labels.append(f"{name}.weight")
        for source, label in zip(self._sources, labels, strict=True):
            check(source, label)
        specs = [spec(label, s, None) for label, s in zip(labels, self._sources, strict=True)]
        gather = basics.engine().allgather
        enqueue = partial(gather, name, specs, transaction=reduction.transaction)
        self.submission = submit(
            enqueue, specs, reduction.process_set, self._sources, blocking=False
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def finish(self) -> list[torch.Tensor]:
        """Wait, and return the results by tensor, sparse and coalesced."""
        self.submission.wait()
        received = take_received(self.submission, self._sources)
        factors = self._factors(received[-1])
        results = []
        for row, indices, values in zip(self._rows, received[0:-1:2], received[1::2], strict=True):
            wide = self._compression.decompress(values.tensor, row.context)
            if factors is not None:
                rows = torch.tensor(values.rows, device="cpu")
                each = torch.repeat_interleave(factors, rows)
                wide = wide * each.to(wide).reshape(-1, *[1] * (wide.dim() - 1))
            result = sparse_tensor(indices.tensor.t(), wide, row.shape)
            results.append(result.coalesce())
        return results

    def _factors(self, weights: Received) -> torch.Tensor | None:
        """Return the factor for the rows of each rank; None if all are 1."""
        op, _, postscale, weight, *_ = self._reduction
        ranks = len(weights.rows)
        if weight is None:
            factor = postscale / (self.submission.core.members if op == ops.Average else 1)
            if factor == 1.0:
                return None
            return torch.full((ranks,), factor, dtype=torch.float64, device="cpu")
        # A rank that has joined sends no weight.
        shares = torch.zeros(ranks, dtype=torch.float64, device="cpu")
        shares[torch.tensor(weights.rows, device="cpu") > 0] = weights.tensor
        total = shares.sum()
        return shares * (postscale / total) if total > 0 else shares


@outside_graphs
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> SparseHandle:
    """Start to reduce a sparse tensor over all ranks into a new one.

    Args:
        tensor: in torch's COO layout; of the same shape on all ranks, with any number of entries.
            Entries of the same index are added up before they are sent.
        name, process_set, prescale_factor, postscale_factor: as for `allreduce`.
        op: `Average` or `Sum`.

    Returns:
        A handle for `synchronize`, which may also be called; the result is sparse and coalesced.

    Raises:
        ArgumentError: the tensor is not sparse, or `op` is not `Average` or `Sum`.

    Example:
        >>> handle = hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), op=hvd.Sum)
        >>> total = hvd.synchronize(handle)
    """
    name = name or next_name("sparse_allreduce", member_id(process_set))
    if not isinstance(tensor, torch.Tensor) or not is_sparse(tensor):
        raise ArgumentError(
            f"'{name}' is not a sparse (COO) tensor; use allreduce() for dense ones"
        )
    op = ops.reduce_op(op)
    if op not in (ops.Average, ops.Sum):
        raise ArgumentError(
            f"'{name}': rows of op=hvd.{ops.op_name(op)} cannot be gathered; use hvd.Average or "
            "hvd.Sum, or allreduce() of tensor.to_dense()"
        )
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set=process_set)
    gathering = RowGathering([tensor], [name], name, reduction, NoneCompressor)
    return SparseHandle(gathering.submission, lambda _: gathering.finish()[0])


class SparseWays:
    """Knows, alike on all ranks, which gradients of a bucket travel as rows."""

    def __init__(self, params: Sequence[torch.Tensor], sparse_as_dense: bool) -> None:
        self._params = params
        self._sparse_as_dense = sparse_as_dense  # Sparse gradients become dense permanently.
        self.by_rows: set[int] = set()  # the positions of gradients that travel as rows next
        # On a GPU a search for sparse gradients in each cycle would make the host wait; so once all
        # parameters had gradients and none was sparse, the bucket is dense permanently.
        self.dense_for_good = False
        self._dimensions = [1] * len(params)  # how many are sparse, by position

    def begin_anew(self) -> None:
        """Learn anew which gradients are sparse, because some ranks have missed cycles."""
        self.by_rows = set()
        self.dense_for_good = False

    @property
    def as_dense(self) -> bool:
        """Whether a sparse gradient becomes dense, and stays so."""
        return self._sparse_as_dense or self.dense_for_good

    def rows_of(self, position: int) -> torch.Tensor:
        """Return this rank's gradient as a sparse tensor, an empty one if it has none."""
        param = self._params[position]
        gradient = param.grad
        if gradient is None:
            rank = self._dimensions[position]
            indices = torch.zeros((rank, 0), dtype=torch.int64, device=param.device)
            values = torch.zeros((0, *param.shape[rank:]), dtype=param.dtype, device=param.device)
            return sparse_tensor(indices, values, param.shape, is_coalesced=True)
        if not is_sparse(gradient):
            return gradient.to_sparse(self._dimensions[position])
        self._dimensions[position] = gradient.sparse_dim()
        return gradient

    def agree(self, position: int, dimensions: float) -> None:
        """Let a gradient with so many sparse dimensions travel as rows from the next cycle on."""
        self._dimensions[position] = round(dimensions)
        self.by_rows.add(position)

    def to_sparse(self, position: int, dense: torch.Tensor) -> torch.Tensor:
        """Convert a gradient that arrived dense, and that some rank had as a sparse one."""
        return dense.to_sparse(self._dimensions[position])
