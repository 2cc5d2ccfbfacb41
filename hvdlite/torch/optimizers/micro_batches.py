"""DropCompute: a rank whose time is up stops its micro-batches, and the average counts those done.

The method is from Giladi et al., "DropCompute: simple and more robust distributed synchronous
training via compute variance reduction", NeurIPS 2023. With k_r micro-batches done by rank r, ranks
step with g = sum_r sum_{m<k_r} g_rm / sum_r k_r: SGD with a random batch size, and no gradient is
stale. Each rank sends the mean of its micro-batches with the weight k_r, in the weighted average
that every reducer can make.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from hvdlite import basics, operation_names
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.gather_bytes import gather_bytes
from hvdlite.modes import Mode, check_together
from hvdlite.process_sets import member_id
from hvdlite.torch.optimizers.reducer import GradientReducer
from hvdlite.torch.optimizers.time_budget import MEASURED, PERIOD, Measurement

Weigh = Callable[[Any], float] | None

_DECAY = 0.9  # The mean latency decays so in each micro-batch.
_UNSENT = 10  # In one of so many steps the first micro-batch is timed, and so not sent at once.

# It is the kind of loop that this thread is in, which ranks run different numbers of times.
_under_way: ContextVar[Mode | None] = ContextVar("hvdlite_step_loop", default=None)


def loop_under_way() -> Mode | None:
    """Return which loop over the batches of a step the caller is in, where ranks cannot meet."""
    return _under_way.get()


class StepLoop:
    """The loops over the batches of a step, for one optimizer. Used by the training thread."""

    def __init__(self, reducer: GradientReducer, mode: Mode, call: str, lack: str) -> None:
        """Make it for the optimizer whose gradients `reducer` reduces."""
        # For messages: users write `call`, and gradients `lack` something before the loop's end.
        self._reducer = reducer
        self._mode, self._call, self._lack = mode, call, lack
        self._running = False
        self._unfinished = False  # A loop began and did not come to its end.

    def _refuse_nested(self) -> None:
        if self._running:
            raise HvdliteError(f"{self._call} inside of a loop over {self._call}: use one")

    @contextlib.contextmanager
    def _loop_runs(self) -> Iterator[None]:
        """Mark the loop, or raise an error; the subclass notes when its gradients are reduced."""
        if any(_has_values(param.grad) for param in self._params() if param.grad is not None):
            raise HvdliteError(
                f"{self._call} with gradients that are not zero: they would be taken for those "
                "of its batches; call optimizer.zero_grad() before it"
            )
        self._running = self._unfinished = True
        around = _under_way.get()
        _under_way.set(self._mode)
        try:
            yield
        finally:
            _under_way.set(around)
            self._running = False

    def _params(self) -> Iterator[torch.Tensor]:
        for group in self._reducer.read_groups():
            yield from group["params"]

    def before_step(self) -> None:
        """Refuse a step with the gradients of a loop that did not come to its end."""
        if self._unfinished:
            raise HvdliteError(
                f"step() before the loop over {self._call} has come to its end, so that its "
                f"gradients are not {self._lack}; let the loop end by itself, and call step() "
                "after it"
            )

    def before_zero_grad(self) -> None:
        """Refuse to drop gradients that a running loop counts; forget a loop that was left."""
        if self._running:
            raise HvdliteError(
                f"zero_grad() inside of a loop over {self._call} would drop gradients that "
                "count; call it before the loop"
            )
        self._unfinished = False


class MicroBatches(StepLoop):
    """The loops over micro-batches of one optimizer. Used by the training thread."""

    def __init__(self, reducer: GradientReducer) -> None:
        """Make it for the optimizer whose gradients `reducer` reduces."""
        super().__init__(reducer, Mode.MICRO_BATCHES, "micro_batches()", "weighed")
        self.done: list[int] = []  # It has the count of each step.
        self.possible = 0  # All steps have so many micro-batches if none was dropped.
        self._name = f"{reducer.name}.micro_batches"
        self._process_set = reducer.settings.reduction.process_set
        self._mean: float | None = None  # This is the mean latency.
        self._backwards = 1  # No micro-batch had more backward() calls so far.
        self._agreed: object = None  # The ranks have agreed on these arguments.
        self._steps = 0  # So many steps have passed since the ranks agreed.
        self._budget = math.inf
        self._measurement = Measurement(self._name, self._process_set)

    def loop(
        self, batches: Iterator[Any], most: int, seconds: float | None, weigh: Weigh
    ) -> Iterator[Any]:
        """Check the arguments, and return the generator; see `Distributed.micro_batches`."""
        _check(self._reducer, batches, most, seconds)
        return self._loop(batches, most, seconds, weigh)

    def _loop(
        self, batches: Iterator[Any], most: int, seconds: float | None, weigh: Weigh
    ) -> Iterator[Any]:
        self._refuse_nested()
        self._agree([most, seconds is None, weigh is None])
        with self._loop_runs():
            yield from self._draw(batches, most, seconds, weigh)

    def _draw(
        self, batches: Iterator[Any], most: int, seconds: float | None, weigh: Weigh
    ) -> Iterator[Any]:
        measures = seconds is None and self._steps % PERIOD < MEASURED
        limit = math.inf if measures else self._budget if seconds is None else seconds
        if not self._reducer.takes_part:
            limit = math.inf  # No other rank waits for this one.
        begun = before = self._now()
        latencies: list[float] = []
        weight = 0.0
        last = False
        try:
            for micro in batches:
                count = len(latencies) + 1
                weight += 1.0 if weigh is None else float(weigh(micro))
                last = not measures and self._is_last(count, most, before - begun, limit)
                if last:
                    self._weigh(weight, most, count, weigh)
                    self._reducer.expect_backwards(self._backwards, _one_more(self._backwards))
                accumulated = self._reducer.paused_backwards
                with contextlib.nullcontext() if last else self._reducer.paused():
                    yield micro
                if not last:
                    seen = self._reducer.paused_backwards - accumulated
                    self._backwards = max(self._backwards, seen)
                now = self._now()
                latencies.append(now - before)
                if not last:
                    self._note(now - before)
                before = now
                if last or count == most or now - begun > limit:
                    break
            self._running = False
            if not last:
                self._weigh(weight, most, len(latencies), weigh)
            self._end(latencies, most, measures)
        finally:
            self._reducer.expect_backwards(1, None)

    def _agree(self, arguments: list[Any]) -> None:
        """Compare the arguments of the ranks, once in a world and whenever they change."""
        if not self._reducer.takes_part:
            return
        now = operation_names.restarts(), arguments
        if now == self._agreed:
            return
        data = json.dumps([basics.rank(), *arguments]).encode()
        number = member_id(self._process_set)
        blocks = gather_bytes(basics.engine(), data, f"#{self._name}.arguments", number)
        for rank, *others in (json.loads(bytes(block)) for block in blocks if len(block) > 0):
            for what, own, other in zip(
                ("most", "seconds is None", "weigh is None"), arguments, others, strict=True
            ):
                if own != other:
                    raise MismatchError(
                        f"micro_batches(): {what} is {own} on rank {basics.rank()} and {other} on "
                        f"rank {rank}; give every rank the same arguments"
                    )
        self._agreed = now
        self._steps = 0
        self._measurement = Measurement(self._name, self._process_set)

    def _is_last(self, count: int, most: int, elapsed: float, limit: float) -> bool:
        """Return whether no micro-batch will follow this one, so that backward sends gradients."""
        if count == most:
            return True
        if self._mean is None or (count == 1 and self._steps % _UNSENT == 0):
            return False
        return elapsed + 2 * self._mean > limit

    def _note(self, latency: float) -> None:
        old = latency if self._mean is None else self._mean
        self._mean = _DECAY * old + (1 - _DECAY) * latency

    def _weigh(self, weight: float, most: int, count: int, weigh: Weigh) -> None:
        """Set what the reducer needs for the mean of `count` micro-batches."""
        total = count / most if weigh is None else weight
        self._reducer.weigh_cycle(weight, 1.0 / total if total > 0 else 1.0)

    def _end(self, latencies: list[float], most: int, measures: bool) -> None:
        """Reduce the gradients if backward has not done so, and note the step."""
        begun = self._now()
        self._reducer.synchronize()
        if not self._reducer.takes_part:
            self._scale_alone()
        self._unfinished = False
        self.done.append(len(latencies))
        self.possible += most
        self._steps += 1
        if not measures or not self._reducer.takes_part:
            return
        self._measurement.add(latencies, most, self._now() - begun)
        if self._steps % PERIOD == MEASURED:
            self._budget = self._measurement.budget(most)
            self._measurement = Measurement(self._name, self._process_set)

    def _scale_alone(self) -> None:
        """Scale the gradients of a rank that steps with its own, because nothing sends them."""
        with torch.no_grad():
            for param in self._params():
                if param.grad is not None and self._reducer.buckets.weighing.scale != 1.0:
                    param.grad.mul_(self._reducer.buckets.weighing.scale)

    def _now(self) -> float:
        """Return the time, after what the GPU has to do for the micro-batches so far."""
        device = next((param.device for param in self._params()), None)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return time.monotonic()

    def share_done(self) -> float:
        """Return the share of the micro-batches that were done, over all members."""
        data = json.dumps([sum(self.done), self.possible]).encode()
        number = member_id(self._process_set)
        blocks = gather_bytes(basics.engine(), data, f"#{self._name}.done", number)
        pairs = [json.loads(bytes(block)) for block in blocks if len(block) > 0]
        possible = sum(pair[1] for pair in pairs)
        return sum(pair[0] for pair in pairs) / possible if possible else 1.0


def _has_values(gradient: torch.Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).any())


def _one_more(count: int) -> str:
    """Say why the last micro-batch of a step cannot call backward() once more."""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"the last micro-batch of a step calls backward() more than {times}, as those before it "
        "did, and its gradients have been sent: call backward() equally often in each "
        "micro-batch, or once, for the sum of the losses"
    )


def _check(reducer: GradientReducer, batches: Any, most: int, seconds: float | None) -> None:
    if not isinstance(batches, Iterator):
        raise ArgumentError(
            f"micro_batches() takes an iterator, not a {type(batches).__name__}: make it once, "
            "before the loop over steps, with iter(loader)"
        )
    if most < 1:
        raise ArgumentError(f"micro_batches(most={most}): a step has at least 1 micro-batch")
    if seconds is not None and not seconds > 0:
        raise ArgumentError(f"micro_batches(seconds={seconds}): give a positive time, or None")
    modes = reducer.settings.modes()
    check_together({Mode.MICRO_BATCHES: True, Mode.STAGE_2: reducer.divides, **modes})
