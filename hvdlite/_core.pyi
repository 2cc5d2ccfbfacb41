"""The native core: engines, and the tables that Python shares with it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from typing_extensions import Buffer

__version__: str

# Element types and reduce operations, by their number on the wire.
DTYPES: dict[str, int]  # "uint8", ..., "float16", "bfloat16", ..., "bool", "float8_e5m2"...
REDUCIBLE: frozenset[str]  # those that a reduction computes; the others are copied only
REDUCE_OPS: dict[str, int]  # "average": 0, "sum": 1, "adasum": 2, "min", "max", "product": 5

def knobs() -> list[dict[str, str]]:
    """List the knobs: name, environment, horovod, type, default, unit, help; of an int, a range."""

def knob_values() -> dict[str, str | int | float]:
    """Return the present value of every knob, by its name."""

def agreed_knobs() -> dict[str, str]:
    """Return the values, by variable, that every rank of a world must have alike."""

def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and its cgroup's quota."""

def create_segment(local_size: int) -> int:
    """Create the memory that a rank shares with its host; return the new memfd (caller owns it)."""

def utf8_of_name(name: str) -> bytes:
    """Encode the name of an operation or a tensor. Raises ArgumentError where UTF-8 has no such."""

def virtual_blocks(hosts: Sequence[int], virtual_size: int) -> list[tuple[int, int]]:
    """Cut virtual ranks along the tree by which members on these hosts are summed (sum_tree.h)."""

def gpu_report(nccl_folders: Sequence[str]) -> list[tuple[str, bool, str]]:
    """Say what of GPUs works, with NCCL in these folders: subject, whether, what or why not."""

fast_path: Any  # a module of functions in C, see hvdlite/torch/collectives/fast_path.py

@final
class Tensor:
    """One tensor of a collective: where it lies and what it is. It holds no memory alive."""

    def __init__(
        self,
        name: str,
        dtype: int,
        shape: Sequence[int],
        input: int,
        output: int,
        gpu: int = -1,
        wire: int | None = None,
        capacity: int = 0,
    ) -> None:
        """Describe it.

        Args:
            name: of the tensor, for messages.
            dtype: from DTYPES.
            shape: of the tensor.
            input: the address that the collective reads.
            output: the address that it writes.
            gpu: the number of the GPU whose memory both addresses are; -1 for host memory.
            wire: a 16-bit float from DTYPES, to which an allreduce casts the tensor on the way.
            capacity: of an allgather, a reducescatter or an alltoall of host memory, how many bytes
                of a result fit at `output`. With 0 the engine allocates the result.
        """

    @property
    def name(self) -> str: ...
    @property
    def gpu(self) -> int:
        """Number of the GPU whose memory it is; -1 for host memory."""

