"""The log of one server: lines of JSON, from which a run can be computed again in one process.

A push has its worker, the worker's clock, the version that its gradients were computed on, and the
version that it made. So a replay keeps the values of each version, computes each gradient again on
those that the worker had seen, and applies it. A pull with a bound has the lowest clock of a worker
at that moment.

Example:
    {"what": "push", "collection": "", "worker": 2, "clock": 1, "version": 1, "seen": 0}
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any


class Log:
    """Writes lines to a file; any thread may call `write`."""

    def __init__(self, path: str) -> None:
        """Open the file, and forget what was in it."""
        self._stream = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        text = json.dumps(line)
        with self._lock:
            self._stream.write(text + "\n")

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._stream.close()
