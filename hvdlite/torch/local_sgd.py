"""`LocalSGD` and `DiLoCo`: ranks step alone, and average parameters from time to time.

All ranks hold the same *anchor* of each parameter. In a *round* the mean of what the ranks have
moved away from the anchor is the gradient of an outer optimizer, SGD with or without Nesterov
momentum, that moves the anchor:

    d = mean over ranks of (anchor - parameter)
    momentum = outer_momentum * momentum + d
    anchor = anchor - outer_lr * (d + outer_momentum * momentum)
    parameter = anchor

The sources: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020; Douillard et al., "DiLoCo", 2023.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.objects import gather_json
from hvdlite.ops import NoneCompressor, cast_in_core, next_object
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id
from hvdlite.torch.buckets import Weight
from hvdlite.torch.collectives.allreduce import send_named, start_reducing
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import grouped
from hvdlite.torch.compression import Compression
from hvdlite.torch.functions import broadcast_tensors
from hvdlite.torch.gradient_hooks import reader_of
from hvdlite.torch.optimizer import Distributed
from hvdlite.torch.replicas import ReplicaCheck, warn
from hvdlite.torch.virtual.steps import refuse_with_virtual_size
from hvdlite.torch.wrapping import Wrapping, own_step, refuse_evaluating, wrap

_KEY = "hvdlite.local_sgd"


class Local(Wrapping):
    """The methods that `LocalSGD` and `DiLoCo` add to the class of the optimizer."""

    # GradScaler then calls `step` also when gradients overflow, so that all ranks count alike.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    _rounds: Rounds

    def average(self) -> None:
        """Have a round now, after which the parameters are the same on all ranks.

        Every rank calls it, at the same step: before evaluation and before a checkpoint. Between
        the next rounds are as many steps as before. It does nothing if the ranks are equal.

        Raises:
            HvdliteError: the world is over.

        Example:
            >>> optimizer.average()
            >>> torch.save([model.state_dict(), optimizer.state_dict()], "training.pt")
        """
        if self._rounds.takes_part:
            with torch.no_grad():
                self._rounds.average()

    @own_step
    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step with this rank's gradients, and average parameters when a round is due.

        Args:
            closure: evaluates the model again and returns the loss, on this rank.
            options: further arguments of the wrapped class's step.

        Returns:
            What the step of the wrapped class returns: the loss of the closure, or None.
        """
        self._opt_called = True  # LR schedulers check this.
        if not self._rounds.takes_part:
            return self._step_alone(closure, options)
        with torch.no_grad():
            self._rounds.before_step()
        result = self._step_alone(closure, options)
        with torch.no_grad():
            self._rounds.after_step()
        return result

    def _step_alone(self, closure: Any, options: dict[str, Any]) -> Any:
        """Step as the wrapped class does; without it if GradScaler found an overflow."""
        native = vars(self).get("_step_supports_amp_scaling", False)
        overflow = getattr(self, "found_inf", None)
        if native or overflow is None:
            given = () if closure is None else (closure,)
            return super().step(*given, **options)
        if float(overflow):
            return None
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            factor = scale.double().reciprocal().float()
            for param in self._grouped_parameters():
                if param.grad is not None:
                    param.grad.mul_(factor.to(param.grad.device))
        self.found_inf = self.grad_scale = None  # This class does it; steps of torch refuse these.
        return super().step(**options)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with steps, anchors and outer momentum.

        The inner state (momentum, Adam's moments) is this rank's own, and differs between ranks. A
        plain optimizer loads it, too.

        Raises:
            HvdliteError: it is called between two rounds; call `average` first.
        """
        self._rounds.require_equal("state_dict()")
        state: dict[str, Any] = super().state_dict()
        return {**state, _KEY: self._rounds.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned, or the state of a plain optimizer.

        With the latter, steps are counted from zero. Load the model's parameters first or after it,
        but before the next step.
        """
        super().load_state_dict(state_dict)
        with torch.no_grad():
            self._rounds.load(state_dict.get(_KEY))


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    every: int = 16,
    *,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    buffers: Iterable[torch.Tensor] | None = None,
    compression: Any = Compression.none,
    weight: Weight = None,
    process_set: ProcessSet = global_process_set,
) -> Local:
    """Make ranks step alone, and average their parameters after every so many steps.

    It sends 1 / `every` of the bytes that `DistributedOptimizer` sends, and ranks wait for each
    other in rounds only. Ranks begin with the same parameters: call `broadcast_parameters` before
    the first step. Every rank steps equally often, or calls `join`. Local SGD: Stich, "Local SGD
    Converges Fast and Communicates Little", ICLR 2019.

    Args:
        optimizer: any optimizer; it is changed in place. A `DistributedOptimizer` over the process
            set of one host makes it hierarchical: gradients within hosts, parameters between them.
        every: steps between two rounds.
        outer_lr: the learning rate of the outer optimizer; 1 makes a plain average.
        outer_momentum: its Nesterov momentum.
        buffers: `model.buffers()`; those of floating point are averaged, too.
        compression: how the changes travel.
        weight: this rank's weight in the mean, on all ranks or on none; a callable is called in
            each round.
        process_set: its members average; other ranks step alone.

    Returns:
        The optimizer, which has become an instance of a subclass of its class of the same name,
        with the additional methods of `Local`.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hvd.LocalSGD(optimizer, every=16, buffers=model.buffers())
    """
    basics.size()  # Without init() this raises, rather than the first step.
    settings = RoundSettings(
        every=_whole_number(every),
        outer_lr=float(outer_lr),
        outer_momentum=float(outer_momentum),
        buffers=tuple(one for one in buffers or () if one.is_floating_point()),
        compression=compression,
        weight=weight,
        process_set=process_set,
    )
    _check_optimizer(optimizer, settings)
    name = f"local.{next_object('LocalSGD', registered_id(process_set))}"
    title = f"the LocalSGD of {type(optimizer).__name__} ({name})"
    wrap(optimizer, Local, title, process_set, {})
    local: Any = optimizer
    local._rounds = Rounds(name, reader_of(local), settings)
    return local  # type: ignore[no-any-return]


