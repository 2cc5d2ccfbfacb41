"""`DistributedOptimizer` with op=hvd.Adasum: the ranks' updates are combined, not their gradients.

Every rank steps with its own gradients and its own optimizer state. The change of each parameter,
the *delta*, is combined by adaptive summation (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021), and every parameter moves by the result. So momentum and Adam act
before the summation, as in Horovod. Learning rates are not scaled by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.torch.buckets import GradientExchange, Settings
from hvdlite.torch.reducer import GradientReducer
from hvdlite.torch.wrapping import refuse_evaluating


class DeltaExchange(GradientExchange):
    """Sends deltas, which `step_by_deltas` puts where the reducer reads gradients."""

    in_step = True

    def __init__(self, name: str, settings: Settings, optimizer: Any) -> None:
        """Raise ArgumentError if the optimizer or an option cannot be combined with Adasum."""
        if settings.bucket_view:
            raise ArgumentError(
                "gradient_as_bucket_view=True cannot be combined with op=hvd.Adasum: hvd.Adasum "
                "combines changes of the parameters, not gradients; use op=hvd.Average or hvd.Sum"
            )
        refuse_evaluating(optimizer, "op=hvd.Adasum", "use op=hvd.Average")
        super().__init__(name, settings)
        # LBFGS moves frozen parameters along its history.
        self._moves_all = isinstance(optimizer, torch.optim.LBFGS)

    def frozen(self, groups: Sequence[Mapping[str, Any]]) -> Iterable[torch.Tensor]:
        for group in groups:
            yield from (one for one in group["params"] if self._moves_all or one.grad is not None)


def step_by_deltas(optimizer: Any, update: Callable[[], Any]) -> Any:
    """Update this rank's parameters, and move them by the combined deltas in place of its own."""
    reducer: GradientReducer = optimizer._reducer
    if not reducer.takes_part:
        return update()
    alone = reducer.settings.reduction.process_set.size() == 1  # Then its own delta is the result.
    params = list(reducer.params_of_step())
    known = set(params)
    frozen = [param for param in optimizer._grouped_parameters() if param not in known]
    versions = [param._version for param in frozen]
    with torch.no_grad():
        before = [param.detach().clone() for param in params]
    result = update()
    for param, version in zip(frozen, versions, strict=True):
        if param._version != version and not alone:
            raise HvdliteError(
                f"step() of this {type(optimizer).__name__} has changed "
                f"{reducer.parameter_names[param]}, which is frozen and has no gradient: "
                "op=hvd.Adasum combines the changes of the others alone, so ranks differ now; "
                "freeze it before the optimizer is made, or use op=hvd.Average"
            )
    gradients = [param.grad for param in params]
    try:
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.grad = param - old
                if not alone:
                    param.copy_(old)
        reducer.expect_gradients()
        reducer.synchronize()
        with torch.no_grad():
            for param in params if not alone else ():
                param.add_(param.grad)
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
    return result
