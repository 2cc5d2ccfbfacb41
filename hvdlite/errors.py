"""The errors that hvdlite raises, one class per cause, and its warnings.

Every error is an `HvdliteError`. Those that end the world (a peer died, a deadline passed) are
`CollectiveError`s: no later collective of this world can succeed, and each raises the same root
cause. Mistakes (`MismatchError`, `DuplicateNameError`, `ArgumentError`) leave the world usable.

Example:
    >>> from hvdlite.errors import HvdliteError, MismatchError
    >>> issubclass(MismatchError, HvdliteError)
    True
"""

from __future__ import annotations


class HvdliteError(RuntimeError):
    """Base of all errors of hvdlite.

    Attributes:
        failed_rank: the rank that caused it, or None.
    """

    failed_rank: int | None = None

    # TensorFlow's AutoGraph raises an error of a function anew, to say where in the user's code it
    # arose. It keeps the class of those whose __init__ is this very one.
    __init__ = Exception.__init__


class NotInitializedError(HvdliteError, ValueError):
    """`init()` was not called, or `shutdown()` was. (A ValueError, as Horovod's is.)"""


class ArgumentError(HvdliteError, ValueError):
    """An argument cannot be used; the message says what to do."""


class UnsupportedError(ArgumentError, NotImplementedError):
    """What an argument asks for does not exist. (A NotImplementedError, as Horovod's is.)"""


class MismatchError(HvdliteError):
    """Ranks disagree about a tensor; the message names it, the ranks and both values."""


class DuplicateNameError(HvdliteError, ValueError):
    """An operation of that name is already in flight on this rank."""


class ReplicasDifferWarning(UserWarning):
    """Ranks train models that differ: something was not broadcast, or not reduced."""


class OutOfMemoryError(HvdliteError, MemoryError):
    """There is no memory for the operation."""


class ForkedError(HvdliteError):
    """hvdlite was used in a child of fork()."""


class BootstrapError(HvdliteError):
    """The ranks could not connect: refused, unreachable, wrong version, or too slow."""


class CollectiveError(HvdliteError):
    """The world is over for this rank; Horovod calls it HorovodInternalError."""


class RankFailedError(CollectiveError):
    """A peer died, raised, or left; `failed_rank` says which."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer made no progress inside a collective for `collective_timeout` seconds."""


class StalledError(CollectiveError):
    """Some rank did not submit a tensor within `stall_shutdown` seconds."""


class ShutdownError(CollectiveError):
    """This rank shut down while the operation was in flight."""


HorovodInternalError = CollectiveError
