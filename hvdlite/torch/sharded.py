"""`ShardedOptimizer`: each rank keeps the optimizer's state of a share of the parameters.

It is stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020). Gradients are reduced as by `DistributedOptimizer`. Each whole
parameter has one owner, which updates it, and the updated parameters then travel to all ranks. An
optimizer never sees a part of a parameter, so norms of a tensor keep their meaning.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.bootstrap import environment
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.process_sets import ProcessSet, check_root
from hvdlite.subclass import become, subclass_in_place
from hvdlite.torch.collectives.gather import alltoall
from hvdlite.torch.optimizer import Distributed, DistributedOptimizer
from hvdlite.torch.optimizers.ownership import Ownership
from hvdlite.torch.optimizers.parameter_exchange import ParameterExchange

_State = dict[Any, Any]  # of a state_dict: by the parameter's index


class Sharded(Distributed):
    """The methods that `ShardedOptimizer` adds to the class of the optimizer."""

    _copies: int
    _ownership: Ownership | None = None
    _exchange: ParameterExchange | None = None
    _world: tuple[int, ...] = ()  # this rank and the members, when the owners were chosen
    _whole = True  # whether `state` has the state of all parameters
    _gathered_on: int | None = None  # the rank that has the state of all since `consolidate`
    _gathered: _State | None = None  # on that rank: the state of all parameters

    @property
    def _process_set(self) -> ProcessSet:
        return self._reducer.settings.reduction.process_set

    @property
    def _alone(self) -> bool:
        return not self._reducer.takes_part or self._process_set.size() == 1

    def _update(self, closure: Any) -> Any:
        """Update the own parameters, and take those of others from their owners."""
        if self._alone:
            return super()._update(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange = self._prepare()
        self._update_own()
        exchange.run()
        return loss

    def _update_own(self) -> None:
        """Step while only the own parameters have gradients.

        The hook that takes the other gradients away is the last one, so that hooks of the user,
        which may clip gradients, see all of them.
        """
        hidden: dict[torch.Tensor, torch.Tensor] = {}

        def hide(*_: Any) -> None:
            for param in self._parameters():
                if param.grad is not None and not self._has_state(param):
                    hidden[param] = param.grad
                    param.grad = None

        hook = self.register_step_pre_hook(hide)
        try:
            super()._update(None)
        finally:
            hook.remove()
            for param, gradient in hidden.items():
                param.grad = gradient

    def _prepare(self) -> ParameterExchange:
        """Give new parameters an owner, and drop the state that belongs to other ranks."""
        members = self._process_set.ranks
        world = (basics.rank(), *members)
        if self._ownership is None or world != self._world:
            if not self._whole:
                raise HvdliteError(
                    "the ranks have changed since the last step of this ShardedOptimizer, and each "
                    "has the state of a share of the parameters: call consolidate() and save "
                    "state_dict() before shutdown(), and load_state_dict() after init()"
                )
            hosts = basics.host_of()
            self._ownership = Ownership([hosts[rank] for rank in members], self._copies)
            self._exchange, self._world = None, world
        params = [param for param in self._parameters() if self._moves(param)]
        exchange, drops = self._exchange, self._whole
        if exchange is None or not exchange.suits(params):
            self._ownership.take(params)
            name = f"{self._reducer.name}.updated"
            exchange = ParameterExchange(name, params, self._ownership, self._process_set)
            self._exchange, drops = exchange, True
        if drops:
            for param in [one for one in self.state if isinstance(one, torch.Tensor)]:
                if not self._has_state(param):
                    del self.state[param]
        self._whole, self._gathered_on, self._gathered = False, None, None
        return exchange

    def _parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _moves(self, param: torch.Tensor) -> bool:
        """Return whether a step may change a parameter; one that was frozen may have a gradient."""
        assert self._ownership is not None
        frozen = not param.requires_grad
        return not frozen or (param.grad is not None and self._ownership.knows(param))

    def _has_state(self, param: torch.Tensor) -> bool:
        position = self._process_set.ranks.index(basics.rank())
        return self._ownership is None or self._ownership.has_state(param, position)

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
        owns = self._ownership is not None and not is_root
        own = _serialized(self._own_state()) if owns else b""
        splits = [len(own) if rank == to else 0 for rank in members]
        data = torch.frombuffer(bytearray(own or b"-"), dtype=torch.uint8)[: len(own)]
        name = f"{self._reducer.name}.state"
        received, counts = alltoall(data, torch.tensor(splits), name, self._process_set)
        if is_root and not self._whole:
            state = dict(super().state_dict()["state"])
            for rank, part in zip(members, received.split(counts.tolist()), strict=True):
                if rank == to:
                    continue
                if part.numel() == 0:
                    raise HvdliteError(
                        f"consolidate(to={to}): rank {rank} sent no state to rank {to}; call "
                        "consolidate() with the same rank everywhere, and before hvd.join()"
                    )
                state.update(_deserialized(part))
            self._gathered = state
        self._gathered_on = to

    def _own_state(self) -> _State:
        """Return the state of the parameters that this rank owns, by index."""
        assert self._ownership is not None
        position = self._process_set.ranks.index(basics.rank())
        indices = {param: index for index, param in enumerate(self._parameters())}
        return {
            indices[param]: value
            for param, value in self.state.items()
            if param in indices and self._ownership.owns(position, param)
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
        """Load the state of all parameters; the next `step` drops what other ranks update.

        The file may come from any number of ranks, and from a plain optimizer.
        """
        super().load_state_dict(state_dict)
        self._whole, self._gathered_on, self._gathered = True, None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        copied = _shard(super().__deepcopy__(memo), self._copies)
        copied._world, copied._whole = self._world, self._whole
        if self._ownership is not None:
            copied._ownership = self._ownership.of_copies(memo)
        return copied

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
    stage: int = 1,
    copies: int = 1,
    **arguments: Any,
) -> Sharded:
    """Make an optimizer step with the gradients of all ranks, and divide its state among them.

    Parameters after `step` have the same bits as with `DistributedOptimizer`, and Adam's state
    takes 1/n of the memory on n ranks. Each step sends the updated parameters besides the
    gradients, half as many bytes again. Clip gradients between backward() and `step` as usual.

    Args:
        optimizer: updates each parameter from its own gradient, as all of torch.optim do except
            LBFGS; it is changed in place.
        named_parameters: `model.named_parameters()`, for messages that name parameters.
        stage: 1, of ZeRO: the optimizer's state is divided.
        copies: how many ranks have the state of each parameter; a second copy is on another host
            if there is one, and costs no communication.
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
    basics.size()  # raises without init()
    _check_numbers(stage, copies)
    if arguments.get("op", ops.Average) == ops.Adasum:
        raise ArgumentError(
            "ShardedOptimizer cannot be used with op=hvd.Adasum, which updates all parameters on "
            "every rank; use op=hvd.Average"
        )
    if basics.in_elastic_job():
        raise ArgumentError(
            "ShardedOptimizer cannot be used in an elastic job: a rank that leaves would take its "
            "share of the state along; use DistributedOptimizer"
        )
    _check_optimizer(optimizer)
    return _shard(DistributedOptimizer(optimizer, named_parameters, **arguments), copies)


def _check_numbers(stage: int, copies: int) -> None:
    if stage != 1:
        raise ArgumentError(
            f"ShardedOptimizer(stage={stage!r}): give stage=1, which divides the optimizer's state "
            "and is the only stage there is"
        )
    if not isinstance(copies, int) or copies < 1:
        raise ArgumentError(
            f"ShardedOptimizer(copies={copies!r}): give the number of ranks that have the state of "
            "each parameter, 1 or more"
        )


def _check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers whose update of one parameter depends on other gradients."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"ShardedOptimizer takes a torch.optim.Optimizer, not a {kind}")
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


def _shard(distributed: Any, copies: int) -> Sharded:
    """Turn a distributed optimizer into a sharded one, in place."""
    become(distributed, distributed._wrapped_class)
    subclass_in_place(distributed, Sharded)
    distributed._copies = copies
    sharded: Sharded = distributed
    return sharded


def _serialized(state: _State) -> bytes:
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


def _deserialized(data: torch.Tensor) -> _State:
    """Undo `_serialized`, into host memory; objects other than tensors may need pickle."""
    memory = io.BytesIO(data.numpy().tobytes())
    safely = not environment.allow_pickle()
    state: _State = torch.load(memory, map_location="cpu", weights_only=safely)
    return state
