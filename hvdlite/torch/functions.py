"""Broadcasting initial state: parameters and optimizer state of one rank, to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hvdlite import basics
from hvdlite.errors import ArgumentError
from hvdlite.objects import broadcast_object
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id
from hvdlite.rendezvous import environment
from hvdlite.torch.collectives.submit import start_broadcast
from hvdlite.torch.collectives.tensors import check, note_written, readable, spec


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters and buffers with one rank's values.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`. Values that are not tensors (a
            module's extra state) are sent as objects and replaced in the mapping itself: pass the
            mapping to `load_state_dict` afterwards. None stays None.
        root_rank: the rank whose values all receive.
        process_set: its members take part; by default all ranks.

    Raises:
        ArgumentError: a value cannot be sent; the message names it.
        MismatchError: the ranks' models differ; the message names the first difference.

    Example:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, torch.nn.Module):
        raise ArgumentError(
            "broadcast_parameters takes what a model holds, not the model: pass model.state_dict()"
        )
    check_root(root_rank, process_set)
    name = next_name("broadcast_parameters", member_id(process_set))
    named = list(params.items() if isinstance(params, Mapping) else params)
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ArgumentError(
                "broadcast_parameters takes a state_dict or (name, tensor) pairs; "
                "use model.state_dict() or model.named_parameters()"
            )
        key, value = entry
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif value is not None:
            others.append(key)
    if others and not isinstance(params, MutableMapping):
        raise ArgumentError(
            f"'{others[0]}' is not a tensor, and pairs cannot take its new value; "
            "pass model.state_dict(), or use broadcast_object"
        )
    broadcast_tensors(tensors, root_rank, name, process_set)
    if others and isinstance(params, MutableMapping):
        values = {key: params[key] for key in others}
        params.update(broadcast_object(values, root_rank, f"{name}.objects", process_set))


def broadcast_tensors(
    tensors: Mapping[str, torch.Tensor], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    """Overwrite all tensors, contiguous or not, in one operation."""
    if tensors:
        start_broadcasting(tensors, root_rank, name, process_set, blocking=True)()


def start_broadcasting(
    tensors: Mapping[str, torch.Tensor],
    root_rank: int,
    name: str,
    process_set: ProcessSet,
    blocking: bool = False,
) -> Callable[[], None]:
    """Start a `broadcast_tensors`; return the function that waits for its end."""
    blocks = {}
    for key, tensor in tensors.items():
        check(tensor, key)
        blocks[key] = readable(tensor)
    specs = [spec(key, block, block) for key, block in blocks.items()]
    handle = start_broadcast(name, specs, root_rank, process_set, blocks, blocking)

    def finish() -> None:
        handle.wait()
        for key, tensor in tensors.items():
            if tensor.data_ptr() == blocks[key].data_ptr():
                note_written([tensor])
            else:
                with torch.no_grad():
                    tensor.copy_(blocks[key])

    return finish


def broadcast_optimizer_state(
    optimizer: Any,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the state and the options (learning rate...) of one rank's optimizer.

    It works with any optimizer of torch.optim and any state. Ranks other than the root may have no
    state yet, or another; it is replaced completely.

    Gradients do not change, except in a script that imports `horovod`: there, as in Horovod, the
    gradients of an optimizer without any state become zeros, so that momentum and weight decay act
    on a parameter that the first steps do not use.

    Args:
        optimizer: of the same kind, over the same parameters, on all ranks.
        root_rank: the rank whose state all receive.
        model: not needed; scripts written for Horovod may pass it.
        process_set: its members take part; by default all ranks.

    Raises:
        ArgumentError: the state holds a tensor that cannot be sent.

    Example:
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    check_root(root_rank, process_set)
    name = next_name("broadcast_optimizer_state", member_id(process_set))
    is_root = basics.rank() == root_rank
    if environment.imitates_horovod() and not optimizer.state:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
    leaves, layout = tree_flatten(optimizer.state_dict() if is_root else None)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    places = [
        _Place(leaf.dtype, tuple(leaf.shape), leaf.device.type)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    skeleton = tree_unflatten(places, layout)
    skeleton = broadcast_object(skeleton, root_rank, f"{name}.objects", process_set)
    if not is_root:
        leaves, layout = tree_flatten(skeleton)
        leaves = [one.make() if isinstance(one, _Place) else one for one in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    named = {f"state.{index}": tensor for index, tensor in enumerate(tensors)}
    broadcast_tensors(named, root_rank, name, process_set)
    if not is_root:
        load_exactly(optimizer, tree_unflatten(leaves, layout))


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a state that travels without its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str  # It is the type: ranks number their GPUs differently.

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def load_exactly(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load an optimizer's state, and undo torch's casts to each parameter's dtype."""
    optimizer.load_state_dict(state_dict)
    # The state was not cast where it was made, and all ranks must compute in the same precision.
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, values in state_dict["state"].items():
        if isinstance(index, int) and isinstance(values, dict):
            optimizer.state[params[index]].update(values)
