"""`ShardedOptimizer` in an elastic job: workers that are left take over what a dead one held."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import basics
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.objects import broadcast_object
from hvdlite.subclass import become, subclass_in_place
from hvdlite.torch.exchange.ownership import Ownership
from hvdlite.torch.functions import broadcast_optimizer_state, load_exactly
from hvdlite.torch.sharded.optimizer import Sharded
from hvdlite.torch.sharded.shares import (
    GatheredParameters,
    Shares,
    State,
    workers_of_step,
)


class ElasticSharded(Sharded):
    """The methods that `ShardedOptimizer` has in an elastic job."""

    _shares: Shares
    _gathering: GatheredParameters | None = None

    @property
    def _alone(self) -> bool:
        return False

    def _update(self, closure: Any, options: dict[str, Any]) -> Any:
        """Update the own parameters, and take those of others; finish the step if an owner dies."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shares = self._shares
        if shares.workers != workers_of_step():
            self._divide(values=False)
        gathering = self._plan()
        self._update_own(options)
        shares.version += 1
        self._gathered_on, self._gathered = None, None
        if not gathering.run():
            self._divide(values=True)
        return loss

    def _held(self) -> list[int]:
        """Return the indices of the parameters that this worker updates."""
        params, shares = self._parameters(), self._shares
        if shares.held is not None:
            return shares.held
        if self._whole:
            return list(range(len(params)))
        return [i for i, param in enumerate(params) if self._has_state(param)]

    def _has_state(self, param: torch.Tensor) -> bool:
        if self._ownership is None:
            return True
        return self._ownership.has_state(param, self._shares.place)

    def _divide(self, values: bool) -> None:
        """Divide the state among the workers that there are."""
        # `values` says that only the workers that hold a parameter have its present value.
        params, shares, held = self._parameters(), self._shares, self._held()

        def part(wanted: list[int]) -> State:
            sent = {}
            for i in wanted:
                state = self.state.get(params[i], {})
                on_gpu = [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.is_cuda]
                sent[i] = (state, on_gpu, params[i].detach() if values else None)
            return sent

        workers, received = shares.meet(held, len(params), part)
        ownership = Ownership([0] * len(workers), self._division.copies)
        ownership.take(params)
        self._ownership, self._gathering = ownership, None
        shares.workers, shares.held, self._whole = workers, None, False
        with torch.no_grad():
            for i, (state, on_gpu, value) in received.items():
                if value is not None:
                    params[i].copy_(value)
                if self._has_state(params[i]) and state:
                    placed = {key: state[key].to(params[i].device) for key in on_gpu}
                    self.state[params[i]] = {**state, **placed}
        self._drop_others()

    def _drop_others(self) -> None:
        for param in [one for one in self.state if isinstance(one, torch.Tensor)]:
            if not self._has_state(param):
                del self.state[param]

    def _plan(self) -> GatheredParameters:
        assert self._ownership is not None
        if self._whole:  # It was loaded since the last step.
            self._whole = False
            self._drop_others()
        params = [param for param in self._parameters() if self._moves(param)]
        gathering = self._gathering
        if gathering is None or [*map(id, gathering.params)] != [*map(id, params)]:
            self._ownership.take(params)
            name = f"{self._reducer.name}.updated"
            gathering = GatheredParameters(name, params, self._ownership, self._shares.workers)
            self._gathering = gathering
        return gathering

    def consolidate(self, to: int = 0) -> None:
        """Collect the state of all parameters on one rank; see `Sharded.consolidate`."""
        if self._shares.workers == ():
            return
        if not 0 <= to < basics.size():
            raise ArgumentError(f"consolidate(to={to}): the world has {basics.size()} ranks")
        params, held = self._parameters(), self._held()
        own = {i: self.state.get(params[i], {}) for i in held}
        _, received = self._shares.meet(
            held, len(params), lambda wanted: {i: own[i] for i in wanted}
        )
        if basics.rank() == to:
            both = {**own, **received}
            self._gathered = {i: state for i, state in both.items() if state}
        self._gathered_on = to

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise HvdliteError(
            "the ShardedOptimizer of an elastic job cannot be copied, because this rank has the "
            "state of a share of the parameters; call consolidate() and copy state_dict()"
        )

    # `hvd.elastic.TorchState` saves, restores and synchronizes the following.

    def share(self) -> dict[str, Any]:
        """Return what this worker holds."""
        held = None if self._whole and self._shares.held is None else self._held()
        state = torch.optim.Optimizer.state_dict(self)
        return {"state": state, "held": held, "version": self._shares.version}

    def go_back(self, share: dict[str, Any]) -> None:
        """Hold what a saved share has; the next step divides anew."""
        self.state.clear()
        load_exactly(self, share["state"])
        self._whole = share["held"] is None
        self._shares.held, self._shares.version = share["held"], share["version"]
        self._shares.workers = ()

    def meet_others(self) -> None:
        """Take the options of rank 0, and its state if no step was made; the next step divides."""
        version = broadcast_object(self._shares.version, root_rank=0)
        if version == 0:
            broadcast_optimizer_state(self, root_rank=0)
            return
        own = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        theirs = broadcast_object(own, root_rank=0)
        for group, options in zip(self.param_groups, theirs, strict=True):
            group.update(options)
        shares = self._shares
        if shares.version == 0:
            self.state.clear()
            self._whole = False
            shares.held = []
        elif not self._whole:
            shares.held = self._held()
        shares.workers = ()


def make_elastic(sharded: Sharded) -> None:
    """Give a sharded optimizer the methods of an elastic job, in place."""
    wrapped: Any = sharded
    become(wrapped, wrapped._wrapped_class)
    subclass_in_place(wrapped, ElasticSharded)
    wrapped._shares = Shares(f"{wrapped._reducer.name}.shares")
