"""The rounds of local SGD: ranks step alone, and meet in a mean from time to time.

All ranks hold the same *anchor* of each parameter. In a round the mean of what the ranks have moved
away from the anchor is the gradient of an outer optimizer, SGD with or without Nesterov momentum,
that moves the anchor:

    d = mean over ranks of (anchor - parameter)
    momentum = outer_momentum * momentum + d
    anchor = anchor - outer_lr * (d + outer_momentum * momentum)
    parameter = anchor

The sources: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; Douillard et al., "DiLoCo", 2023.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.ops import NoneCompressor, cast_in_core, gather_bytes
from hvdlite.process_sets import ProcessSet, member_id, registered_id
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.broadcast import broadcast_async_
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import grouped
from hvdlite.torch.exchange.settings import Weight
from hvdlite.torch.replicas import ReplicaCheck, warn

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RoundSettings:
    """How ranks meet; see `hvd.LocalSGD` for each."""

    every: int
    start: int
    outer_lr: float
    outer_momentum: float
    buffers: tuple[torch.Tensor, ...]
    compression: Any
    weight: Weight
    process_set: ProcessSet

    def description(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by the name of the argument."""
        names = ("every", "start", "outer_lr", "outer_momentum")
        kind = self.compression
        kind = kind if isinstance(kind, type) else type(kind)
        return {
            **{name: getattr(self, name) for name in names},
            "buffers": len(self.buffers),
            "compression": kind.__name__,
            "weight": self.weight is not None,
        }