@final
class GradientMemory:
    """Memory on a GPU that stays from step to step; see `Engine.allocate_gradient_memory`.

    The last reference to it must go when no work that uses the memory will be submitted any more;
    then it blocks (GIL released) until the device has ended all that was.
    """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes, for frameworks that make a tensor of it and hold this object."""

@final
class SharedGradientMemory(Buffer):
    """Memory that the ranks of a host share; see `Engine.lend_gradient_memory`."""

@final
class Handle:
    """One submitted collective. It keeps `keep` alive until the core is done with the memory."""

    def done(self) -> bool:
        """Say whether it has completed, well or not. Never blocks."""

    def released(self) -> bool:
        """Say whether nothing, a GPU included, touches its memory any more. Never blocks."""

    @property
    def stream(self) -> int:
        """The CUDA stream on which it runs; 0 without GPU tensors."""

    def wait(
        self, timeout: float | None = None, stream: int | None = None, fatal: bool = False
    ) -> None:
        """Block (GIL released) until it has completed; raise its error.

        Args:
            timeout: in seconds.
            stream: with GPU tensors, a CUDA stream of their GPU that waits for the results, so that
                the thread need not: it blocks until all is given to the device. Without one it
                blocks until the device is done.
            fatal: whether the caller ends the world when the timeout has passed. Then ranks that
                wait for each other get a DeadlockError, as they do without a timeout.

        Raises:
            TimeoutError: `timeout` seconds passed first; the collective goes on.
            hvdlite.errors.HvdliteError: whatever made it fail.
        """

    @property
    def first_dimensions(self) -> list[int]:
        """Rows that make up the outputs, after completion.

        Of an allgather tensor by tensor, of an alltoall: what each rank of the set gave, in order.
        Of a reducescatter: what this rank has, by tensor.
        """

    @property
    def set_id(self) -> int:
        """The id of the process set that was added, after completion."""

    @property
    def last_joined(self) -> int:
        """The last rank to join, after completion of a join."""

    @property
    def members(self) -> int:
        """What an average divides by, after completion (see HVDLITE_AVERAGE_OVER_JOINED)."""

    @property
    def epoch(self) -> int:
        """The number of the world in which the result was made, after completion."""

    def take_output(self, index: int = 0) -> memoryview:
        """Hand over the bytes that were received, once (writable, owns its memory).

        For an allgather, a reducescatter or an alltoall; `index` is that of a tensor without a
        capacity.
        """

    def copy_output(self, index: int, target: int, stream: int) -> None:
        """Copy a received output on a GPU to `target`, once, on the stream that `wait` was told."""

@final
class PendingOperations:
    """Where the collectives of an elastic job wait between two worlds. Any thread may call it."""

    def __init__(self) -> None: ...
    @property
    def lost_fd(self) -> int:
        """An eventfd that becomes readable when an engine has ended by a failure."""

    def report(self, gone: Sequence[int]) -> dict[str, Any]:
        """Describe the world that ended last, without these of its ranks.

        Returns:
            "commits": by process set, the count of commits that this rank has completed; "stuck":
            what cannot be redone, or None; "suspect": the rank that failed, as this rank saw it, or
            None; "reason": why the world has ended.
        """

    def deliver(self, commit_point: Mapping[int, int]) -> None:
        """Hand out what some survivor has: `commit_point` has the highest counts of commits."""

    def process_sets(self, rank_of: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the sets of the next world; `rank_of`: by old rank, the new one, or -1."""

    def resume(self, engine: Engine, rank_of: Sequence[int]) -> None:
        """Submit all that waits to the next engine."""

    def fail(self, reason: str) -> None:
        """Let all that waits raise RankFailedError."""

@final
class LateCall:
    """Terms of an "average" of floating-point host tensors where ranks may be late.

    All names of a step with one key share one decision. Every rank submits each name in each step.
    """

    def __init__(
        self, key: str, step: int, quorum: int, grace_us: int, bound: int, fold: bool, skip: bool
    ) -> None: ...

def waiting_results(engine: Engine, key: str) -> int:
    """Count the steps whose results all wait for this rank, which was late."""

def attendance(engine: Engine, key: str) -> list[tuple[int, int, int, int]]:
    """List by rank: steps it was late in, those it skipped or gave later, the oldest one's age."""

