"""`ShardedOptimizer`: each rank keeps the optimizer's state of a share of the parameters.

This is stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020). Gradients are reduced as by `DistributedOptimizer`. Each whole
parameter has one owner, which updates it, and the updated parameters then travel to all ranks. An
optimizer never sees a part of a parameter, so norms of a tensor keep their meaning.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.optimizers import become, subclass_in_place
from hvdlite.process_sets import ProcessSet, check_root
from hvdlite.rendezvous import environment
from hvdlite.torch.collectives.gather import alltoall
from hvdlite.torch.collectives.tensors import bytes_of
from hvdlite.torch.functions import start_broadcasting
from hvdlite.torch.optimizer import Distributed, DistributedOptimizer
from hvdlite.torch.shared_parameters import SharedParameters, check_shareable
from hvdlite.torch.virtual.steps import refuse_with_virtual_size
from hvdlite.torch.wrapping import refuse_evaluating

_State = dict[Any, Any]  # A state_dict has it by the parameter's index.


class Sharded(Distributed):
    """The methods that `ShardedOptimizer` adds to the class of the optimizer."""

    _division: Division
    _exchange: ParameterExchange | SharedParameters | None = None
    _whole = True  # It says whether `state` has the state of all parameters.
    _gathered_on: int | None = None  # This rank has the state of all since `consolidate`.
    _gathered: _State | None = None  # On that rank it is the state of all parameters.

    @property
    def _process_set(self) -> ProcessSet:
        return self._reducer.settings.reduction.process_set

    @property
    def _alone(self) -> bool:
        return not self._reducer.takes_part or self._process_set.size() == 1

    def _update(self, closure: Any, options: dict[str, Any]) -> Any:
        """Update the own parameters, and take those of others from their owners."""
        if self._alone:
            return super()._update(closure, options)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare().run(lambda: self._update_own(options))
        return loss

    def _update_own(self, options: dict[str, Any]) -> None:
        """Step while only the own parameters have gradients."""
        hidden: dict[torch.Tensor, torch.Tensor] = {}

        def hide(*_: Any) -> None:
            for param in self._grouped_parameters():
                if param.grad is not None and not self._division.updates(param):
                    hidden[param] = param.grad
                    param.grad = None

        # This hook is the last one, so that hooks of the user, which may clip gradients, see all.
        hook = self.register_step_pre_hook(hide)
        try:
            super()._update(None, options)
        finally:
            hook.remove()
            for param, gradient in hidden.items():
                param.grad = gradient

    def _prepare(self) -> ParameterExchange | SharedParameters:
        """Give new parameters an owner, and drop the state that belongs to other ranks."""
        division = self._division
        if division.world() != division.divided_in:
            if not self._whole:
                raise HvdliteError(
                    "the ranks have changed since the last step of this ShardedOptimizer, and each "
                    "has the state of a share of the parameters: call consolidate() and save "
                    "state_dict() before shutdown(), and load_state_dict() after init()"
                )
            division.begin_anew()
            self._exchange = None
        # A step may change these. One that was frozen meanwhile may still have a gradient.
        params = [
            param
            for param in self._grouped_parameters()
            if param.requires_grad or (param in division.owners and param.grad is not None)
        ]
        exchange, drops = self._exchange, self._whole
        if exchange is None or [*map(id, exchange.params)] != [*map(id, params)]:
            division.take(params)
            exchange = self._exchange_of(params)
            self._exchange, drops = exchange, True
        if drops:
            for param in [one for one in self.state if isinstance(one, torch.Tensor)]:
                if not self._division.updates(param):
                    del self.state[param]
        self._whole, self._gathered_on, self._gathered = False, None, None
        return exchange

    def _exchange_of(self, params: list[torch.Tensor]) -> ParameterExchange | SharedParameters:
        name = f"{self._reducer.name}.updated"
        if not self._division.by_host:
            return ParameterExchange(name, params, self._division, self._process_set)
        sharing = self._exchange
        if not isinstance(sharing, SharedParameters):
            members, names = self._division.members(), self._reducer.parameter_names
            sharing = SharedParameters(name, self._process_set, members, names)
        sharing.params = params
        return sharing

    def unshare_parameters(self) -> None:
        """Give this rank a copy of its own of parameters that are shared, until the next `step`.

        With share_parameters=True call it on every rank before you change parameters outside
        `step`; change them alike on every rank then. Without, it does nothing.

        Example:
            >>> optimizer.unshare_parameters()
            >>> model.load_state_dict(best)
        """
        if isinstance(self._exchange, SharedParameters):
            self._exchange.unshare()

    def consolidate(self, to: int = 0) -> None:
        """Collect the state of all parameters on one rank; `state_dict` works there until `step`.

        Every rank calls it. The state that arrives stays in host memory until the next `step`.

        Args:
            to: the rank that gets the state.

        Raises:
            ArgumentError: `to` is not a member of the process set.
            HvdliteError: a rank named another rank.

        Example:
            >>> optimizer.consolidate(to=0)
            >>> if hvd.rank() == 0:
            ...     torch.save(optimizer.state_dict(), "optimizer.pt")
        """
        if self._alone:
            return
        check_root(to, self._process_set)
        members = self._process_set.ranks
        is_root = basics.rank() == to
        holders = self._division.members()  # Other hosts have the same state.
        owns = bool(self._division.divided_in) and not is_root and to in holders
        memory = io.BytesIO()
        if owns:
            torch.save(self._own_state(), memory)
        own = memory.getvalue()
        splits = [len(own) if rank == to else 0 for rank in members]
        data = torch.frombuffer(bytearray(own or b"-"), dtype=torch.uint8)[: len(own)]
        name = f"{self._reducer.name}.state"
        received, counts = alltoall(
            data, torch.tensor(splits, device="cpu"), name, self._process_set
        )
        if is_root and not self._whole:
            state = dict(super().state_dict()["state"])
            for rank, part in zip(members, received.split(counts.tolist()), strict=True):
                if rank == to or rank not in holders:
                    continue
                if part.numel() == 0:
                    raise HvdliteError(
                        f"consolidate(to={to}): rank {rank} sent no state to rank {to}; call "
                        "consolidate() with the same rank everywhere, and before hvd.join()"
                    )
                sent = io.BytesIO(bytes(bytes_of(part)))
                safely = not environment.allow_pickle()  # Other objects may need pickle.
                state.update(torch.load(sent, map_location="cpu", weights_only=safely))
            self._gathered = state
        self._gathered_on = to

    def _own_state(self) -> _State:
        indices = {param: index for index, param in enumerate(self._grouped_parameters())}
        return {
            indices[param]: value
            for param, value in self.state.items()
            if param in indices and self._division.owners.get(param) == self._division.place
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, which a plain optimizer can load.

        Raises:
            HvdliteError: this rank does not have the state of all parameters, see `consolidate`.
        """
        if not self._alone and not self._whole and self._gathered is None:
            if self._gathered_on is None:
                raise HvdliteError(
                    f"state_dict() on rank {basics.rank()}, which has the state of a share of the "
                    "parameters; call optimizer.consolidate(to=...) after step(), on every rank"
                )
            raise HvdliteError(
                f"state_dict() on rank {basics.rank()}: consolidate() has collected the state on "
                f"rank {self._gathered_on}; call state_dict() on that rank"
            )
        values: dict[str, Any] = super().state_dict()
        if self._gathered is not None:
            values["state"] = dict(self._gathered)
        return values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of all parameters; the next `step` drops what other ranks update.

        The file may come from any number of ranks, and from a plain optimizer.
        """
        super().load_state_dict(state_dict)
        self._whole, self._gathered_on, self._gathered = True, None, None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._alone and not self._whole:
            raise HvdliteError(
                "a ShardedOptimizer cannot be pickled, because this rank has the state of a share "
                "of the parameters; call consolidate() and save state_dict()"
            )
        return super().__reduce_ex__(protocol)


def ShardedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    share_parameters: bool = False,
    **arguments: Any,
) -> Sharded:
    """Make an optimizer step with the gradients of all ranks, and divide its state among them.

    Parameters after `step` have the same bits as with `DistributedOptimizer`, and Adam's state
    takes 1/n of the memory on n ranks. Each step sends the updated parameters besides the
    gradients, half as many bytes again.

    Args:
        optimizer: updates each parameter from its own gradient, as all of torch.optim do except
            LBFGS; it is changed in place.
        named_parameters: `model.named_parameters()`, for messages that name parameters.
        share_parameters: whether the ranks of a host have the parameters in common memory, each
            host with the whole state of the optimizer: one copy of both per host, and no step sends
            parameters. Parameters move there in the first step, with the values of the host's first
            rank. Call `unshare_parameters()` before you change them outside step(). It needs
            CPUs.
        arguments: those of `DistributedOptimizer`.

    Returns:
        The optimizer, with the methods of `Distributed` and `Sharded`.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> optimizer = hvd.ShardedOptimizer(optimizer, model.named_parameters())
    """
    basics.size()  # This raises an error without init().
    if basics.in_elastic_job():
        raise ArgumentError(
            "ShardedOptimizer cannot be combined with an elastic job: a rank that dies takes its "
            "share of the state along; use DistributedOptimizer"
        )
    if arguments.get("op") == ops.Adasum:
        raise ArgumentError(
            "ShardedOptimizer cannot be combined with op=hvd.Adasum: it updates all parameters on "
            "every rank; use op=hvd.Average"
        )
    if arguments.get("late") is not None:
        raise ArgumentError(
            "ShardedOptimizer cannot be combined with late=: each step needs the parameters that "
            "every other rank has updated; use DistributedOptimizer"
        )
    if arguments.get("virtual_size") is not None:
        refuse_with_virtual_size("ShardedOptimizer")
    _check_optimizer(optimizer)
    if share_parameters:
        check_shareable([param for group in optimizer.param_groups for param in group["params"]])
    distributed = DistributedOptimizer(optimizer, named_parameters, **arguments)
    process_set = distributed._reducer.settings.reduction.process_set
    become(distributed, distributed._wrapped_class)
    subclass_in_place(distributed, Sharded)
    sharded: Any = distributed
    sharded._division = Division(process_set, by_host=share_parameters)
    sharded._shares_parameters = share_parameters
    return sharded  # type: ignore[no-any-return]


def _check_optimizer(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"ShardedOptimizer takes a torch.optim.Optimizer, not a {kind}")
    refuse_evaluating(optimizer, "ShardedOptimizer", "use hvd.DistributedOptimizer")
    clips = any(group.get("max_grad_norm") for group in optimizer.param_groups)
    if clips or isinstance(optimizer, torch.optim.LBFGS):
        reason = "clips by the norm of all gradients" if clips else "uses all gradients together"
        remedy = (
            "clip before step(), without max_grad_norm" if clips else "use DistributedOptimizer"
        )
        raise ArgumentError(
            f"this {kind} {reason} inside step(), where a rank of a ShardedOptimizer has only its "
            f"own; {remedy}"
        )


class Division:
    """The division of whole parameters among the members of a process set: each has an owner."""

    # All ranks compute the same division from the same parameters, without communication. A
    # parameter keeps its owner, because the owner has the optimizer's state for it.

    def __init__(self, process_set: ProcessSet, by_host: bool = False) -> None:
        self._process_set = process_set
        self.by_host = by_host
        self.place = 0  # This rank has this position among the members.
        self.divided_in: tuple[int, ...] = ()  # The division is of this `world`.
        self.owners: dict[torch.Tensor, int] = {}  # They are positions among the members.
        self._loads: list[int] = []  # By owner, in bytes.

    def members(self) -> list[int]:
        """List the ranks that own parameters, in the order of their positions."""
        if not self.by_host:
            return list(self._process_set.ranks)
        hosts = basics.current_world().host_of
        return [rank for rank in self._process_set.ranks if hosts[rank] == hosts[basics.rank()]]

    def world(self) -> tuple[int, ...]:
        """Return what a division depends on: this rank and the members as they are now."""
        return basics.rank(), *self.members()

    def begin_anew(self) -> None:
        own, *members = self.divided_in = self.world()
        self.place = members.index(own)
        self.owners, self._loads = {}, [0] * len(members)

    def take(self, params: Sequence[torch.Tensor]) -> None:
        """Give each parameter without an owner to the least loaded rank, the largest first."""
        new = [param for param in params if param not in self.owners]
        for param in sorted(new, key=lambda one: one.nbytes, reverse=True):
            owner = self._loads.index(min(self._loads))
            self.owners[param] = owner
            self._loads[owner] += param.nbytes

    def updates(self, param: torch.Tensor) -> bool:
        """Return whether this rank updates a parameter: as its owner, or because it has none."""
        return self.owners.get(param, self.place) == self.place


class ParameterExchange:
    """Gives every rank the parameters that others have updated."""

    # Each owner broadcasts its parameters, in place and fused; all broadcasts are under way
    # together. An allgather would need new memory for all parameters and two copies, which take
    # longer than the transfer does.

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        division: Division,
        process_set: ProcessSet,
    ) -> None:
        self.params = list(params)  # The order is the same on all ranks; each has an owner.
        self._name = name
        self._process_set = process_set
        ranks = process_set.ranks
        self._of: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in ranks}  # by owner
        for position, param in enumerate(params):
            self._of[ranks[division.owners[param]]][f"{name}.{position}"] = param
        # Of an owner without parameters this travels alone, so that a rank for which it has some
        # gets an error.
        for tensors in self._of.values() if params else ():
            tensors[f"{name}.end"] = params[0].new_empty(0)

    def run(self, update: Callable[[], None]) -> None:
        """Update, and exchange; raise a MismatchError if a rank has joined or has other ones."""
        update()
        if not self.params:
            return
        started = [
            start_broadcasting(tensors, owner, f"{self._name}.of.{owner}", self._process_set)
            for owner, tensors in self._of.items()
        ]
        failure: HvdliteError | None = None
        for finish in started:
            try:
                finish()
            except HvdliteError as error:
                failure = failure or error
        if isinstance(failure, ArgumentError | MismatchError):
            raise MismatchError(
                f"{failure}. With ShardedOptimizer make, freeze, thaw and add parameters alike "
                "on every rank, and give every rank as many steps, without hvd.join()"
            ) from failure
        if failure is not None:
            raise failure
