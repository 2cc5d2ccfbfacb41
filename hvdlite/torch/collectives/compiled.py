"""`allreduce` as an operator of torch, so that compiled graphs contain it.

Dynamo cannot trace into the core. An operator that is registered with torch, with its shape rule
and its gradient, becomes one node of the graph instead, also under `fullgraph=True`. The node is
run as an ordinary call: without a name it gets its number when it runs, not when it is traced.

torch has `torch.library.custom_op` since 2.4; with an older one a graph breaks at each collective.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import ops
from hvdlite.ops import next_name
from hvdlite.process_sets import member_id, process_set_by_id
from hvdlite.torch.collectives.autograd import check_differentiable
from hvdlite.torch.collectives.submit import Reduction, start_allreduce
from hvdlite.torch.collectives.tensors import read_and_written, spec
from hvdlite.torch.dynamo import compiling

_EXISTS = hasattr(torch.library, "custom_op")


def in_graph() -> bool:
    """Return whether this call is being traced into a graph, which can contain the operator."""
    return _EXISTS and compiling()


def _run(
    tensor: torch.Tensor, name: str, op: int, prescale: float, postscale: float, process_set: int
) -> torch.Tensor:
    members = process_set_by_id(process_set)
    name = name or next_name("allreduce", member_id(members))
    source, output = read_and_written(tensor, name, "allreduce", False)
    reduction = Reduction(op, prescale, postscale, None, members)
    specs = [spec(name, source, output)]
    start_allreduce(name, specs, reduction, ([source], [output]), blocking=True).wait()
    return output


def _shape_of_result(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]


def _gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    name, op, *others = ctx.arguments
    check_differentiable("allreduce", name, op)
    reduced = torch.ops.hvdlite.allreduce(gradient, f"{name}.backward" * bool(name), op, *others)
    return reduced, None, None, None, None, None


if _EXISTS:
    _operator = torch.library.custom_op(
        "hvdlite::allreduce",
        _run,
        mutates_args=(),
        schema="(Tensor tensor, str name, int op, float prescale, float postscale, "
        "int process_set) -> Tensor",
    )
    _operator.register_fake(_shape_of_result)
    _operator.register_autograd(_gradient, setup_context=_keep)


def allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: ops.ReduceOp,
    prescale: float,
    postscale: float,
    process_set: int,
) -> torch.Tensor:
    """Reduce a tensor in a graph that is being traced; see `allreduce.allreduce`."""
    operator = torch.ops.hvdlite.allreduce
    result: torch.Tensor = operator(tensor, name or "", op, prescale, postscale, process_set)
    return result
