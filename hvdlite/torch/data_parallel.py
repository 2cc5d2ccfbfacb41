"""`DistributedDataParallel`: a model whose gradients are reduced, for any optimizer.

Scripts see the behaviour of torch's class: the wrapped model's names begin with "module.",
gradients are averaged when backward() returns, and buffers are those of the first rank. A
`GradientReducer` reduces the gradients, as for `DistributedOptimizer`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.modes import Mode, check_together
from hvdlite.operation_names import next_object
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.compression import Compression
from hvdlite.torch.exchange.bucket_plan import bytes_of_cap
from hvdlite.torch.exchange.settings import Settings, modes_of
from hvdlite.torch.functions import broadcast_tensors
from hvdlite.torch.optimizers.claims import owner_of
from hvdlite.torch.optimizers.reducer import GradientReducer


class DistributedDataParallel(nn.Module):  # type: ignore[misc]
    """A model that trains on the batches of all ranks, like torch's class of this name.

    At construction, parameters and buffers become those of the first rank. When backward() returns,
    gradients are averaged over the ranks; any plain optimizer can then step. Some ranks or all may
    leave parameters unused in a forward. The model may change between two steps, alike on all
    ranks. Every rank calls backward() equally often; a rank that runs out of data calls `hvd.join`.

    Args:
        module: the model, on its device.
        device_ids: as in scripts for torch: None, or the one device that holds the model.
        output_device: as `device_ids`.
        dim: must be 0.
        broadcast_buffers: gives every rank the buffers of the first one, before each forward in
            training that follows one whose gradients were reduced. Evaluation sends nothing, so
            that the first rank may evaluate alone. False: each rank keeps its own buffers.
        process_group: must be None; use `process_set`.
        bucket_cap_mb: the size of a bucket in MiB; by default 4, and 25 on GPUs.
        find_unused_parameters: without effect: unused parameters are always found.
        check_reduction: without effect, as in torch.
        gradient_as_bucket_view: see `DistributedOptimizer`.
        static_graph: without effect: nothing is assumed about the graph.
        init_sync: makes parameters and buffers those of the first rank at construction.
        forward_sync_buffers: if given, replaces broadcast_buffers for forwards; buffers then become
            those of the first rank at construction in any case.
        process_set: its members train together; on other ranks the model trains alone.
        compression: how gradients are compressed while they travel, see `Compression`.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.
        MismatchError: the ranks' models differ.

    Example:
        >>> model = hvd.DistributedDataParallel(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        init_sync: bool = True,
        *,
        forward_sync_buffers: bool | None = None,
        process_set: ProcessSet = global_process_set,
        compression: Any = Compression.none,
    ) -> None:
        super().__init__()
        basics.size()  # This raises an error without init().
        _check(module, device_ids, dim, process_group)
        cap_bytes = bytes_of_cap(bucket_cap_mb)
        check_together({Mode.DATA_PARALLEL: True, **modes_of(compression=compression)})
        self.module = module
        self.process_set = process_set
        starts_with_buffers = broadcast_buffers or forward_sync_buffers is not None
        if forward_sync_buffers is not None:
            broadcast_buffers = forward_sync_buffers
        self.broadcast_buffers = broadcast_buffers
        self._sends = True
        self._buffers_go = True  # The next forward broadcasts buffers, once in each step.
        self._params = list(module.parameters())
        number = next_object("DistributedDataParallel", registered_id(process_set))
        self._name = f"model.{number}"
        if process_set.included() and init_sync:
            buffers = dict(module.named_buffers()) if starts_with_buffers else {}
            self._broadcast({**dict(module.named_parameters()), **buffers})
        self._reducer = self._reduce(cap_bytes, gradient_as_bucket_view, compression)

    def _reduce(
        self, cap_bytes: int | None, bucket_view: bool, compression: Any
    ) -> GradientReducer:
        settings = Settings(
            reduction=Reduction(ops.Average, process_set=self.process_set),
            compression=compression,
            passes=1,
            groups=0,
            sparse_as_dense=False,
            cap_bytes=cap_bytes,
            weight=None,
            bucket_view=bucket_view,
            of_model=True,
        )
        groups = [{"params": self._params}]
        names = {param: name for name, param in self.module.named_parameters()}
        title = f"a DistributedDataParallel ({self._name})"
        return GradientReducer(self._name, lambda: groups, names, settings, title)

    def _broadcast(self, tensors: dict[str, torch.Tensor]) -> None:
        root = self.process_set.ranks[0]
        if tensors:
            with torch.no_grad():
                broadcast_tensors(tensors, root, f"{self._name}.state", self.process_set)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model; in training, broadcast the first rank's buffers before it."""
        if self.training and torch.is_grad_enabled():
            self._reducer.before_forward(changed=self._follow())
            if self._buffers_go and self.broadcast_buffers and self.process_set.included():
                self._broadcast(dict(self.module.named_buffers()))
            self._buffers_go = self._sends
        return self.module(*inputs, **options)

    def _follow(self) -> bool:
        """Take the parameters that the model has now; return whether they are other ones."""
        # A layer may be replaced or added, and `load_state_dict(assign=True)` makes new parameters.
        # Every rank changes its model alike; new parameters become those of the first rank.
        params = list(self.module.parameters())
        if len(params) == len(self._params) and all(map(operator.is_, params, self._params)):
            return False
        known = set(self._params)
        new = {name: one for name, one in self.module.named_parameters() if one not in known}
        if self.process_set.included():
            self._broadcast(new)
        self._reducer.parameter_names.update({param: name for name, param in new.items()})
        self._params[:] = params
        return True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward() only accumulates; the next one sends the sum.

        Example:
            >>> with model.no_sync():
            ...     model(first).sum().backward()
            >>> model(second).sum().backward()
        """
        before, self._sends = self._sends, False
        try:
            with self._reducer.paused():
                yield
        finally:
            self._sends = before

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        raise ArgumentError("a DistributedDataParallel cannot be copied; copy its .module")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError("a DistributedDataParallel cannot be pickled; save its state_dict()")


def _check(module: Any, device_ids: Any, dim: int, process_group: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"DistributedDataParallel takes a model, not a {type(module).__name__}")
    wrappers = (DistributedDataParallel, nn.parallel.DistributedDataParallel)
    owner = owner_of(module.parameters())
    again = owner is not None and owner.settings.of_model
    if again or any(isinstance(part, wrappers) for part in module.modules()):
        raise ArgumentError("this model is a DistributedDataParallel already, or a part of it is")
    check_together({Mode.DATA_PARALLEL: True, Mode.DISTRIBUTED: owner is not None})
    if device_ids is not None and len(device_ids) > 1:
        raise ArgumentError("device_ids must name one device, because every rank has its own")
    if process_group is not None or dim != 0:
        raise ArgumentError(
            "use process_set=hvd.add_process_set(...) instead of process_group, and leave dim out"
        )
