"""`ShardedOptimizer`: each rank keeps the optimizer's state of a share of the parameters.

These are stages 1 and 2 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020). Each whole parameter has one owner, which updates it, and the
updated parameters then travel to all ranks. An optimizer never sees a part of a parameter, so norms
of a tensor keep their meaning. In stage 1 gradients are reduced as by `DistributedOptimizer`; in
stage 2 a reduced gradient goes to its parameter's owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvdlite import basics
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.modes import Mode, check_together
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.subclass import become, subclass_in_place
from hvdlite.torch.collectives.gather import alltoall
from hvdlite.torch.collectives.memory import bytes_of
from hvdlite.torch.exchange.owned_exchange import OwnedExchange
from hvdlite.torch.exchange.ownership import Division, Ownership
from hvdlite.torch.exchange.settings import modes_of
from hvdlite.torch.optimizer import Distributed, DistributedOptimizer
from hvdlite.torch.optimizers import gradient_norms, overflow
from hvdlite.torch.optimizers.state_bytes import deserialized, serialized
from hvdlite.torch.sharded.parameter_exchange import ParameterExchange
from hvdlite.torch.sharded.shared_parameters import SharedParameters, check_shareable

_State = dict[Any, Any]  # A state_dict has it by the parameter's index.


class Sharded(Distributed):
    """The methods that `ShardedOptimizer` adds to the class of the optimizer."""

    _division: Division
    _ownership: Ownership | None = None  # This is from the last step.
    _exchange: ParameterExchange | SharedParameters | None = None
    _whole = True  # It says whether `state` has the state of all parameters.
    _gathered_on: int | None = None  # This rank has the state of all since `consolidate`.
    _gathered: _State | None = None  # On that rank it is the state of all parameters.

    @property
    def _process_set(self) -> ProcessSet:
        return self._reducer.settings.reduction.process_set

    @property
    def _shares_parameters(self) -> bool:  # type: ignore[override]
        return self._division.by_host

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
            for param in self._parameters():
                if param.grad is not None and not self._has_state(param):
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
        ownership = self._division.present()
        if ownership is not self._ownership:
            if not self._whole:
                raise HvdliteError(
                    "the ranks have changed since the last step of this ShardedOptimizer, and each "
                    "has the state of a share of the parameters: call consolidate() and save "
                    "state_dict() before shutdown(), and load_state_dict() after init()"
                )
            self._ownership, self._exchange = ownership, None
        params = [param for param in self._parameters() if self._moves(param)]
        exchange, drops = self._exchange, self._whole
        if exchange is None or not exchange.suits(params):
            ownership.take(params)
            exchange = self._exchange_of(params, ownership)
            self._exchange, drops = exchange, True
        if drops:
            for param in [one for one in self.state if isinstance(one, torch.Tensor)]:
                if not self._has_state(param):
                    del self.state[param]
        self._whole, self._gathered_on, self._gathered = False, None, None
        return exchange

    def _exchange_of(
        self, params: list[torch.Tensor], ownership: Ownership
    ) -> ParameterExchange | SharedParameters:
        name = f"{self._reducer.name}.updated"
        if not self._division.by_host:
            return ParameterExchange(name, params, ownership, self._process_set)
        sharing = self._exchange
        if not isinstance(sharing, SharedParameters):
            members, names = self._division.members(), self._reducer.parameter_names
            sharing = SharedParameters(name, self._process_set, members, names)
        sharing.params = params
        return sharing

    def _parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _moves(self, param: torch.Tensor) -> bool:
        """Return whether a step may change a parameter; one that was frozen may have a gradient."""
        assert self._ownership is not None
        if param.requires_grad or not self._ownership.knows(param):
            return bool(param.requires_grad)
        return self._reducer.divides or param.grad is not None  # With stage 2 its owner knows.

    def _has_state(self, param: torch.Tensor) -> bool:
        ownership = self._ownership
        return ownership is None or ownership.has_state(param, self._division.place)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all parameters by their norm; every rank calls it before `step`.

        With stage 2 a rank has only the gradients of its own parameters, and
        `torch.nn.utils.clip_grad_norm_` would take their norm for that of all. This has the bits of
        that function on all gradients, in the order of the optimizer's parameters.

        Args:
            max_norm: the norm after clipping, if it was larger.
            norm_type: of a p-norm; may be `inf`.

        Returns:
            The norm before clipping, the same on every rank.

        Example:
            >>> loss.backward()
            >>> optimizer.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        self.synchronize()
        params = self._parameters()
        if self._alone or not self._reducer.divides:
            norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
            return norm
        name = f"{self._reducer.name}.norms"
        return gradient_norms.clip(params, max_norm, norm_type, name, self._process_set)

    def _unscale_together(
        self, unscale: Callable[[], overflow.Found], found_inf: torch.Tensor
    ) -> overflow.Found:
        """Unscale for a GradScaler, and agree with the other ranks on overflows."""
        if self._alone or not self._reducer.divides:
            return unscale()
        self.synchronize()
        return overflow.agree(
            unscale, found_inf, f"{self._reducer.name}.overflow", self._process_set
        )

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
        owns = self._ownership is not None and not is_root and to in holders
        own = serialized(self._own_state()) if owns else b""
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
                state.update(deserialized(bytes(bytes_of(part))))
            self._gathered = state
        self._gathered_on = to

    def _own_state(self) -> _State:
        """Return the state of the parameters that this rank owns, by index."""
        assert self._ownership is not None
        indices = {param: index for index, param in enumerate(self._parameters())}
        return {
            indices[param]: value
            for param, value in self.state.items()
            if param in indices and self._ownership.owns(self._division.place, param)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        copied = _shard(
            super().__deepcopy__(memo), self._division.of_copies(memo), self._reducer.divides
        )
        copied._whole = self._whole
        if self._ownership is self._division.present():
            copied._ownership = copied._division.present()
        else:
            copied._ownership = self._ownership  # This is from a former world.
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
    share_parameters: bool = False,
    **arguments: Any,
) -> Sharded:
    """Make an optimizer step with the gradients of all ranks, and divide its state among them.

    Parameters after `step` have the same bits as with `DistributedOptimizer`, and Adam's state
    takes 1/n of the memory on n ranks. With stage=1 each step sends the updated parameters besides
    the gradients, half as many bytes again. With stage=2 it sends no more than without sharding,
    and a rank keeps only the reduced gradients of the parameters that it updates: `grad` of the
    others is None after backward(), so clip with `optimizer.clip_grad_norm_`.

    Args:
        optimizer: updates each parameter from its own gradient, as all of torch.optim do except
            LBFGS; it is changed in place.
        named_parameters: `model.named_parameters()`, for messages that name parameters.
        stage: of ZeRO. 1: the optimizer's state is divided; 2: the gradients, too.
        copies: how many ranks have the state of each parameter; a second copy is on another host
            if there is one, and costs no communication. With stage=2 it is 1; in an elastic job
            at least 2.
        share_parameters: whether the ranks of a host have the parameters in common memory, each
            host with the whole state of the optimizer: one copy of both per host, and no step sends
            parameters. Parameters move there in the first step, with the values of the host's first
            rank. Call `unshare_parameters()` before you change them outside step(). It needs
            CPUs and stage=1.
        arguments: those of `DistributedOptimizer`; stage=2 takes neither `compression` nor `weight`
            nor `gradient_as_bucket_view`, and sparse gradients with `sparse_as_dense` only.

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
    _check_numbers(stage, copies)
    in_set = arguments.get("process_set", global_process_set) is not global_process_set
    check_together(
        {
            Mode.SHARDED: True,
            Mode.STAGE_2: stage == 2,
            Mode.ONE_COPY: copies == 1,
            Mode.COPIES: copies > 1,
            Mode.SHARDED_IN_SET: in_set,
            Mode.SHARE_PARAMETERS: share_parameters,
            **modes_of(**arguments),
        }
    )
    _check_optimizer(optimizer)
    if share_parameters:
        check_shareable([param for group in optimizer.param_groups for param in group["params"]])
    distributed = DistributedOptimizer(optimizer, named_parameters, **arguments)
    process_set = distributed._reducer.settings.reduction.process_set
    division = Division(process_set, copies, by_host=share_parameters)
    if stage == 2:
        overflow.extend_grad_scaler()
    sharded = _shard(distributed, division, stage == 2)
    if basics.in_elastic_job():
        from hvdlite.torch.sharded.elastic import make_elastic

        make_elastic(sharded)
    return sharded


def _check_numbers(stage: int, copies: int) -> None:
    if stage not in (1, 2):
        raise ArgumentError(
            f"ShardedOptimizer(stage={stage!r}): give stage=1, which divides the optimizer's "
            "state, or stage=2, which divides the gradients, too"
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


def _shard(distributed: Any, division: Division, divides_gradients: bool) -> Sharded:
    """Turn a distributed optimizer into a sharded one, in place."""
    become(distributed, distributed._wrapped_class)
    subclass_in_place(distributed, Sharded)
    distributed._division = division
    sharded: Sharded = distributed
    if divides_gradients:
        reducer = sharded._reducer
        reducer.use_exchange(OwnedExchange(reducer.name, reducer.settings, division))
    return sharded
