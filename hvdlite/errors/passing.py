"""The errors that C++ code of a framework got, which keeps their texts only; see `errors.cause`."""

from __future__ import annotations

import collections
import copy

passed_on: collections.deque[BaseException] = collections.deque(maxlen=64)


def pass_on(error: BaseException) -> None:
    """Note an error that C++ code is about to get."""
    passed_on.append(copy.copy(error))  # The frames of a traceback would hold tensors.
