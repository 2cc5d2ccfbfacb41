"""Submits torch tensors to the core; plain calls take the fast path (`fast_path`) instead.

The caller has checked the tensors (`hvdlite.torch.collectives.tensors`), and they are contiguous.
The core reads GPU tensors after the work on the stream that is current at the call. The stream that
is current in `Submission.wait` waits for the results; the host does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from hvdlite import _core, basics
from hvdlite.process_sets import ProcessSet, global_process_set, member_id


class Submission:
    """A submitted collective: the core's handle, ordered with CUDA's streams."""

    # Torch's allocator must not give GPU memory to others before the core's stream is done with it.
    # So the tensors live until `wait`, after which all work of the waiting stream comes later. The
    # allocator notes the core's stream only if that is not the stream which had the tensors, or if
    # nobody waits: such notes cost more than the rest of a submission.

    def __init__(self, core: _core.Handle, gpu: int, stream: int, keep: object) -> None:
        self.core = core
        self._gpu = gpu
        self._stream = stream
        self._keep = keep if gpu >= 0 else None

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        keep, self._keep = self._keep, None
        if keep is not None:
            stream = torch.cuda.ExternalStream(self.core.stream, device=self._gpu)
            for one in tree_flatten(keep)[0]:
                if isinstance(one, torch.Tensor) and one.is_cuda:
                    one.record_stream(stream)

    def done(self) -> bool:
        return self.core.done()

    def wait(self) -> None:
        """Block until the results are ready for the current stream, or raise the error."""
        if self._gpu < 0:
            self.core.wait(stream=None)
            return
        stream = _current_stream(self._gpu)
        self.core.wait(stream=stream)
        if stream == self._stream:
            self._keep = None
        self._let_go()

    def take_output(self, index: int, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        """Make a tensor of an output; on the host it uses the received memory itself."""
        if like.is_cuda:
            tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
            self.core.copy_output(index, tensor.data_ptr(), _current_stream(self._gpu))
            return tensor
        data = self.core.take_output(index)
        if len(data) == 0:
            return torch.empty(shape, dtype=like.dtype, device="cpu")
        return torch.frombuffer(data, dtype=like.dtype).view(shape)


def _current_stream(gpu: int) -> int:
    """Return the address of CUDA's current stream, also in a function that torch compiles."""
    return torch._C._cuda_getCurrentRawStream(gpu)


class Reduction(NamedTuple):
    """How an allreduce combines the tensors of the members of a process set."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    weight: float | None = None
    process_set: ProcessSet = global_process_set
    wire: int | None = None  # Float32 and float64 travel as the dtype of this number.
    transaction: str = ""  # Elastic jobs have one, see `_core.Engine.commit`.
    terms: _core.LateCall | None = None  # Modes that do not wait for all ranks have them.


def submit(
    enqueue: Callable[[int, object, bool, int], _core.Handle],
    specs: Sequence[_core.Tensor],
    process_set: ProcessSet,
    keep: object,
    blocking: bool,
) -> Submission:
    """Submit tensors on the stream of the GPU that holds some of them, if one does.

    `enqueue` is a method of the engine with the arguments that only this collective has. The
    tensors in `keep` live until the collective has completed.
    """
    gpu = max((spec.gpu for spec in specs), default=-1)
    stream = _current_stream(gpu) if gpu >= 0 else 0
    return Submission(enqueue(member_id(process_set), keep, blocking, stream), gpu, stream, keep)


def start_allreduce(
    name: str,
    specs: Sequence[_core.Tensor],
    reduction: Reduction,
    keep: object,
    blocking: bool,
) -> Submission:
    op, prescale, postscale, weight, process_set, _, transaction, terms = reduction
    enqueue = partial(
        basics.engine().allreduce, name, specs, op, prescale, postscale, weight,
        transaction=transaction, terms=terms,
    )  # fmt: skip
    return submit(enqueue, specs, process_set, keep, blocking)


def start_broadcast(
    name: str,
    specs: Sequence[_core.Tensor],
    root_rank: int,
    process_set: ProcessSet,
    keep: object,
    blocking: bool,
) -> Submission:
    enqueue = partial(basics.engine().broadcast, name, specs, root_rank)
    return submit(enqueue, specs, process_set, keep, blocking)


class Received(NamedTuple):
    tensor: torch.Tensor
    rows: list[int]  # how many each rank sent


def take_received(submission: Submission, sources: Sequence[torch.Tensor]) -> list[Received]:
    """Make tensors of the outputs of a completed allgather, reducescatter or alltoall."""
    dimensions = submission.core.first_dimensions
    parts = len(dimensions) // max(len(sources), 1)
    received = []
    for index, source in enumerate(sources):
        rows = dimensions[index * parts : (index + 1) * parts]
        tensor = submission.take_output(index, [sum(rows), *source.shape[1:]], source)
        received.append(Received(tensor, rows))
    return received
