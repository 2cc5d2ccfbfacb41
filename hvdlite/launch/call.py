"""One rank of `hvdlite.run`: reads a function from stdin, calls it, gives back what it returned.

Started as `python -m hvdlite.launch.call`. The result goes to the descriptor in HVDLITE_RESULT_FD;
on other hosts the agent passes it on, so results need no port and no shared file system.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class Returned:
    """What came of the call in one rank.

    Attributes:
        value: the pickled result.
        error: the pickled exception; None when there was none, or it cannot be pickled.
        text: the traceback of the exception, "" when there was none.
    """

    value: bytes | None = None
    error: bytes | None = None
    text: str = ""


def pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call; functions of a notebook or a script travel by value.

    Where modules lie comes first: it must be known before anything of them is unpickled.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100
    return pickle.dumps((path, cloudpickle.dumps((fn, tuple(args), dict(kwargs)))))


def unpack_result(data: bytes) -> Returned | None:
    """Read what a rank wrote to its descriptor; the rank is one of this user's own.

    None when that is not all of it: the rank ended while it wrote.
    """
    try:
        value, error, text = pickle.loads(data)
    except Exception:  # A pickle that was cut fails in many ways.
        return None
    return Returned(value, error, text)


def unpack_error(returned: Returned) -> BaseException | None:
    """Give the exception of a rank; None if there is none, or its class is not known here."""
    if returned.error is None:
        return None
    try:
        error = pickle.loads(returned.error)
    except Exception:  # Whatever its module does when it is imported here.
        return None
    return error if isinstance(error, BaseException) else None


def _give(fd: int, returned: Returned) -> None:
    with open(fd, "wb") as pipe:
        pipe.write(pickle.dumps((returned.value, returned.error, returned.text)))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:  # Some take no part in pickling, or only half of it.
        return None
    return data


def main() -> None:
    """Run the call; its exception also ends this process, as it would end a script."""
    result = int(os.environ.pop("HVDLITE_RESULT_FD"))
    os.set_inheritable(result, False)
    path, call = pickle.loads(sys.stdin.buffer.read())
    sys.path += [entry for entry in path if entry not in sys.path]
    try:
        fn, args, kwargs = pickle.loads(call)
        value = cloudpickle.dumps(fn(*args, **kwargs))
    except Exception as error:
        _give(result, Returned(error=_pickled(error), text=traceback.format_exc()))
        raise
    _give(result, Returned(value=value))


if __name__ == "__main__":
    main()
