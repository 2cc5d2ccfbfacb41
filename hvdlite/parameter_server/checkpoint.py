"""The checkpoint of a server: each writes a file of its own, and begins with it in the next job.

Server i of n writes PATH.i-of-n, under another name at first, so that a file is complete or not
there. A file begins with a mark and a header in JSON, and the raw bytes follow. A checkpoint is
*complete* when each of the n servers has written its file, and only servers of the same number
read it.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.storage import Slot
from hvdlite.parameter_server.tensors import TensorSpec, decode, encode

_MARK = b"HVLPS02\n"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 << 20
_NAME = re.compile(r"(?s)(.*)\.(\d+)-of-(\d+)")


class Snapshot(NamedTuple):
    """What a server writes."""

    version: int
    clock: int
    specs: Sequence[TensorSpec]  # They are all tensors of the model, also those of other servers.
    tensors: Sequence[TensorSpec]  # The server holds these.
    slots: Sequence[Slot]


def file_of(path: str, server: int, servers: int) -> str:
    """Return the name of a server's file, such as "ps.ckpt.0-of-2"."""
    return f"{path}.{server}-of-{servers}"


def write(file: str, number: int, snapshot: Snapshot) -> None:
    """Write a server's file, in place of the one before it, which stays if an OSError is raised."""
    # `number` counts the checkpoints of all jobs that have trained this model.
    offset = 0
    entries = []
    for slot in snapshot.slots:
        entries.append(
            {
                "tensor": snapshot.tensors[slot.tensor].name,
                "slot": slot.name,
                "dtype": slot.dtype,
                "shape": list(slot.shape),
                "offset": offset,
                "bytes": slot.data.nbytes,
            }
        )
        offset += slot.data.nbytes
    header = {
        "number": number,
        "version": snapshot.version,
        "clock": snapshot.clock,
        "tensors": encode(snapshot.specs),
        "entries": entries,
    }
    text = json.dumps(header).encode()
    partial = f"{file}.partial"
    with open(partial, "wb") as stream:
        stream.writelines([_MARK, _LENGTH.pack(len(text)), text])
        stream.writelines(slot.data for slot in snapshot.slots)
        stream.flush()
        os.fsync(stream.fileno())
    Path(partial).replace(file)


@dataclass(frozen=True)
class Checkpoint:
    """The file of a server, whose header alone has been read."""

    path: Path
    data_at: int
    header: dict[str, Any]

    @property
    def number(self) -> int:
        """How many checkpoints of this model there were before, and this one."""
        return int(self.header["number"])

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors of the model."""
        return decode(self.header["tensors"])

    @property
    def version(self) -> int:
        """The number of pushes that the server had applied."""
        return int(self.header["version"])

    @property
    def clock(self) -> int:
        """The clock at which workers go on."""
        return int(self.header["clock"])

    def slots(self, tensors: Sequence[TensorSpec]) -> Iterator[Slot]:
        """Read what the file has of these tensors; missing values raise ArgumentError."""
        entries = self.header["entries"]
        for index, spec in enumerate(tensors):
            own = [one for one in entries if one["tensor"] == spec.name]
            if not any(one["slot"] == "" for one in own):
                raise ArgumentError(f"{self.path} has no values of tensor {spec.name!r}")
            for one in own:
                data = memoryview(self._read(one["offset"], one["bytes"]))
                yield Slot(index, one["slot"], one["dtype"], tuple(one["shape"]), data)

    def _read(self, offset: int, count: int) -> bytearray:
        data = bytearray(count)
        with open(self.path, "rb") as stream:
            stream.seek(self.data_at + offset)
            if stream.readinto(data) != count:
                raise ArgumentError(f"{self.path} is shorter than its header says; it was damaged")
        return data


def find(path: str, server: int, servers: int) -> Checkpoint | None:
    """Return the file of a server if the checkpoint is complete; None if there is none."""
    # A checkpoint of another number of servers, and a damaged file, raise ArgumentError.
    written: dict[int, set[int]] = {}
    folder, name = os.path.split(path)
    for one in _listed(folder or "."):
        match = _NAME.fullmatch(one)
        if match is not None and match[1] == name:
            written.setdefault(int(match[3]), set()).add(int(match[2]))
    complete = [count for count, some in written.items() if some >= set(range(count))]
    if servers in complete:
        return _open(Path(file_of(path, server, servers)))
    if complete:
        raise ArgumentError(
            f"the checkpoint {path!r} has the files of {complete[0]} servers, and this job has "
            f"{servers}: start it with --servers {complete[0]}, or give serve() another path"
        )
    return None


def _listed(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _open(path: Path) -> Checkpoint:
    with open(path, "rb") as stream:
        head = stream.read(len(_MARK) + _LENGTH.size)
        if not head.startswith(_MARK) or len(head) < len(_MARK) + _LENGTH.size:
            raise ArgumentError(f"{path} is not a checkpoint of a parameter server")
        (length,) = _LENGTH.unpack_from(head, len(_MARK))
        if length > _MAX_HEADER_BYTES:
            raise ArgumentError(f"{path} is not a checkpoint of a parameter server")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ArgumentError(f"the header of {path} is damaged") from None
        return Checkpoint(path, stream.tell(), header)
