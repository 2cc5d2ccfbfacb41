"""Clips gradients by their norm where each rank has those of some parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from hvdlite import ops
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import allreduce


@torch.no_grad()  # type: ignore[untyped-decorator]
def clip(
    params: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    name: str,
    process_set: ProcessSet,
) -> torch.Tensor:
    """Clip this rank's gradients by the norm over all ranks; return the norm before clipping."""
    # The gradient of each parameter is on one rank, or on none. The bits are those of
    # `torch.nn.utils.clip_grad_norm_` on a rank that has all of them, and the same everywhere.
    own = [param.grad for param in params if param.grad is not None]
    total = _total(_norms_of_all(params, norm_type, name, process_set), params, norm_type)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for gradient in own:
        gradient.mul_(factor.to(gradient.device))
    return total


def _norms_of_all(
    params: Sequence[torch.Tensor], norm_type: float, name: str, process_set: ProcessSet
) -> torch.Tensor:
    """Return norms, by position, and in a second row whether there is a gradient."""
    # float64 has the values of all narrower types. One rank adds to a number, the others a zero.
    norms = torch.zeros(2, len(params), dtype=torch.float64, device=params[0].device)
    positions = [i for i, param in enumerate(params) if param.grad is not None]
    own = [params[i].grad for i in positions]
    if own:
        norms[0, positions] = torch.stack([norm.to(norms) for norm in _norms(own, norm_type)])
        norms[1, positions] = 1.0
    return allreduce(norms, name=name, op=ops.Sum, process_set=process_set)


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    norms: dict[int, torch.Tensor] = {}
    for (same,), indices in _by_kind(gradients).values():
        norms.update(zip(indices, torch._foreach_norm(same, float(norm_type)), strict=True))
    return [norms[i] for i in range(len(gradients))]


def _total(norms: torch.Tensor, params: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Combine the norms in the order of torch, which goes by device and dtype."""
    there = [i for i, present in enumerate(norms[1].tolist()) if present > 0]
    if not there:
        return torch.tensor(0.0, device=norms.device)
    present = [params[i] for i in there]
    order = [there[i] for _, indices in _by_kind(present).values() for i in indices]
    parts = [norms[0, i].to(params[i].dtype).to(present[0].device) for i in order]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), float(norm_type))
    return total


def _by_kind(
    tensors: Sequence[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], tuple[list[list[torch.Tensor]], list[int]]]:
    """Group tensors by device and dtype, with their positions, as `clip_grad_norm_` does."""
    detached = [tensor.detach() for tensor in tensors]
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[torch.Tensor]], list[int]]]
    groups = _group_tensors_by_device_and_dtype([detached], with_indices=True)
    return groups
