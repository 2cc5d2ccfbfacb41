"""The program of one rank of `hvdlite.run`: it reads a function from stdin, and calls it.

The launcher starts it as `python -m hvdlite.launch.call`. It writes the function's result to the
descriptor in HVDLITE_RESULT_FD. On other hosts the agent forwards the result, so results need no
port and no shared file system.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle


class Returned(NamedTuple):
    value: bytes | None = None  # the pickled result; None after an exception
    # The pickled exception; None without one, or if it cannot be pickled.
    error: bytes | None = None
    text: str = ""  # the traceback of the exception; "" without one


def pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call; functions of a notebook or a script travel by value."""
    # The pickle holds the import path and, as bytes, the pickled call. So the rank can extend its
    # import path before it unpickles a function of a module there.
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100
    return pickle.dumps((path, cloudpickle.dumps((fn, tuple(args), dict(kwargs)))))


def unpack_result(data: bytes) -> Returned | None:
    """Unpickle what a rank wrote to its descriptor; None if it ended before it wrote it all."""
    # Unpickling is safe, because the rank is a process of this user.
    try:
        return Returned(*pickle.loads(data))
    except Exception:  # A pickle that was cut fails in many ways.
        return None


def unpack_error(returned: Returned) -> BaseException | None:
    """Return the exception of a rank; None if there is none, or its class is not known here."""
    if returned.error is None:
        return None
    try:
        error = pickle.loads(returned.error)
    except Exception:  # Its module may raise anything when it is imported here.
        return None
    return error if isinstance(error, BaseException) else None


def _give(fd: int, returned: Returned) -> None:
    with open(fd, "wb") as pipe:
        pipe.write(pickle.dumps(tuple(returned)))


def pickled_error(error: BaseException) -> bytes | None:
    """Pickle an exception for `unpack_error`; None if it cannot be pickled, or unpickled."""
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:  # Some exceptions cannot be pickled, or cannot be unpickled.
        return None
    return data


def main() -> None:
    """Call the function; its exception also ends this process, as it would end a script."""
    result = int(os.environ.pop("HVDLITE_RESULT_FD"))
    os.set_inheritable(result, False)
    path, call = pickle.loads(sys.stdin.buffer.read())
    sys.path += [entry for entry in path if entry not in sys.path]
    try:
        fn, args, kwargs = pickle.loads(call)
        value = cloudpickle.dumps(fn(*args, **kwargs))
    except Exception as error:
        _give(result, Returned(error=pickled_error(error), text=traceback.format_exc()))
        raise
    _give(result, Returned(value=value))


if __name__ == "__main__":
    main()
