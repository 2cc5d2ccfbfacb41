"""What a task tells the driver of its rank, as rows of a table.

A report is one pickle, which is cut into rows, because Spark limits the size of what travels at
once.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hvdlite.launch.output.report import Failure

SCHEMA = "rank int, part int, data binary"
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Report:
    """What became of one rank."""

    rank: int
    # This says how the rank failed; None if it did not, or was ended because another rank failed.
    failure: Failure | None = None
    status: int = 0  # the exit status of the rank as a launcher would report it
    result: bytes = b""  # what the rank wrote as its result, for `launch.call.unpack_result`

    def parts(self) -> Iterator[bytes]:
        """Cut the report into parts."""
        data = pickle.dumps(self)
        for begin in range(0, len(data), _PART_BYTES):
            yield data[begin : begin + _PART_BYTES]

    @staticmethod
    def joined(parts: Iterable[bytes]) -> Report:
        """Put a report together again; its parts come in order."""
        report: Report = pickle.loads(b"".join(parts))
        return report