@final
class Engine:
    """One rank of one world. Any thread may call any method."""

    def __init__(
        self,
        rank: int,
        size: int,
        host_of: Sequence[int],
        links: Sequence[tuple[int, int, int, int, int]] = (),
        segment_fd: int = -1,
        event_fd: int = -1,
        lifeline_fd: int = -1,
        nccl_folders: Sequence[str] = (),
        trace_file: int = -1,
        trace_rounds: bool = False,
        pending: PendingOperations | None = None,
        epoch: int = 0,
        process_sets: Sequence[tuple[int, Sequence[int]]] = (),
        clock_offset: int = 0,
        control_tree: bool = False,
    ) -> None:
        """Build the engine and start its thread (none for a world of one).

        Args:
            host_of: by rank, the index of its host, numbered from 0 in order of first appearance.
            links: per peer (rank, control_fd, data_fd, segment_fd, event_fd); -1 where there is
                none: data_fd only between hosts, segment_fd and event_fd only within one, where
                control_fd is the end of the peer's lifeline.
            segment_fd: this rank's own memfd from `create_segment`; -1 for a world of one, as are
                event_fd, its own eventfd, and lifeline_fd, its own end of its lifeline.
            nccl_folders: where wheels have installed NCCL; it is loaded for the first GPU tensor.
            trace_file, trace_rounds: of `start_trace`, to have the first events too; -1: none.
            pending: of an elastic job, where collectives wait between two worlds.
            epoch: of an elastic job, the number of this world.
            process_sets: of an elastic job, the sets that this world begins with: ids and ranks.
            clock_offset: nanoseconds from this host's monotonic clock to that of rank 0's host.
            control_tree: between hosts, only neighbours in a tree of hosts have a control_fd.

        The engine owns the descriptors from here on, also when it raises.
        """

    def allreduce(
        self,
        name: str,
        tensors: Sequence[Tensor],
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        weight: float | None = None,
        process_set: int = 0,
        keep: Any = None,
        blocking: bool = False,
        stream: int = 0,
        transaction: str = "",
        terms: LateCall | None = None,
    ) -> Handle:
        """Submit tensors that complete together (one or many, dtypes may differ).

        Args:
            name: identifies the operation on all ranks; in flight at most once per rank.
            op: from REDUCE_OPS.
            weight: for "average": the result is sum(weight * x) / sum(weight); zero where all
                weights are zero. All ranks give one, or none does.
            keep: objects to hold alive while the operation is in flight.
            blocking: a hint that `wait` on this thread follows at once: the engine's thread is not
                woken, the waiting thread does the work itself.
            stream: with GPU tensors, the CUDA stream of their GPU on which they are ready.
            transaction: in an elastic job, hand the results out with `commit` of this name only.
            terms: those on which the operation does not wait for all ranks.
        """

    def allgather(
        self,
        name: str,
        tensors: Sequence[Tensor],
        process_set: int = 0,
        keep: Any = None,
        blocking: bool = False,
        stream: int = 0,
        transaction: str = "",
    ) -> Handle:
        """Submit an allgather along the first dimension (others must agree; ndim >= 1).

        The results go to the tensors' output addresses where these have a capacity, and otherwise
        see `Handle.take_output`. On a rank where that is too small the handle raises ArgumentError.
        """

    def reducescatter(
        self,
        name: str,
        tensors: Sequence[Tensor],
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        keep: Any = None,
        blocking: bool = False,
        stream: int = 0,
        splits: Sequence[int] = (),
    ) -> Handle:
        """Submit tensors to be reduced, of which each rank gets a part of the rows (ndim >= 1).

        Args:
            splits: how many rows each rank of the set gets, tensor after tensor, the same on all
                ranks; empty: as even as can be, where the first ranks get one more.

        The results go where those of `allgather` go.
        """

    def alltoall(
        self,
        name: str,
        tensor: Tensor,
        splits: Sequence[int] = (),
        process_set: int = 0,
        keep: Any = None,
        blocking: bool = False,
        stream: int = 0,
    ) -> Handle:
        """Submit a tensor whose rows go to different ranks (ndim >= 1; other dimensions agree).

        Args:
            splits: how many rows go to each rank of the set; empty: the same number to each. Wrong
                ones are an error on every rank.

        The result goes where that of `allgather` goes. What each rank sent is in
        `Handle.first_dimensions`.
        """

    def broadcast(
        self,
        name: str,
        tensors: Sequence[Tensor],
        root: int,
        process_set: int = 0,
        keep: Any = None,
        blocking: bool = False,
        stream: int = 0,
    ) -> Handle:
        """Submit a broadcast from `root` (a rank): its inputs into every rank's outputs."""

    def send(self, name: str, tensor: Tensor, to: int, keep: Any = None) -> Handle:
        """Submit what rank `to` receives under the same name: one dimension, in host memory.

        Only the two ranks take part. The handle completes when the tensor may be changed, and not
        before the other rank receives.
        """

    def recv(self, name: str, tensor: Tensor, source: int, keep: Any = None) -> Handle:
        """Submit a tensor whose output address gets what rank `source` sends under this name."""

    def barrier(self, name: str, process_set: int = 0, blocking: bool = False) -> Handle:
        """Submit a barrier."""

    def commit(self, name: str, transaction: str, process_set: int = 0) -> Handle:
        """Submit the end of an elastic job's transaction: all ranks complete all of it, or none."""

    def join(self, blocking: bool = False) -> Handle:
        """Say that this rank gives nothing more until every rank has said so.

        `Handle.last_joined` is then the last rank to join. Until then submissions of this rank are
        refused, and collectives go on without it.
        """

    def add_process_set(self, name: str, ranks: Sequence[int]) -> Handle:
        """Submit the addition of a set of ranks (ascending); every rank of the world does so.

        Its id is then in `Handle.set_id`. It is an error while some rank has joined.
        """

    def remove_process_set(self, name: str, process_set: int) -> Handle:
        """Submit the removal of a set, which takes nothing more; every rank of the world does.

        It is an error while some rank has joined.
        """

    def allocate_gradient_memory(self, gpu: int, bytes: int) -> GradientMemory:
        """Allocate memory on a GPU in which outputs of collectives are to lie.

        Where the outputs of a batch lie there one behind the other, each at the next multiple of 16
        bytes, the batch is reduced in place, and NCCL knows the memory if it can.

        Raises:
            hvdlite.errors.OutOfMemoryError: there is no room on the GPU.
        """

    def lend_gradient_memory(self, bytes: int) -> SharedGradientMemory | None:
        """Lend host memory in which tensors are to lie that an allreduce changes in place.

        Where those of a batch lie alike in it on all ranks of one host, they are reduced there,
        without staging. None: no room (HVDLITE_SHM_GRADIENTS). A fork shares it with its parent.
        """

    def abort(self, reason: str) -> None:
        """End the world: peers raise `reason` at once ("rank 2 raised ValueError: boom ...")."""

    def suspend(self, reason: str) -> None:
        """End the world of an elastic job; what is in flight is pending when this returns."""

    def commit_counts(self) -> dict[int, int]:
        """Count the commits of an elastic job that this rank has completed, by process set."""

    def shutdown(self) -> None:
        """Leave cleanly: finish what is running, fail what is pending, tell the peers, stop."""

    def start_trace(self, file: int, rounds: bool = False) -> None:
        """Begin to write events of the Trace Event format to a descriptor, which it then owns.

        The opening bracket of the array is written already, and each line before ends in a comma.
        `rounds` also marks the engine's rounds.
        """

    def stop_trace(self) -> None:
        """Write the rest of the events and the closing bracket; does nothing when none are."""

    def core_table(self) -> int:
        """Return the address of this engine's C functions (api/c_api.h), valid while it lives."""

    def counters(self) -> dict[str, int]:
        """Count batches, tensors, bytes, cache_hits, full_requests and messages_sent.

        "bytes" are of reduced tensors, as they travel within a host; "messages_sent" of the control
        plane; "bytes_to_other_hosts" of the CPU's data plane, and so are "bytes_unstaged", which
        were reduced in lent gradient memory; "exchange_us": spent in the exchange of gradients;
        "exchanges": batches besides broadcasts and barriers.
        """

    def live(self) -> dict[str, Any]:
        """Tell what the engine is doing, for people who watch. Takes microseconds; never blocks.

        Returns:
            "time" and "began": now, and when this engine began, in seconds on rank 0's monotonic
            clock; "counters": as `counters`; "events": what has happened since the last call, as
            rows [time, kind, rank, name, text], the last 64 of them; "steps": on rank 0, where the
            time of the steps went (csrc/negotiation/step_clock.h): their "count", their "seconds",
            and by rank, in seconds, [backward, waiting, communicating, between, last,
            late_between, late_backward], of which last is a count; None on other ranks; "stalled":
            on rank 0, what has waited for more than a second, as rows [name, seconds, ranks that
            wait, ranks that are missing], at most 8, the longest first.
        """

    def note_gradient(self) -> None:
        """Note that backward has given the first gradient of a step, which is submitted later."""

    def note(self, kind: str, name: str, text: str) -> None:
        """Add an event of this rank to `live`: its kind, the name of what it is about, a text."""

    def tunables(self) -> dict[str, int]:
        """List what autotune may change, by knob, as this rank's collectives use it now."""
