"""The errors that hvdlite raises, one class per cause, and its warnings.

Every error is an `HvdliteError`. Those that end the world (a peer died, a deadline passed) are
`CollectiveError`s: no later collective of this world can succeed, and each raises the same root
cause. Mistakes (`MismatchError`, `DuplicateNameError`, `ArgumentError`) leave the world usable.
"""

from __future__ import annotations

import collections
import re
import sys
import types

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DivergenceError",
    "DuplicateNameError",
    "ForkedError",
    "HorovodInternalError",
    "HvdliteError",
    "LateGradientsWarning",
    "MismatchError",
    "NotInitializedError",
    "OutOfMemoryError",
    "RankFailedError",
    "ReplicasDifferWarning",
    "ShutdownError",
    "StalledError",
    "StopHandlerWarning",
    "UnrecordedSamplesWarning",
    "UnreducedGradientsWarning",
    "UnsupportedError",
    "VirtualRanksWarning",
]


class HvdliteError(RuntimeError):
    """Base of all errors of hvdlite.

    Attributes:
        failed_rank: the rank that caused it, or None.
    """

    failed_rank: int | None = None

    # When an error leaves a function, TensorFlow's AutoGraph raises a new error that also tells the
    # line of the user's code. AutoGraph keeps the class only if its __init__ is Exception's own.
    __init__ = Exception.__init__


class NotInitializedError(HvdliteError, ValueError):
    """`init()` was not called, or `shutdown()` was called since. Horovod's is a ValueError too."""


class ArgumentError(HvdliteError, ValueError):
    """An argument cannot be used; the message says what to do."""


class UnsupportedError(ArgumentError, NotImplementedError):
    """hvdlite does not have what an argument asks for. Horovod's is a NotImplementedError too."""


class MismatchError(HvdliteError):
    """Ranks submitted different things under one name; the message names both ranks and values."""


class DeadlockError(MismatchError):
    """Ranks wait for each other in different operations; the message names ranks and operations.

    All of these operations raise it, after `deadlock_grace` seconds. The world stays usable.
    """


class DuplicateNameError(HvdliteError, ValueError):
    """An operation of that name is already in flight on this rank."""


class DivergenceError(HvdliteError):
    """Replicas of the same tensors have become different; raised on every rank that compares them.

    Attributes:
        tensors: the names of the tensors.
        ranks: the ranks that differ from the majority; empty where there is no majority.
    """

    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class ReplicasDifferWarning(UserWarning):
    """Ranks train different models: parameters were not broadcast, or gradients not reduced."""


class UnreducedGradientsWarning(UserWarning):
    """`step` reduces gradients, and somebody may have read this rank's own ones before."""


class LateGradientsWarning(UserWarning):
    """Gradients of some rank are late in every step, or are forgotten; see `hvd.Late`."""


class UndividedRateWarning(UserWarning):
    """Parameter servers apply every worker's push, and the rate is not divided by the workers."""


class ElasticSamplerWarning(UserWarning):
    """An ElasticSampler's samples are missed or repeated; the message says why and what to do."""


class UnrecordedSamplesWarning(UserWarning):
    """The state of a DistributedSampler is taken in an epoch, and nothing was recorded in it."""


class VirtualRanksWarning(UserWarning):
    """A loop over steps of virtual ranks may give other bits at another number of ranks."""


class StopHandlerWarning(UserWarning):
    """A handler of `hvd.stop_on` replaced one that it cannot call."""


class OutOfMemoryError(HvdliteError, MemoryError):
    """There is not enough memory for the operation."""


class ForkedError(HvdliteError):
    """hvdlite was used in a child of fork()."""


class BootstrapError(HvdliteError):
    """The ranks could not connect: refused, unreachable, wrong version, or too slow."""


class CollectiveError(HvdliteError):
    """The world is over for this rank; Horovod's name of this class is HorovodInternalError."""


class RankFailedError(CollectiveError):
    """Another rank died, raised an exception, or left; `failed_rank` says which rank."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Another rank made no progress inside a collective for `collective_timeout` seconds."""


class StalledError(CollectiveError):
    """Some rank did not submit a tensor within `stall_shutdown` seconds of the first rank."""


class ShutdownError(CollectiveError):
    """This rank shut down while the operation was in flight."""


# Copies of the errors that C++ code of a framework got, which keeps their texts only.
passed_on: collections.deque[BaseException] = collections.deque(maxlen=64)


def cause(error: BaseException) -> HvdliteError | None:
    """Return the error of hvdlite that another one reports.

    Where an error passes through C++ code of PyTorch, as in the backward of torch's
    DistributedDataParallel, a RuntimeError arrives that has its text only.

    Args:
        error: any exception.

    Returns:
        `error` itself if it is an error of hvdlite; otherwise the latest one whose text it
        contains, or the one from which it was raised; None if there is none.

    Example:
        >>> cause(ValueError("an error of the script")) is None
        True
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        text = str(one)
        newest_first = tuple(passed_on)[::-1]  # Other threads may add to it meanwhile.
        for known in (one, *(passed for passed in newest_first if str(passed) in text)):
            if isinstance(known, HvdliteError):
                found: HvdliteError = known
                return found
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return None


_OURS = __file__.removesuffix("errors.py")
_FRAMEWORKS = re.compile(r"-packages/(torch|keras|tensorflow)/")


def in_library(file: str) -> bool:
    """Return whether a file of code belongs to hvdlite or to another installed library."""
    return "-packages/" in file or file.startswith((_OURS, "<frozen ", f"{sys.prefix}/bin/"))


def as_shown(error: BaseException) -> BaseException:
    """Return the error of hvdlite that C++ code has copied, without frames of the frameworks.

    Another error is returned as it is: it may say more than that of hvdlite.
    """
    found = cause(error)
    more = error.__cause__ or error.__context__ or vars(error)  # Notes are among its variables.
    if found is None or (found is not error and (more or "\n\nAt:\n" not in str(error))):
        return error
    frames, own = error.__traceback__, list[types.TracebackType]()
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.startswith((_OURS, "<frozen ")) and not _FRAMEWORKS.search(file):
            own.append(frames)
        frames = frames.tb_next
    shown = None
    for one in reversed(own):
        shown = types.TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found.with_traceback(shown or error.__traceback__)


HorovodInternalError = CollectiveError
"""Horovod's name of `CollectiveError`."""


class HostsUpdatedInterrupt(RuntimeError):
    """Leads an elastic job to its next boundary: ranks are to join or to leave.

    `State.commit()` and `State.check_host_updates()` raise it on all ranks alike, and
    `hvd.elastic.run` catches it. It is an interrupt and not an error, so that it is not an
    HvdliteError, and code that handles errors does not swallow it.

    Args:
        skip_sync: True if ranks only leave, so that the other ranks need not receive the state; it
            is an attribute, too.

    Example:
        >>> HostsUpdatedInterrupt().skip_sync
        False
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("ranks join or leave at the next boundary of this elastic job")
        self.skip_sync = skip_sync
