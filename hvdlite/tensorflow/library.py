"""The library of TensorFlow operations: loaded once, and connected to the engine of each world.

It is built on TensorFlow's C API alone, so that one binary serves all releases, and it is not
linked with the core: in `init`, `basics.watch` passes the engine's table of C functions to it, and
takes the table back after `shutdown`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdlite import _core, basics, errors

# The tests run on these releases. The library relies on how TensorFlow's experimental C API calls
# back, which any release may change.
OLDEST_TESTED = (2, 16)
NEWEST_TESTED = (2, 21)

_FILE = Path(_core.__file__).parent / "tensorflow" / "libhvdlite_tensorflow.so"
# csrc/tensorflow/xla.cc ends a message with it if the call failed because the world has ended.
_MARK = "[hvdlite.errors.CollectiveError]"
_lock = threading.Lock()
_loaded: _Library | None = None


def raw_ops() -> Any:
    """Return the operations; load and attach the library at first use, which may raise."""
    return _library().ops


def native() -> ctypes.CDLL:
    return _library().native


def _library() -> _Library:
    global _loaded
    with _lock:
        if _loaded is None:
            _warn_if_untested()
            library = _Library()
            basics.watch(library.attach)
            _loaded = library
        return _loaded


def _warn_if_untested() -> None:
    """Warn, before anything can crash, that this TensorFlow was not tested."""
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if not OLDEST_TESTED <= version <= NEWEST_TESTED:
        oldest, newest = (".".join(map(str, one)) for one in (OLDEST_TESTED, NEWEST_TESTED))
        warnings.warn(
            f"hvdlite's operations were tested with TensorFlow {oldest} to {newest}, "
            f"not with {tf.__version__}",
            stacklevel=2,
        )


class _Library:
    """The loaded library: its operations for TensorFlow, and its C functions for us."""

    def __init__(self) -> None:
        # TensorFlow opens the file first: it sees only operations that register meanwhile.
        self.ops = _Operations(tf.load_op_library(str(_FILE)))
        self.native = ctypes.CDLL(str(_FILE))
        self._attach = self.native.hvdlite_tensorflow_attach
        self._attach.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)]
        self._attach.restype = ctypes.c_bool
        self._engine: _core.Engine | None = None  # This keeps the connected engine alive.

    def attach(self, engine: _core.Engine | None) -> None:
        """Connect the operations to this engine, or disconnect them (None)."""
        if engine is None:
            self._attach(None, None)
        else:
            numbers = (
                *(basics.rank(), basics.size(), basics.local_rank(), basics.local_size()),
                *(basics.cross_rank(), basics.cross_size()),
            )
            world = (ctypes.c_int32 * len(numbers))(*numbers)
            if not self._attach(engine.core_table(), world):
                raise errors.HvdliteError(
                    f"{_FILE.name} and hvdlite's core are of different versions; reinstall hvdlite"
                )
        self._engine = engine


class _Operations:
    """The operations of the library; eager failures raise errors of ours, too."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._module, name)

        @functools.wraps(operation)
        def run(*inputs: Any, **attributes: Any) -> Any:
            try:
                return operation(*inputs, **attributes)
            except tf.errors.OpError as error:
                raise _both(error) from None

        setattr(self, name, run)
        return run


# The errors of eager operations: each class is one of TensorFlow's and one of ours. The kernel's
# error code decides the class; csrc/tensorflow/attachment.h has the codes. In a graph TensorFlow
# itself raises the error, so that it has TensorFlow's class only. XLA gives every failure of a
# custom call one code; there the message names the class if the world has ended.


class AbortedError(tf.errors.AbortedError, errors.CollectiveError):  # type: ignore[misc]
    """The world is over for this rank."""


class FailedPreconditionError(tf.errors.FailedPreconditionError, errors.MismatchError):  # type: ignore[misc]
    """Ranks submitted different things under one name; the world goes on."""


class InvalidArgumentError(tf.errors.InvalidArgumentError, errors.ArgumentError):  # type: ignore[misc]
    """A call of this rank, or of the rank that the message names, is wrong; the world goes on."""


class ResourceExhaustedError(tf.errors.ResourceExhaustedError, errors.OutOfMemoryError):  # type: ignore[misc]
    """There is no memory for the operation; the world goes on."""


_KINDS: tuple[Any, ...] = (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)


def _both(error: Any) -> Any:
    """Convert a tf.errors.OpError to one of the classes above, if there is one for it."""
    for kind in _KINDS:
        if type(error) is kind.__base__:
            return kind(error.node_def, error.op, error.message)
    return error


@contextmanager
def collective_errors() -> Iterator[None]:
    """Raise a CollectiveError where a graph or XLA raises TensorFlow's own error for it."""
    try:
        yield
    except tf.errors.OpError as error:
        ended = isinstance(error, tf.errors.AbortedError) or _MARK in str(error.message)
        if isinstance(error, errors.CollectiveError) or not ended:
            raise
        raise errors.CollectiveError(error.message) from error