def DiLoCo(
    optimizer: torch.optim.Optimizer,
    every: int = 500,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    buffers: Iterable[torch.Tensor] | None = None,
    compression: Any = Compression.none,
    weight: Weight = None,
    process_set: ProcessSet = global_process_set,
) -> Local:
    """`LocalSGD` with the defaults of DiLoCo (Douillard et al., 2023), for AdamW and slow links.

    With fewer than 100 rounds take outer_momentum=0.5, because 0.9 overshoots. Arguments, result
    and errors are those of `LocalSGD`.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
        >>> optimizer = hvd.DiLoCo(optimizer, every=500, compression=hvd.Compression.bf16)
    """
    return LocalSGD(
        optimizer,
        every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        buffers=buffers,
        compression=compression,
        weight=weight,
        process_set=process_set,
    )


def _whole_number(every: Any) -> int:
    try:
        number = operator.index(every)
    except TypeError:
        number = 0
    if number < 1:
        raise ArgumentError(f"LocalSGD(every={every!r}): give a whole number from 1 on")
    return number


def _check_optimizer(optimizer: Any, settings: RoundSettings) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(
            f"LocalSGD takes an optimizer, not a {type(optimizer).__name__}: pass an optimizer, "
            "for example torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    refuse_evaluating(optimizer, "LocalSGD", "use hvd.DistributedOptimizer")
    if isinstance(optimizer, Local):
        raise ArgumentError("this optimizer is one of LocalSGD or DiLoCo already")
    if not isinstance(optimizer, Distributed):
        return
    own = optimizer._reducer.settings
    if own.reduction.op == ops.Adasum:
        raise ArgumentError(
            "LocalSGD(DistributedOptimizer(...)) cannot be combined with op=hvd.Adasum: both "
            "combine the changes of the parameters; pass the plain optimizer"
        )
    if own.virtual_size is not None:
        refuse_with_virtual_size("LocalSGD(DistributedOptimizer(...))")
    if optimizer._shares_parameters:
        raise ArgumentError(
            "ShardedOptimizer(share_parameters=True) cannot be combined with LocalSGD: a round "
            "would average the copies of ranks that have one in common; leave share_parameters= out"
        )
    if own.reduction.process_set.ranks == settings.process_set.ranks:
        raise ArgumentError(
            "these gradients are averaged over the same ranks in every step, so that nothing is "
            "left for LocalSGD; pass the plain optimizer, or a DistributedOptimizer over the "
            "process set of one host"
        )


@dataclass(frozen=True)
class RoundSettings:
    """How ranks meet; see `hvd.LocalSGD` for each."""

    every: int
    outer_lr: float
    outer_momentum: float
    buffers: tuple[torch.Tensor, ...]
    compression: Any
    weight: Weight
    process_set: ProcessSet

    def __post_init__(self) -> None:
        for name, value, fits in (
            ("outer_lr", self.outer_lr, 0.0 < self.outer_lr < float("inf")),
            ("outer_momentum", self.outer_momentum, 0.0 <= self.outer_momentum < 1.0),
        ):
            if not fits:
                raise ArgumentError(
                    f"LocalSGD({name}={value}): outer_lr is a positive number; outer_momentum is "
                    "at least 0 and less than 1"
                )
        registered_id(self.process_set)


class Rounds:
    """Anchors, outer momentum and steps of one optimizer."""

    # Only members of the process set call `before_step` and `after_step`, around each step of the
    # optimizer. It is not thread-safe.

    def __init__(
        self, name: str, read_groups: Callable[[], list[dict[str, Any]]], settings: RoundSettings
    ) -> None:
        self.settings = settings
        self.steps = 0
        self.name = name  # It begins the names of its operations, and is unique on this rank.
        self._read_groups = read_groups
        self._agreed_after = -1  # It counts restarts of the numbering; -1 means not yet agreed.
        self._anchors: dict[torch.Tensor, torch.Tensor] = {}
        self._momenta: dict[torch.Tensor, torch.Tensor] = {}
        self._moved = False  # It says whether ranks may differ.
        self._replicas = ReplicaCheck(name, settings.process_set)

    @property
    def takes_part(self) -> bool:
        """Whether this rank is a member of the process set; raise if that was removed."""
        registered_id(self.settings.process_set)
        return bool(self.settings.process_set.included())

    def before_step(self) -> None:
        """Agree with the other ranks, or raise; take anchors of parameters that have none."""
        self._agree()
        for param in self._params():
            if param.requires_grad and param not in self._anchors:
                self._anchors[param] = _wide(param)

    def after_step(self) -> None:
        self.steps += 1
        self._moved = True
        if self.steps % self.settings.every == 0:
            self._meet()

    def average(self) -> None:
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
        settings, members = self.settings, self.settings.process_set
        params = [param for param in self._params() if param in self._anchors]
        weight = settings.weight() if callable(settings.weight) else settings.weight
        weight = None if weight is None else float(weight)
        moves = [(self._anchors[param] - param.detach()).contiguous() for param in params]
        copies = [_wide(buffer) for buffer in settings.buffers]
        moves = _means(f"{self.name}.moves", moves, settings.compression, weight, members)
        copies = _means(f"{self.name}.buffers", copies, NoneCompressor, weight, members)
        for param, mean in zip(params, moves, strict=True):
            anchor = self._anchors[param]
            if settings.outer_momentum != 0.0:
                momentum = self._momenta.setdefault(param, torch.zeros_like(anchor))
                momentum.mul_(settings.outer_momentum).add_(mean)
                mean = mean + settings.outer_momentum * momentum
            anchor.sub_(settings.outer_lr * mean)
            param.copy_(anchor)
        for buffer, mean in zip(settings.buffers, copies, strict=True):
            buffer.copy_(mean)
        self._moved = False

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
        if most > 0:
            root = next(rank for rank, count in steps.items() if count == most)
            self._follow(root, f"{name}.anchors")
            if moved or min(steps.values()) < most:
                self._moved = True
        else:
            params = [param for param in self._params() if param.requires_grad]
            self._replicas.start(params, {p: f"parameter {i}" for i, p in enumerate(params)})
            warn(self._replicas.finish())

    def _compare(self, name: str) -> tuple[dict[int, int], bool]:
        """Return the steps that each rank has done, and whether some rank is between two rounds."""
        settings = self.settings
        kind = settings.compression
        params = [param for param in self._params() if param.requires_grad]
        names = ("every", "outer_lr", "outer_momentum")
        mine = {name: getattr(settings, name) for name in names} | {
            "buffers": len(settings.buffers),
            "compression": (kind if isinstance(kind, type) else type(kind)).__name__,
            "weight": settings.weight is not None,
            "parameters": f"{len(params)} ({sum(p.numel() for p in params)} numbers)",
        }
        said = gather_json([self.steps, self._moved, mine], name, settings.process_set)
        for rank, (_, _, theirs) in said.items():
            for key, own in mine.items():
                if own != theirs[key]:
                    raise MismatchError(
                        f"'{self.name}': rank {rank} has {key}={theirs[key]} and rank "
                        f"{basics.rank()} has {key}={own}; make the optimizer of local SGD alike "
                        "on all ranks"
                    )
        steps = {rank: count for rank, (count, _, _) in said.items()}
        return steps, any(moved for _, moved, _ in said.values())

    def _follow(self, root: int, name: str) -> None:
        settings = self.settings
        tensors = {}
        for index, param in enumerate(self._params()):
            if not param.requires_grad:
                continue
            tensors[str(index)] = self._anchors.setdefault(param, _wide(param))
            if settings.outer_momentum != 0.0:
                zeros = torch.zeros_like(self._anchors[param])
                tensors[f"{index}.momentum"] = self._momenta.setdefault(param, zeros)
        broadcast_tensors(tensors, root, name, settings.process_set)


def _means(
    name: str,
    tensors: list[torch.Tensor],
    compression: Any,
    weight: float | None,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    """Return the means of contiguous tensors, which are overwritten, over all ranks."""
    if not tensors:
        return []
    wire, by_hand = cast_in_core(compression, ops.Average)
    reduction = Reduction(ops.Average, weight=weight, process_set=process_set, wire=wire)
    sent = grouped("allreduce", tensors, name, process_set)
    return send_named(
        sent, by_hand, lambda wires: start_reducing(wires, reduction, in_place=True, blocking=True)
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, contiguous, and half precision as float32, in which changes add up."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.float() if copy.dtype in (torch.float16, torch.bfloat16) else copy


def _placed(
    params: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]
) -> dict[torch.Tensor, torch.Tensor]:
    pairs = zip(params, values, strict=bool(values))
    return {param: _wide(value).to(param.device) for param, value in pairs if value is not None}
