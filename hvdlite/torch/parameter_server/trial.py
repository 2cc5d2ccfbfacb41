"""Steps of a torch optimizer on small tensors, which show whether servers may divide its work."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.parameter_server.division import Tensor, Update

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def trial_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Update:
    """Return what takes steps as the optimizer would take them for parameters of this group."""
    seeds = itertools.count()  # They differ each time, by which an optimizer that draws is known.

    def update(tensors: Sequence[Tensor]) -> list[list[float]]:
        parameters = [torch.nn.Parameter(_vector(one.values)) for one in tensors]
        twin = _twin(optimizer, group, parameters)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(next(seeds))
            for gradients in zip(*(one.gradients for one in tensors), strict=True):
                if not _step(twin, parameters, [_vector(one) for one in gradients]):
                    break
        return [row for one in parameters for row in one.detach().tolist()]

    return update


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of the same settings without a state and without its hooks."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # A scheduler's would step the original.
    twin.__dict__.update((name, OrderedDict()) for name in _HOOKS)
    twin.state = defaultdict(dict)
    options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    if not options.get("lr", 1):
        options["lr"] = 0.1  # A schedule begins at zero, where nothing would move.
    twin.param_groups = [{"params": parameters, **options}]
    return twin


def _vector(values: Any) -> torch.Tensor:
    """Return numbers in host memory, where servers keep parameters."""
    return torch.tensor(values, device="cpu")


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor],
) -> bool:
    """Take a step, with gradients of rows if the optimizer refuses others; return if it did."""
    for layout in (torch.strided, torch.sparse_coo):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            rows = gradient.to_sparse(1) if layout == torch.sparse_coo else gradient
            parameter.grad = rows
        try:
            type(optimizer).step(optimizer)
        except Exception:
            continue  # The first push gets the error, and says what it is.
        return True
    return False
