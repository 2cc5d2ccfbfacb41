"""`DistributedOptimizer`: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.ops import next_object
from hvdlite.optimizers import Groups, check_gradient_op, check_groups, check_passes, check_weight
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id
from hvdlite.torch.adasum import DeltaExchange, step_by_deltas
from hvdlite.torch.bucket_memory import bytes_of_cap
from hvdlite.torch.buckets import GradientExchange, Settings, Weight
from hvdlite.torch.collectives.allreduce import allreduce
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.compression import Compression
from hvdlite.torch.gradient_hooks import reader_of
from hvdlite.torch.late import Late, LateExchange, LateStepping, check_late
from hvdlite.torch.reducer import GradientReducer
from hvdlite.torch.virtual.steps import (
    VirtualStepping,
    VirtualSteps,
    reduction_of_virtual_ranks,
    refuse_with_virtual_size,
)
from hvdlite.torch.wrapping import Wrapping, own_step, wrap


class Distributed(VirtualStepping, LateStepping):
    """The methods that `DistributedOptimizer` adds to the class of the optimizer.

    The first step compares the parameters of the ranks, and warns (`ReplicasDifferWarning`) if
    they are not the same.
    """

    _reducer: GradientReducer
    _skips_synchronize = False
    _shares_parameters = False  # The ranks of a host have them in common memory.

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The names by parameter; scripts for Horovod read this property."""
        return dict(self._reducer.parameter_names)

    @property
    def weight(self) -> Weight:
        """The weight of this rank's next gradients in the average: its number of samples or tokens.

        Set it before backward(), on all ranks or on none; zero leaves this rank out. A callable is
        called once per step.
        """
        return self._reducer.settings.weight

    @weight.setter
    def weight(self, weight: Weight) -> None:
        if weight is not None and self._virtual is not None:
            refuse_with_virtual_size("weight=")
        check_weight(weight, self._reducer.settings.reduction.op)
        self._reducer.set_weight(weight)

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are reduced; `step` then does not wait again.

        After backward() gradients are reduced already, and this method does nothing. On a rank that
        had no backward(), call it before you clip, unscale or read gradients:

        Example:
            >>> optimizer.synchronize()
            >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> optimizer.step()
        """
        if not self._reducer.exchange.in_step:
            self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` use the gradients as they are; scripts for Horovod do so after synchronize().

        Raises:
            ArgumentError: with op=hvd.Adasum `step` combines updates, not gradients.

        Example:
            >>> optimizer.synchronize()
            >>> with optimizer.skip_synchronize():
            ...     optimizer.step()
        """
        if self._reducer.exchange.in_step:
            raise ArgumentError(
                "with op=hvd.Adasum step() combines the ranks' updates, and nothing is "
                "synchronized before it; call step() alone"
            )
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward() accumulate gradients on this rank without sending them.

        The next backward() outside of this context sends the sum.

        Example:
            >>> with optimizer.no_sync():
            ...     model(first).sum().backward()
            >>> model(second).sum().backward()
            >>> optimizer.step()
        """
        with self._reducer.paused():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Make `passes` the number of backward() calls that add up before gradients are sent."""
        self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ArgumentError: another optimizer of hvdlite has one of them.
            HvdliteError: they have gradients, and those of the others are reduced already.
        """
        super().add_param_group(param_group)
        self._reducer.check_added_group(self.__dict__["param_groups"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; see `torch.optim.Optimizer.zero_grad`.

        Raises:
            HvdliteError: gradients are not reduced yet.
        """
        if self._virtual is not None:
            self._virtual.before_zero_grad()
        self._reducer.before_zero_grad()
        super().zero_grad(set_to_none)

    @own_step
    def step(self, closure: Any = None, **options: Any) -> Any:
        """Reduce the gradients if that has not been done, and update the parameters.

        Args:
            closure: evaluates the model again and returns the loss. Gradients are reduced after
                each evaluation, and so is the loss: every rank takes the same decisions.
            options: further arguments of the wrapped class's step.

        Returns:
            What the step of the wrapped class returns: the loss of the closure, or None.

        Raises:
            ArgumentError: there is a closure, beside `late`.
            HvdliteError: a reduction has failed, or `skip_synchronize` left one in flight.
        """
        self._opt_called = True  # LR schedulers check this.
        if closure is not None and self._virtual is not None:
            refuse_with_virtual_size("step(closure)")
        if closure is not None and self._late is not None:
            raise ArgumentError(
                "late= cannot be combined with step(closure): every rank evaluates the model "
                "there, and with late= a rank that is behind computes nothing; call step() without "
                "a closure"
            )
        if self._virtual is not None:
            self._virtual.before_step()
        if self._skips_synchronize:
            if self._reducer.in_flight:
                raise HvdliteError(
                    "step() under skip_synchronize() while gradients are being reduced; "
                    "call synchronize() first"
                )
            result = self._update(closure, options)
        elif self._reducer.exchange.in_step:
            result = step_by_deltas(self, lambda: self._update(closure, options))
        elif closure is None:
            self._reducer.synchronize_in_step()
            result = self._update(None, options)
        else:
            result = self._update(reducing(self._reducer, closure), options)
        self._reducer.count_step()
        self._reducer.exchange.after_step()
        return result

    def _update(self, closure: Any, options: dict[str, Any]) -> Any:
        given = () if closure is None else (closure,)
        return super().step(*given, **options)

    def _go_on(self) -> None:
        super()._go_on()
        self._reducer.drop_accumulated()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_cap_mb: float | None = None,
    weight: Weight = None,
    gradient_as_bucket_view: bool = False,
    late: Late | None = None,
    overlap: bool | None = None,
    virtual_size: int | None = None,
) -> Distributed:
    """Make an optimizer step with the gradients of all ranks.

    When backward() returns, gradients are reduced over all ranks: backward() submits a bucket of
    gradients as soon as the last of them is ready, and waits for all buckets at its end. Every rank
    calls backward() and `step` equally often. If its backward() touches no parameter, it takes part
    in `step`. A parameter without a gradient counts as zeros on that rank; without one on any rank,
    its `grad` stays None.

    Args:
        optimizer: any optimizer; it is changed in place, and schedulers made before still work.
        named_parameters: `model.named_parameters()`, for messages that name parameters.
        compression: how gradients are compressed while they travel, see `Compression`.
        backward_passes_per_step: the number of backward() calls that accumulate before gradients
            are sent. They are summed, as in torch: divide the loss by their number for a mean.
        op: `Average`, `Sum`, or `Adasum` of the changes that the optimizer makes.
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for sums that would overflow otherwise.
        num_groups: divides the parameters into that many buckets, instead of by size.
        groups: as `num_groups`, or lists of parameters: each is a bucket, and so is any other one.
        sparse_as_dense: makes sparse gradients dense, except for SparseAdam, which needs them.
        process_set: its members reduce their gradients; other ranks step with their own ones.
        bucket_cap_mb: the size of a bucket in MiB, by default 4, and 25 on GPUs; the first is 1.
        weight: this rank's weight in the average, see `Distributed.weight`.
        gradient_as_bucket_view: keeps reduced gradients in gradient memory; each `grad` is a view
            of it that the next reduction overwrites; see docs/gpu.md.
        late: lets steps go on without late ranks; loops read `optimizer.behind`.
        overlap: False submits all at the end of backward(); None does so on CPUs without an idle
            core, see docs/performance.md.
        virtual_size: gradients are means over so many virtual ranks, a power of two, which any
            number of ranks carries; see `Distributed.virtual_steps`.

    Returns:
        The optimizer, now of a subclass of its class, with the methods of `Distributed`.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    basics.size()  # Without init() this raises, rather than the first backward().
    check_gradient_op(op, gradient_predivide_factor)
    passes = check_passes(backward_passes_per_step)
    _check_optimizer(optimizer)
    settings = Settings(
        Reduction(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor,
                  process_set=process_set), compression, passes,
        _groups_of(num_groups, groups), cap_bytes=bytes_of_cap(bucket_cap_mb), overlap=overlap,
        sparse_as_dense=sparse_as_dense and not isinstance(optimizer, torch.optim.SparseAdam),
        bucket_view=gradient_as_bucket_view, weight=weight, virtual_size=virtual_size,
    )  # fmt: skip
    if virtual_size is not None:
        settings.reduction = reduction_of_virtual_ranks(settings, late)
    check_weight(weight, op)
    check_late(late, op)
    names = _names_of(optimizer, named_parameters)
    return _distribute(optimizer, names, settings, late)


def _groups_of(num_groups: int, groups: Groups | None) -> Groups:
    given = num_groups if groups is None else groups
    groups = check_groups(given, "parameter", none="cut by size")
    members = [] if isinstance(groups, int) else [param for group in groups for param in group]
    if not all(isinstance(member, torch.Tensor) for member in members):
        raise ArgumentError("groups is a number, or a list of lists of parameters")
    return groups


def _distribute(
    optimizer: Any, names: dict[torch.Tensor, str], settings: Settings, late: Late | None
) -> Distributed:
    process_set = settings.reduction.process_set
    kind = "deltas" if settings.reduction.op == ops.Adasum else "gradients"
    number = next_object(kind, registered_id(process_set))
    name = f"{kind}.{number}" if number else kind
    title = f"the DistributedOptimizer of {type(optimizer).__name__} ({name})"
    if settings.reduction.op == ops.Adasum:
        exchange: GradientExchange = DeltaExchange(name, settings, optimizer)
    elif late is not None:
        exchange = LateExchange(name, settings, late)
    else:
        exchange = GradientExchange(name, settings)
    wrap(optimizer, Distributed, title, process_set, names)
    reducer = optimizer._reducer = GradientReducer(exchange, reader_of(optimizer), names, title)
    if settings.virtual_size is not None:
        optimizer._virtual = VirtualSteps(reducer, settings.virtual_size)
    distributed: Distributed = optimizer
    return distributed


def _check_optimizer(optimizer: Any) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(
            f"DistributedOptimizer takes an optimizer, not a {type(optimizer).__name__}: pass an "
            "optimizer, for example torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if "param_groups" not in vars(optimizer):
        raise ArgumentError(
            f"the parameters of this {type(optimizer).__name__} belong to an optimizer inside: "
            "make that one a DistributedOptimizer, and wrap the result"
        )
    if isinstance(optimizer, Distributed):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, Wrapping):
        raise ArgumentError(
            "this optimizer averages parameters already (hvd.LocalSGD); make it a "
            "DistributedOptimizer over the ranks of one host first, and hvd.LocalSGD of that"
        )


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Check the user's names: either all of the optimizer's parameters have one, or none has."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentError(
            "named_parameters takes (name, parameter) pairs: model.named_parameters()"
        )
    names: dict[torch.Tensor, str] = {}
    owner: dict[str, torch.Tensor] = {}
    for name, param in pairs:
        if owner.setdefault(name, param) is not param:
            raise ArgumentError(
                f"two of named_parameters are called '{name}'; give each model its own prefix"
            )
        names.setdefault(param, name)
    unnamed = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ArgumentError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, the first of "
            f"shape {tuple(unnamed[0].shape)}; name all of them, or leave named_parameters out"
        )
    return names


def reducing(reducer: GradientReducer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a closure of `step`: after each call the gradients and the loss are reduced."""
    # If the closure calls no backward(), gradients that are reduced already are not reduced again.
    used = False  # It says whether the optimizer has used gradients: the next are new.

    def evaluate() -> Any:
        nonlocal used
        if used:
            reducer.expect_gradients()
        used = True
        loss = closure()
        reducer.synchronize()
        if loss is None or not reducer.takes_part:
            return loss
        op, prescale, postscale, weight, process_set, *_ = reducer.reduction
        known = isinstance(loss, torch.Tensor)
        value = loss.detach() if known else torch.tensor(loss, device="cpu")
        reduced = allreduce(value, op=op, prescale_factor=prescale, postscale_factor=postscale,
                            process_set=process_set, weight=weight)  # fmt: skip
        return reduced if known else reduced.item()

    return evaluate