class Rounds:
    """Anchors, outer momentum and steps of one optimizer."""

    # Only members of the process set call `before_step` and `after_step`, around each step of the
    # optimizer. It is not thread-safe.

    def __init__(
        self, name: str, read_groups: Callable[[], list[dict[str, Any]]], settings: RoundSettings
    ) -> None:
        """Make it; `name`, unique on this rank, begins the names of its operations."""
        self.settings = settings
        self.steps = 0
        self.name = name
        self._read_groups = read_groups
        self._agreed_after = -1  # It counts restarts of the numbering; -1 means not yet agreed.
        self._anchors: dict[torch.Tensor, torch.Tensor] = {}
        self._momenta: dict[torch.Tensor, torch.Tensor] = {}
        self._moved = False  # It says whether ranks may differ.
        self._replicas = ReplicaCheck(name, settings.process_set, repeats=False)

    @property
    def takes_part(self) -> bool:
        """Whether this rank is a member of the process set; raise if that was removed."""
        registered_id(self.settings.process_set)
        return bool(self.settings.process_set.included())

    @property
    def begun(self) -> bool:
        """Whether ranks step alone, rather than with averaged gradients."""
        return self.steps >= self.settings.start

    def before_step(self) -> None:
        """Agree with the other ranks, or raise; take anchors of parameters that have none."""
        self._agree()
        if self.begun:
            for param in self._params():
                if param.requires_grad and param not in self._anchors:
                    self._anchors[param] = _wide(param)

    def after_step(self) -> None:
        """Count the step, and have a round if one is due."""
        self.steps += 1
        step = self.steps - self.settings.start
        self._moved = self._moved or step > 0 or bool(self.settings.buffers)
        if step > 0 and step % self.settings.every == 0:
            self._meet()

    def average(self) -> None:
        """Have a round now, after which the parameters of all ranks are equal."""
        self._agree()
        if self._moved:
            self._meet()

    def require_equal(self, what: str) -> None:
        """Raise unless all ranks' parameters are equal; between two rounds they may differ."""
        if self._moved:
            raise HvdliteError(
                f"{what} between two rounds of local SGD, where every rank has parameters of its "
                "own; call optimizer.average() on all ranks first"
            )

    def state(self) -> dict[str, Any]:
        """Return steps, anchors and momenta; None for parameters without any."""
        params = self._params()
        return {
            "steps": self.steps,
            "anchor": [self._anchors.get(param) for param in params],
            "momentum": [self._momenta.get(param) for param in params],
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a state, or anew from the parameters if there is none."""
        # In the first step, and after joins, the ranks agree on that of the rank with most steps.
        # In other steps they do not, because the root of a broadcast of the state loads nothing.
        state = state or {"steps": 0, "anchor": [], "momentum": []}
        params = self._params()
        self.steps = state["steps"]
        self._anchors = _placed(params, state["anchor"])
        self._momenta = _placed(params, state["momentum"])
        self._moved = False

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self._read_groups() for param in group["params"]]

    # These methods belong to a round.

    def _meet(self) -> None:
        """Have a round."""
        settings, members = self.settings, self.settings.process_set
        params = [param for param in self._params() if param in self._anchors]
        weight = settings.weight() if callable(settings.weight) else settings.weight
        weight = None if weight is None else float(weight)
        moves = [(self._anchors[param] - param.detach()).contiguous() for param in params]
        copies = [_wide(buffer) for buffer in settings.buffers]
        moved = averaged = None
        if moves:
            moved = _Mean(f"{self.name}.moves", moves, settings.compression, weight, members)
        if copies:
            averaged = _Mean(f"{self.name}.buffers", copies, NoneCompressor, weight, members)
        for param, mean in zip(params, moved.wait() if moved else (), strict=True):
            anchor = self._anchors[param]
            self._move(param, anchor, mean)
            param.copy_(anchor)
        for buffer, mean in zip(settings.buffers, averaged.wait() if averaged else (), strict=True):
            buffer.copy_(mean)
        self._moved = False

    def _move(self, param: torch.Tensor, anchor: torch.Tensor, mean: torch.Tensor) -> None:
        """Let the outer optimizer move the anchor."""
        factor = self.settings.outer_momentum
        if factor != 0.0:
            momentum = self._momenta.setdefault(param, torch.zeros_like(anchor))
            momentum.mul_(factor).add_(mean)
            mean = mean + factor * momentum
        anchor.sub_(self.settings.outer_lr * mean)

    # These methods make the ranks agree.

    def _agree(self) -> None:
        """Make steps, anchors and momenta equal on all ranks, in the first step and after joins."""
        # Ranks that joined have missed rounds, and ranks that were added to an elastic job have
        # seen none.
        if self._agreed_after == ops.name_restarts():
            return
        name = f"#{self.name}.agreement"
        steps, moved = self._compare(name)
        self._agreed_after = ops.name_restarts()
        most = max(steps.values())
        self.steps = most
        if most > self.settings.start:
            root = next(rank for rank, count in steps.items() if count == most)
            self._follow(root, f"{name}.anchors")
            if moved or min(steps.values()) < most:
                self._moved = True
        elif most == 0 and self.begun:
            params = [param for param in self._params() if param.requires_grad]
            self._replicas.start(params, {p: f"parameter {i}" for i, p in enumerate(params)})
            warn(self._replicas.finish())

    def _compare(self, name: str) -> tuple[dict[int, int], bool]:
        """Return the steps that each rank has done, and whether some rank is between two rounds."""
        settings = self.settings
        mine = settings.description()
        params = [param for param in self._params() if param.requires_grad]
        mine["parameters"] = f"{len(params)} ({sum(p.numel() for p in params)} numbers)"
        text = json.dumps([self.steps, self._moved, mine]).encode()
        blocks = gather_bytes(basics.engine(), text, name, member_id(settings.process_set))
        steps: dict[int, int] = {}
        any_moved = False
        for rank, block in zip(settings.process_set.ranks, blocks, strict=True):
            if len(block) == 0:
                continue  # It has joined.
            steps[rank], moved, theirs = json.loads(bytes(block))
            any_moved = any_moved or moved
            different = [key for key in mine if mine[key] != theirs[key]]
            if different:
                key = different[0]
                raise MismatchError(
                    f"'{self.name}': rank {rank} has {key}={theirs[key]} and rank "
                    f"{basics.rank()} has {key}={mine[key]}; make the optimizer of local SGD alike "
                    "on all ranks"
                )
        return steps, any_moved

    def _follow(self, root: int, name: str) -> None:
        """Take the anchors and momenta of one rank."""
        settings = self.settings
        tensors = {}
        for index, param in enumerate(self._params()):
            if not param.requires_grad:
                continue
            tensors[f"{name}.{index}"] = self._anchors.setdefault(param, _wide(param))
            if settings.outer_momentum != 0.0:
                zeros = torch.zeros_like(self._anchors[param])
                tensors[f"{name}.{index}.momentum"] = self._momenta.setdefault(param, zeros)
        handles = [
            broadcast_async_(tensor, root, key, settings.process_set)
            for key, tensor in tensors.items()
        ]
        for handle in handles:
            handle.wait()


class _Mean:
    """The mean of all ranks' tensors, on its way: one allreduce."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        compression: Any,
        weight: float | None,
        process_set: ProcessSet,
    ) -> None:
        """Send contiguous tensors, to be overwritten; all ranks give a weight, or none does."""
        wire, self._compression = cast_in_core(compression, ops.Average)
        packed = [self._compression.compress(tensor) for tensor in tensors]
        self._contexts = [context for _, context in packed]
        reduction = Reduction(ops.Average, weight=weight, process_set=process_set, wire=wire)
        sent = grouped("allreduce", [one for one, _ in packed], name, process_set)
        self._handle = start_reducing(sent, reduction, in_place=True)

    def wait(self) -> list[torch.Tensor]:
        """Wait for the mean, and return it."""
        means = zip(self._handle.wait(), self._contexts, strict=True)
        return [self._compression.decompress(mean, context) for mean, context in means]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, contiguous, and half precision as float32, in which changes add up."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.float() if copy.dtype in _HALF else copy


def _placed(
    params: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]
) -> dict[torch.Tensor, torch.Tensor]:
    """Copy values to the devices of their parameters, by parameter; leave out those of None."""
    pairs = zip(params, values, strict=bool(values))
    return {param: _wide(value).to(param.device) for param, value in pairs if value is not None}
