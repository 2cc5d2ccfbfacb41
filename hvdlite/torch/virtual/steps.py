"""The loop over steps of virtual ranks: see `Distributed.virtual_steps`."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, VirtualRanksWarning
from hvdlite.ops import gather_bytes
from hvdlite.optimizers import check_mean
from hvdlite.process_sets import global_process_set
from hvdlite.torch.buckets import Settings
from hvdlite.torch.collectives.allreduce import allreduce_async, grouped_allreduce_async
from hvdlite.torch.collectives.autograd import Handle
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.compression import Compression
from hvdlite.torch.reducer import GradientReducer
from hvdlite.torch.virtual.order import Block, block_in_world, check_virtual_size, seed_all
from hvdlite.torch.virtual.sampler import ORDER, VirtualBatchSampler
from hvdlite.torch.wrapping import Wrapping

_KEY = "virtual_ranks"  # It has the place in the training, in a state_dict.


class VirtualStepping(Wrapping):
    """The methods for virtual ranks; the other ones do as without, where there are none."""

    _virtual: VirtualSteps | None = None

    def virtual_steps(
        self, loader: Any, epoch: int, model: torch.nn.Module, threads: int = 1
    ) -> Iterator[VirtualStep]:
        """Yield the steps of an epoch, each of which is a loop over batches of virtual ranks.

        A step of the world has one batch for each virtual rank, and a rank does those of its block
        of virtual ranks in turn. Before each batch the random generators (torch, NumPy, Python) are
        seeded for the step and the virtual rank, and buffers get the values with which the step
        began. When the loop over a step ends, gradients and floating-point buffers are means over
        all virtual ranks; other buffers are those of virtual rank 0. So parameters have the same
        bits with any number of ranks; see docs/modes/virtual_ranks.md.

        After `load_state_dict`, and when `hvd.elastic.run` calls its function again, epochs that
        are done yield nothing, and the one under way goes on at its step. In an elastic job the
        loop over a step gives batches again when a rank has died: the step begins anew.

        Args:
            loader: a `DataLoader` with batch_sampler=hvd.VirtualBatchSampler(...).
            epoch: the number of the epoch.
            model: the model, or a `torch.nn.ModuleList` of several; its buffers are averaged.
            threads: the number of torch's threads in each rank, on which the bits depend.

        Raises:
            ArgumentError: an argument cannot be used, or there are more ranks than virtual ranks.
            MismatchError: ranks give different arguments.
            HvdliteError: a step was left before its end, or torch has other threads.

        Example:
            >>> for epoch in range(10):
            ...     for step in optimizer.virtual_steps(loader, epoch, model):
            ...         optimizer.zero_grad()
            ...         for inputs, targets in step:
            ...             criterion(model(inputs), targets).backward()
            ...         optimizer.step()
        """
        if self._virtual is None:
            raise ArgumentError(
                "virtual_steps() needs the number of virtual ranks: pass virtual_size= to "
                "hvd.DistributedOptimizer"
            )
        return self._virtual.loop(loader, epoch, model, threads)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; with `virtual_size` also the epoch and the step."""
        state: dict[str, Any] = super().state_dict()
        if self._virtual is not None:
            state[_KEY] = self._virtual.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; see `torch.optim.Optimizer.load_state_dict`.

        With `virtual_size` the training goes on where the state was saved.

        Raises:
            ArgumentError: the state was saved with another `virtual_size`.
        """
        if self._virtual is not None and _KEY in state_dict:
            self._virtual.load(state_dict[_KEY])
        super().load_state_dict(state_dict)

    def _go_on(self) -> None:
        if self._virtual is not None:
            self._virtual.go_on()


_OUTSIDE = (
    "backward() outside of the loop over a step of virtual_steps(): with virtual_size= that loop "
    "alone computes the gradients of a step; call it inside of the loop, or under "
    "optimizer.no_sync() for gradients that no step uses"
)
_NONE = -1  # No world has this number.
# What virtual_size= cannot be combined with, and why.
_REFUSED = {
    "gradient_predivide_factor=": "gradients are divided once, after their sum; leave "
    "gradient_predivide_factor= out",
    "weight=": "every virtual rank counts the same; leave weight= out",
    "backward_passes_per_step=": "it counts the backward() calls of a step itself; leave "
    "backward_passes_per_step at 1",
    "gradient_as_bucket_view=True": "the sums of a rank's block have memory of their own; leave "
    "gradient_as_bucket_view= out",
    "process_set=": "all ranks carry the virtual ranks together; leave process_set= out",
    "compression=": "what is rounded between ranks depends on their number; leave compression= out",
    "late=": "a step has the gradients of all virtual ranks; leave late= out",
    "LocalSGD(DistributedOptimizer(...))": "all ranks carry the virtual ranks together; leave "
    "LocalSGD out",
    "ShardedOptimizer": "norms and saved states would follow the division among ranks; use "
    "DistributedOptimizer",
    "step(closure)": "each evaluation would need the batches of all virtual ranks; call step() "
    "without a closure",
    "SyncBatchNorm": "the layer sees the batches of ranks, whose number may change; use torch's "
    "BatchNorm, whose moments virtual_steps() averages",
}


def reduction_of_virtual_ranks(settings: Settings, late: Any) -> Reduction:
    """Return how their gradients are combined; raise if an option cannot be combined with them."""
    size, given = check_virtual_size(settings.virtual_size), settings.reduction
    check_mean("virtual_size=", given.op, "a step uses the mean over the virtual ranks")
    for option, is_given in {
        "gradient_predivide_factor=": given.postscale != 1.0,
        "weight=": settings.weight is not None,
        "backward_passes_per_step=": settings.passes > 1,
        "gradient_as_bucket_view=True": settings.bucket_view,
        "process_set=": given.process_set is not global_process_set,
        "compression=": settings.compression is not Compression.none,
        "late=": late is not None,
    }.items():
        if is_given:
            refuse_with_virtual_size(option)
    return Reduction(ops.Sum, postscale=1.0 / size)


def refuse_with_virtual_size(option: str) -> NoReturn:
    """Raise ArgumentError: virtual ranks cannot be combined with this option."""
    raise ArgumentError(f"virtual_size= cannot be combined with {option}: {_REFUSED[option]}")


# Whether this thread is in the loop over a step, where ranks cannot meet.
_in_step: ContextVar[bool] = ContextVar("hvdlite_virtual_step", default=False)


def in_virtual_step() -> bool:
    return _in_step.get()


@dataclass
class VirtualStep:
    """One step of all virtual ranks: a loop over it gives the batches of this rank's ones.

    Attributes:
        number: the number of the step in its epoch.
        loss: after the loop the mean of what was given to `record`; before, and without it, None.

    Example:
        >>> step = next(optimizer.virtual_steps(loader, 0, model))
        >>> step.number
        0
    """

    number: int
    _epoch: int
    _steps: VirtualSteps
    loss: float | None = None
    _recorded: torch.Tensor | None = None  # This is of the present virtual rank.

    def __iter__(self) -> Iterator[Any]:
        """Return the batches; when the loop has ended, the gradients are reduced."""
        return self._steps._run(self, self._epoch)

    def record(self, loss: torch.Tensor | float) -> None:
        """Give the loss of the present virtual rank, for the mean over all of them.

        Args:
            loss: a number, or a tensor of one.

        Example:
            >>> for step in optimizer.virtual_steps(loader, epoch, model):
            ...     optimizer.zero_grad()
            ...     for inputs, targets in step:
            ...         loss = criterion(model(inputs), targets)
            ...         loss.backward()
            ...         step.record(loss)
            ...     optimizer.step()
            ...     print(step.loss)
        """
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._recorded = torch.as_tensor([float(value), 1.0], dtype=torch.float64, device="cpu")


class VirtualSteps:
    """The steps of one optimizer, and where it stands. Used by the training thread."""

    def __init__(self, reducer: GradientReducer, virtual_size: int) -> None:
        self._reducer = reducer
        reducer.refusal = _OUTSIDE
        self._running = False
        self._unfinished = False  # A loop began and did not come to its end.
        self._size = virtual_size
        self._name = f"{reducer.name}.virtual"
        self._threads = 1
        self._order: dict[str, Any] = {}  # The order of samples; it is empty before the first loop.
        self._epoch = self._done = 0  # So many steps of this epoch are done.
        self._resumes = False  # A state was loaded, and the loop has not come to its epoch.
        self._is_own = False  # Loops of this process have come there, since a state was loaded.
        self._block = Block(0, 0, _NONE)
        self._model = nn.Module()
        self._loader: Any = ()
        self._batches: Iterator[Any] = iter(())

    def loop(
        self, loader: Any, epoch: int, model: nn.Module, threads: int
    ) -> Iterator[VirtualStep]:
        """Check the arguments, and return the generator; see `Distributed.virtual_steps`."""
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, VirtualBatchSampler):
            raise ArgumentError(
                "virtual_steps() takes a DataLoader that has "
                "batch_sampler=hvd.VirtualBatchSampler(...)"
            )
        if sampler.virtual_size != self._size:
            raise ArgumentError(
                f"virtual_steps(): the optimizer has virtual_size={self._size}, and the sampler "
                f"virtual_size={sampler.virtual_size}; give both the same"
            )
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ArgumentError(f"virtual_steps(threads={threads!r}): give a number from 1 on")
        for what, saved in self._order.items() if self._resumes else ():
            if saved != sampler.order[what]:
                raise ArgumentError(
                    f"virtual_steps(): the loaded state was made with {what}={saved}, and the "
                    f"sampler has {what}={sampler.order[what]}, which is another order of samples; "
                    f"give the sampler the same {what}"
                )
        if self._reducer.settings.passes > 1:
            refuse_with_virtual_size("backward_passes_per_step=")
        self._check_model(model)
        self._model, self._threads, self._order = model, threads, sampler.order
        self._loader = loader
        return self._loop(sampler, epoch)

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"virtual_steps() takes the model, whose buffers it averages, not a "
                f"{type(model).__name__}; pass several models as one torch.nn.ModuleList"
            )
        known = set(model.parameters())
        params = [param for param in self._params() if param.requires_grad]
        if not known.issuperset(params):
            raise ArgumentError(
                "virtual_steps(): the model lacks parameters of the optimizer; pass the whole "
                "model, or several models as one torch.nn.ModuleList"
            )
        trained = set(params)
        others = [name for name, param in model.named_parameters()
                  if param.requires_grad and param not in trained]  # fmt: skip
        if others:
            warnings.warn(
                f"virtual_steps(): {len(others)} parameters of the model, first {others[0]}, are "
                "not in this optimizer: their gradients are of this rank's batches alone, and "
                "another optimizer that uses them makes the ranks differ; give them to this one, "
                "or freeze them by requires_grad_(False)",
                VirtualRanksWarning,
                stacklevel=4,
            )
        if any(param.itemsize < 4 for param in params):
            raise ArgumentError(
                "virtual_steps(): sums of gradients of 16 bits would depend on the number of "
                "ranks; keep the parameters in float32, and compute in torch.autocast"
            )
        if basics.size() > 1 and any(param.is_cuda for param in params):
            raise ArgumentError(
                "virtual_steps(): NCCL adds the gradients of GPUs in an order of its own; train "
                "on one GPU, or on CPUs"
            )

    def _loop(self, sampler: VirtualBatchSampler, epoch: int) -> Iterator[VirtualStep]:
        self._refuse_nested()
        is_done = self._resumes and epoch < self._epoch  # The state was saved in a later epoch.
        if is_done and self._is_own:
            raise HvdliteError(
                f"virtual_steps(): epoch {epoch} after epoch {self._epoch}, in which this "
                "optimizer is: read the epoch from the state of the elastic job, and give "
                "another training a new DistributedOptimizer, or epochs that go on"
            )
        first = sampler.steps if is_done else 0
        if not is_done:
            if self._resumes:
                first = self._done if epoch == self._epoch else 0
            self._resumes, self._epoch, self._done, self._is_own = False, epoch, first, True
            torch.set_num_threads(self._threads)
            self._take_block(first)
        arguments = {"virtual_size": self._size, **sampler.order, "threads": self._threads}
        _agree(self._name, {**arguments, "epoch": epoch, "first step": first})
        for number in range(first, sampler.steps):
            seed_all(sampler.seed, epoch, number, "before")
            step = VirtualStep(number, epoch, self)
            yield step
            if self._done != number + 1:
                raise HvdliteError(
                    f"step {number} of virtual_steps() was left before its end: loop over all "
                    "batches of each step, or leave the loop over virtual_steps(), too"
                )

    def _refuse_nested(self) -> None:
        if self._running:
            raise HvdliteError(
                "a step of virtual_steps() inside of a loop over a step of virtual_steps(): use one"
            )

    @contextlib.contextmanager
    def _loop_runs(self) -> Iterator[None]:
        gradients = [param.grad for param in self._params() if param.grad is not None]
        if any((one._values() if one.is_sparse else one).any() for one in gradients):
            raise HvdliteError(
                "a step of virtual_steps() with gradients that are not zero: they would be taken "
                "for those of its batches; call optimizer.zero_grad() before it"
            )
        self._running = self._unfinished = True
        around = _in_step.get()
        _in_step.set(True)
        try:
            yield
        finally:
            _in_step.set(around)
            self._running = False

    def _params(self) -> Iterator[torch.Tensor]:
        for group in self._reducer.read_groups():
            yield from group["params"]

    def _run(self, step: VirtualStep, epoch: int) -> Iterator[Any]:
        if step.number != self._done or epoch != self._epoch:
            raise HvdliteError("a step of virtual_steps() is one loop over its batches, not two")
        self._refuse_nested()
        zeros = [param for param in self._params() if param.grad is not None]
        with self._loop_runs():
            self._reducer.expect_gradients()  # A script may skip step(), and zero them itself.
            sums = Sums(self._model)
            try:
                while True:
                    if self._block.epoch != basics.current_world().epoch:
                        self._take_block(step.number)
                    yield from self._compute(step, sums)
                    step.loss, carried = self._reduce(sums)
                    if self._is_of_one_world():
                        break
                    # In an elastic job ranks have died, and with them the gradients of their
                    # blocks.
                    sums.buffers.start()
                    sums = Sums(self._model)
                    self._reducer.before_zero_grad()
                    self._take_gradients()
                    for param in zeros:
                        param.grad = torch.zeros_like(param)
                    self._take_block(step.number)
                if carried != self._size:
                    raise HvdliteError(
                        f"the gradients of {self._size - carried:.0f} of {self._size} virtual "
                        "ranks are missing: a rank that carries some of them has called "
                        "hvd.join(); all ranks have the same number of steps, and need no join()"
                    )
            except BaseException:
                # A script may begin the step again, or save the model: it has the same values then.
                sums.buffers.start()
                self._block = self._block._replace(epoch=_NONE)
                raise
            self._unfinished, self._done = False, step.number + 1
        seed_all(self._order["seed"], epoch, step.number, "after")

    def _take_block(self, step: int) -> None:
        self._block = block_in_world(self._size)
        sampler = self._loader.batch_sampler
        sampler._next = self._epoch, step, self._block
        self._batches = iter(self._loader)
        sampler._next = None

    def _compute(self, step: VirtualStep, sums: Sums) -> Iterator[Any]:
        """Give the batches of this rank's block, and add up what comes of them."""
        self._running = True
        first, size, _ = self._block
        for virtual_rank in range(first, first + size):
            if virtual_rank > first:
                sums.buffers.start()
            batch = next(self._batches)
            if torch.get_num_threads() != self._threads:
                raise HvdliteError(
                    f"torch has {torch.get_num_threads()} threads on rank {basics.rank()}, and "
                    f"virtual_steps() has threads={self._threads}: sums would have other bits; "
                    "call torch.set_num_threads nowhere else"
                )
            step._recorded = None
            seed_all(self._order["seed"], self._epoch, step.number, virtual_rank)
            ran = basics.engine().counters()["batches"]
            with self._reducer.paused():
                yield batch
            if basics.engine().counters()["batches"] != ran:
                warnings.warn(
                    "a collective ran inside of the loop over a step of virtual_steps(): ranks "
                    "carry different numbers of virtual ranks, so its results depend on the number "
                    "of ranks, or ranks wait in vain; call it after the loop, or give the loss to "
                    "step.record()",
                    VirtualRanksWarning,
                    stacklevel=3,
                )
            sums.gradients.add(self._take_gradients())
            sums.losses.add({} if step._recorded is None else {"loss": step._recorded})
            sums.buffers.note(virtual_rank)
        self._running = False

    def _reduce(self, sums: Sums) -> tuple[float | None, float]:
        """Put the means into gradients and buffers; return the loss, and how many it is of."""
        recorded = sums.losses.take().get("loss", torch.zeros(2, dtype=torch.float64, device="cpu"))
        told = [float(self._block.size), *map(float, sums.buffers.changed), *recorded.tolist()]
        numbers = torch.tensor(told, dtype=torch.float64, device="cpu")
        handle = allreduce_async(numbers, name=self._name, op=ops.Sum)
        for param, total in sums.gradients.take().items():
            param.grad = total
        self._reducer.submit()
        carried, *changed, loss, times = handle.wait().tolist()
        if carried == self._size:
            sums.buffers.send(self._name, [one > 0 for one in changed])
        self._reducer.synchronize()
        with torch.no_grad():
            sums.buffers.finish(self._size)
        return loss / self._size if times == self._size else None, carried

    def _is_of_one_world(self) -> bool:
        """Return whether all of the step, so far, is of ranks of one world; all return the same."""
        # What a rank submitted after its choice of a block was reduced in the world of that choice
        # or in a later one, and before this gather.
        if not basics.in_elastic_job():
            return True
        chosen = str(self._block.epoch).encode()
        blocks, epoch = gather_bytes(basics.engine(), chosen, f"{self._name}.epoch")
        return all(bytes(block) in (b"", str(epoch).encode()) for block in blocks)

    def _take_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        taken = {}
        for param in self._params():
            gradient = param.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                if not self._reducer.settings.sparse_as_dense:
                    name = self._reducer.parameter_names.get(param, "a parameter")
                    raise ArgumentError(
                        f"the gradient of {name} is sparse, and virtual ranks add up dense ones; "
                        "give DistributedOptimizer sparse_as_dense=True"
                    )
                gradient = gradient.to_dense()
            taken[param], param.grad = gradient.detach(), None
        return taken

    def before_step(self) -> None:
        if self._unfinished:
            raise HvdliteError(
                "step() before the loop over a step of virtual_steps() has come to its end, so "
                "that its gradients are not reduced; let the loop end by itself, and call step() "
                "after it"
            )
        if not self._reducer.reduced:
            raise HvdliteError(
                "step() without a loop over a step of virtual_steps(): with virtual_size= the "
                "gradients of a step come from all virtual ranks; see docs/modes/virtual_ranks.md"
            )

    def before_zero_grad(self) -> None:
        """Refuse to drop gradients that a running loop counts; forget a loop that was left."""
        if self._running:
            raise HvdliteError(
                "zero_grad() inside of a loop over a step of virtual_steps() would drop gradients "
                "that count; call it before the loop"
            )
        self._unfinished = False

    def state(self) -> dict[str, Any]:
        return {
            "virtual_size": self._size,
            **self._order,
            "epoch": self._epoch,
            "step": self._done,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["virtual_size"] != self._size:
            raise ArgumentError(
                f"the state was saved with virtual_size={state['virtual_size']}, and this "
                f"optimizer has virtual_size={self._size}: the batch of a step would be another "
                "one; give the same virtual_size"
            )
        self._order = {what: state[what] for what in ORDER if what in state}
        self._epoch, self._done = state["epoch"], state["step"]
        self._resumes, self._is_own = bool(self._order), False

    def go_on(self) -> None:
        self._resumes = bool(self._order)


def _agree(name: str, arguments: dict[str, Any]) -> None:
    data = json.dumps([basics.rank(), arguments]).encode()
    for block in gather_bytes(basics.engine(), data, f"#{name}.arguments")[0]:
        if len(block) == 0:
            continue  # The rank has joined: the step raises an error.
        rank, others = json.loads(bytes(block))
        for what, own in arguments.items():
            if own != others[what]:
                raise MismatchError(
                    f"virtual_steps(): {what} is {own} on rank {basics.rank()} and {others[what]} "
                    f"on rank {rank}; give every rank the same, and load the same state on all"
                )


class Sums:
    """What a rank adds up over its virtual ranks in one step."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients, self.losses = PartialSums(), PartialSums()
        self.buffers = Buffers(model)


class Buffers:
    """The buffers of a model in one step: each virtual rank starts from the same values."""

    # After the step floating-point buffers have the mean of the values that the virtual ranks have
    # left, and others the value that virtual rank 0 has left. Buffers that no virtual rank changes
    # are not sent.

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # A module may replace a buffer by another tensor, so these are read anew each time.
        self._places = self._find()
        self._before = [one.clone() for one in self._read()]
        self._of_first: list[torch.Tensor] = []  # Virtual rank 0 has left these, on its rank.
        self._sums = PartialSums()
        self._sent: list[int] = []
        self._handle: Handle | None = None
        self.changed = [False] * len(self._places)  # This rank's virtual ranks have changed them.

    def _find(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _read(self) -> list[torch.Tensor]:
        found = (module._buffers[name] for module, name in self._places)
        return [one.detach() for one in found if one is not None]

    def start(self) -> None:
        for (module, name), before in zip(self._places, self._before, strict=True):
            buffer = module._buffers[name]
            if buffer is None:
                module._buffers[name] = before.clone()
            else:
                buffer.detach().copy_(before)

    def note(self, virtual_rank: int) -> None:
        """Note what a virtual rank has left; raise HvdliteError for other buffers than before."""
        if self._find() != self._places:
            raise HvdliteError(
                "virtual_steps(): a batch has made a buffer of the model, or has set one to None, "
                "so that virtual ranks would not start alike; register all buffers with tensors "
                "before the loop"
            )
        now = self._read()
        pairs = list(zip(now, self._before, strict=True))
        self.changed = [
            known or not torch.equal(*map(_bytes, pair))  # -0.0 differs from 0.0.
            for known, pair in zip(self.changed, pairs, strict=True)
        ]
        averaged = {i: _wide(one).clone() for i, one in enumerate(now) if _is_averaged(one)}
        self._sums.add(averaged)
        if virtual_rank == 0:
            self._of_first = [one if _is_averaged(one) else one.clone() for one in now]

    def send(self, name: str, changed: Sequence[bool]) -> None:
        sums, now = self._sums.take(), self._read()
        self._sent = [i for i, one in enumerate(changed) if one]
        # Others than means are a sum with zeros: a broadcast cannot be redone when its root has
        # died.
        values = self._of_first or [torch.zeros_like(one) for one in now]
        data = [sums[i] if i in sums else _bytes(values[i]) for i in self._sent]
        if data:
            self._handle = grouped_allreduce_async(data, name=f"{name}.buffers", op=ops.Sum)

    def finish(self, virtual_size: int) -> None:
        if self._handle is None:
            return
        now = self._read()
        for i, total in zip(self._sent, self._handle.wait(), strict=True):
            if _is_averaged(now[i]):
                now[i].copy_(total / virtual_size)
            else:
                now[i].copy_(total.view(now[i].dtype).reshape(now[i].shape))


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.reshape(-1).contiguous().view(torch.uint8)


def _is_averaged(buffer: torch.Tensor) -> bool:
    return bool(buffer.is_floating_point() or buffer.is_complex())


def _wide(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer in a dtype in which sums on one rank and between ranks are rounded alike."""
    return buffer.float() if buffer.is_floating_point() and buffer.itemsize < 4 else buffer


class PartialSums:
    """Sums of 2^k consecutive sets of tensors, as a binary counter keeps them."""

    # So many sets have been added as the set bits of the number say: after 6 of them there are
    # sums of 4 and of 2. A tensor that one of two summands lacks counts as zeros there.

    def __init__(self) -> None:
        # Each has its k; the largest is first.
        self._sums: list[tuple[int, dict[Any, torch.Tensor]]] = []

    def add(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Add the next set, whose memory this object may use from now on."""
        level, total = 0, dict(tensors)
        while self._sums and self._sums[-1][0] == level:
            total = self._added(self._sums.pop()[1], total)
            level += 1
        self._sums.append((level, total))

    def take(self) -> dict[Any, torch.Tensor]:
        """Return the sums of all sets, whose number is a power of two."""
        ((_, total),) = self._sums
        self._sums = []
        return total

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _added(
        self, left: dict[Any, torch.Tensor], right: dict[Any, torch.Tensor]
    ) -> dict[Any, torch.Tensor]:
        both = [key for key in left if key in right]
        if both:
            torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
        alone = {key: one for key, one in left.items() if key not in right}
        alone |= {key: one for key, one in right.items() if key not in left}
        if alone:
            torch._foreach_add_([*alone.values()], 0.0)  # It makes 0.0 of -0.0, as zeros do.
        return left | alone
