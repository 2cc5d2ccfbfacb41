"""The rounds of local SGD: ranks step alone, and meet in a mean from time to time.

All ranks hold the same *anchor* of each parameter. In a round the mean of what the ranks have moved
away from the anchor is the gradient of an outer optimizer, SGD with or without Nesterov momentum,
that moves the anchor:

    d = mean over ranks of (anchor - parameter)
    momentum = outer_momentum * momentum + d
    anchor = anchor - outer_lr * (d + outer_momentum * momentum)
    parameter = mix * parameter + (1 - mix) * anchor     `delay` steps after d was sent

A *fragment* is every F-th parameter; the fragments have their rounds in turn. The sources: Stich,
"Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020; Douillard et al., "DiLoCo", 2023, and "Streaming DiLoCo",
2025.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import basics, operation_names
from hvdlite.compression import NoneCompressor
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.gather_bytes import gather_bytes
from hvdlite.process_sets import ProcessSet, member_id, registered_id
from hvdlite.torch.collectives.broadcast import broadcast_async_
from hvdlite.torch.exchange.settings import Weight
from hvdlite.torch.optimizers.outer_exchange import MeanExchange
from hvdlite.torch.optimizers.replicas import ReplicaCheck, warn

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RoundSettings:
    """How ranks meet; see `hvd.LocalSGD` for each."""

    every: int
    start: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    delay: int
    mix: float
    buffers: tuple[torch.Tensor, ...]
    compression: Any
    weight: Weight
    process_set: ProcessSet

    def description(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by the name of the argument."""
        names = ("every", "start", "outer_lr", "outer_momentum", "fragments", "delay", "mix")
        kind = self.compression
        kind = kind if isinstance(kind, type) else type(kind)
        return {
            **{name: getattr(self, name) for name in names},
            "buffers": len(self.buffers),
            "compression": kind.__name__,
            "weight": self.weight is not None,
        }


@dataclass
class _Flight:
    """The mean of one fragment, on its way until its step is due."""

    due: int
    params: list[torch.Tensor]
    mean: MeanExchange | None
    buffers: MeanExchange | None


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
        self._flights: dict[int, _Flight] = {}  # The keys are fragments.
        self._moved: set[int] = set()  # Ranks may differ in these fragments.
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
        """Count the step, and do what is due: means that have come, rounds that begin."""
        self.steps += 1
        step = self.steps - self.settings.start
        if step <= 0:
            if self.settings.buffers:
                self._moved.add(0)  # They travel with this fragment.
            return
        self._moved.update(range(self.settings.fragments))
        for fragment in self._in_order():
            flight = self._flights[fragment]
            if flight.due == self.steps:
                self._land(fragment, self.settings.mix)
        for fragment in range(self.settings.fragments):
            offset = fragment * self.settings.every // self.settings.fragments
            if (step - offset) % self.settings.every == 0:
                self._send(fragment)
                if self.settings.delay == 0:
                    self._land(fragment, self.settings.mix)

    def average(self) -> None:
        """Have a round of all fragments now, after which the parameters of all ranks are equal."""
        self._agree()
        for fragment in self._in_order():
            self._land(fragment, self.settings.mix)
        moved = sorted(self._moved)
        for fragment in moved:
            self._send(fragment)
        for fragment in moved:
            self._land(fragment, mix=0.0)

    def require_equal(self, what: str) -> None:
        """Raise unless all ranks' parameters are equal; between two rounds they may differ."""
        if self._moved or self._flights:
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
        self._flights.clear()
        self._moved.clear()

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self._read_groups() for param in group["params"]]

    def _in_order(self) -> list[int]:
        """List the fragments in flight in the order in which they were sent."""
        return sorted(self._flights, key=lambda fragment: (self._flights[fragment].due, fragment))

    # These methods belong to a round.

    def _send(self, fragment: int) -> None:
        settings, name = self.settings, f"{self.name}.{fragment}"
        every = self._params()
        params = [
            param for param in every[fragment :: settings.fragments] if param in self._anchors
        ]
        weight = settings.weight() if callable(settings.weight) else settings.weight
        weight = None if weight is None else float(weight)
        moves = [(self._anchors[param] - param.detach()).contiguous() for param in params]
        mean = buffers = None
        if moves:
            mean = MeanExchange(name, moves, settings.compression, weight, settings.process_set)
        if fragment == 0 and settings.buffers:
            copies = [_wide(buffer) for buffer in settings.buffers]
            buffers = MeanExchange(
                f"{name}.buffers", copies, NoneCompressor, weight, settings.process_set
            )
        self._flights[fragment] = _Flight(self.steps + settings.delay, params, mean, buffers)

    def _land(self, fragment: int, mix: float) -> None:
        flight = self._flights.pop(fragment)
        means = [] if flight.mean is None else flight.mean.wait()
        for param, mean in zip(flight.params, means, strict=True):
            anchor = self._anchors[param]
            self._move(param, anchor, mean)
            param.copy_(anchor if mix == 0.0 else mix * param + (1.0 - mix) * anchor)
        if flight.buffers is not None:
            means = flight.buffers.wait()
            for buffer, mean in zip(self.settings.buffers, means, strict=True):
                buffer.copy_(mean)
        if mix == 0.0:
            self._moved.discard(fragment)

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
        # seen none. Rounds in flight are dropped: what they would have moved is in the next one.
        if self._agreed_after == operation_names.restarts():
            return
        name = f"#{self.name}.agreement"
        steps, moved = self._compare(name)
        self._agreed_after = operation_names.restarts()
        self._flights.clear()
        most = max(steps.values())
        self.steps = most
        if most > self.settings.start:
            root = next(rank for rank, count in steps.items() if count == most)
            self._follow(root, f"{name}.anchors")
            if moved or min(steps.values()) < most:
                self._moved.update(range(self.settings.fragments))
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
        text = json.dumps([self.steps, bool(self._moved), mine]).encode()
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
