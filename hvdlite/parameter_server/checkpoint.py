"""The files of servers: each writes its own, and any number of servers reads them all.

Server i of n writes PATH.i-of-n, under another name at first, so that a file is complete or not
there. A file begins with a mark and a header in JSON, and the raw bytes follow. To read, a server
takes the newest *complete* set, one file of each server that wrote it, and of each file the rows
that it holds itself. So the files must lie where all servers can read them.
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
from hvdlite.parameter_server.placement import Part
from hvdlite.parameter_server.storage import Slot
from hvdlite.parameter_server.tensors import TensorSpec, decode, encode

_MARK = b"HVLPS01\n"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 << 20
_NAME = re.compile(r"(?s)(.*)\.(\d+)-of-(\d+)")


class Snapshot(NamedTuple):
    """What a checkpoint has of one collection."""

    name: str
    version: int
    clock: int
    specs: Sequence[TensorSpec]
    parts: Sequence[Part]
    slots: Sequence[Slot]


class Restored(NamedTuple):
    """What one slot of one part was, put together from the files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


def file_of(path: str, server: int, servers: int) -> str:
    """Return the name of a server's file, such as "ps.ckpt.0-of-2"."""
    return f"{path}.{server}-of-{servers}"


def write(
    path: str,
    server: int,
    servers: int,
    generation: int,
    number: int,
    snapshots: Sequence[Snapshot],
) -> None:
    """Write a server's file, in place of the one before it, which stays if an OSError is raised."""
    # `path` is the common part of the names of all files. `generation` says how many jobs in a row
    # have trained this model, and `number` counts the checkpoints of all these jobs.
    offset = 0
    collections = []
    for one in snapshots:
        entries = []
        for slot in one.slots:
            part = one.parts[slot.part]
            entries.append(
                {
                    "tensor": part.spec.name,
                    "first": part.first,
                    "rows": part.rows,
                    "slot": slot.name,
                    "dtype": slot.dtype,
                    "shape": list(slot.shape),
                    "by_rows": slot.by_rows,
                    "offset": offset,
                    "bytes": slot.data.nbytes,
                }
            )
            offset += slot.data.nbytes
        collections.append(
            {
                "name": one.name,
                "version": one.version,
                "clock": one.clock,
                "tensors": encode(one.specs),
                "entries": entries,
            }
        )
    header = {"generation": generation, "number": number, "collections": collections}
    text = json.dumps(header).encode()
    file = file_of(path, server, servers)
    partial = f"{file}.partial"
    with open(partial, "wb") as stream:
        stream.writelines([_MARK, _LENGTH.pack(len(text)), text])
        stream.writelines(slot.data for one in snapshots for slot in one.slots)
        stream.flush()
        os.fsync(stream.fileno())
    Path(partial).replace(file)


@dataclass(frozen=True)
class _File:
    """One file, whose header alone has been read."""

    path: Path
    data_at: int
    header: dict[str, Any]

    @property
    def generation(self) -> int:
        """How many jobs in a row have trained this model."""
        return int(self.header["generation"])


class Checkpoint:
    """A complete set of files."""

    def __init__(self, files: Sequence[_File]) -> None:
        self._files = list(files)
        # So many jobs in a row have trained this model; the number is the lowest one in the set.
        self.generation = max(one.generation for one in files)
        self.number = min(int(one.header["number"]) for one in files)

    @property
    def files(self) -> list[str]:
        """The names of the files."""
        return [str(one.path) for one in self._files]

    @property
    def names(self) -> list[str]:
        """The names of the collections."""
        found = [one["name"] for file in self._files for one in file.header["collections"]]
        return list(dict.fromkeys(found))

    def specs(self, name: str) -> list[TensorSpec] | None:
        """Return the tensors of a collection; None if the files do not have it."""
        for one in self._collections(name):
            return decode(one["tensors"])
        return None

    def version(self, name: str) -> int:
        """Return the version of a collection: the highest one of a server."""
        return max(int(one["version"]) for one in self._collections(name))

    def clock(self, name: str) -> int:
        """Return the clock at which workers go on."""
        return min(int(one["clock"]) for one in self._collections(name))

    def slots(self, name: str, part: Part) -> Iterator[Restored]:
        """Put together what the files have of one part; missing rows raise ArgumentError."""
        found: dict[str, list[tuple[_File, dict[str, Any]]]] = {}
        for file in self._files:
            for entry in _entries(file, name):
                begins, ends = entry["first"], entry["first"] + entry["rows"]
                shares = begins < part.first + part.rows and part.first < ends
                if entry["tensor"] == part.spec.name and (
                    shares or part.rows == entry["rows"] == 0
                ):
                    found.setdefault(entry["slot"], []).append((file, entry))
        if "" not in found and part.rows:
            raise ArgumentError(f"the checkpoint has no values of tensor {part.spec.name!r}")
        # Without one of its states, an optimizer begins anew.
        goes_on = all(_fits(pieces[0][1], part) for pieces in found.values())
        for slot, pieces in found.items():
            if slot == "" or goes_on:
                yield _put_together(slot, pieces, part)

    def _collections(self, name: str) -> Iterator[dict[str, Any]]:
        for file in self._files:
            yield from (one for one in file.header["collections"] if one["name"] == name)


def _entries(file: _File, name: str) -> Iterator[dict[str, Any]]:
    for one in file.header["collections"]:
        if one["name"] == name:
            yield from one["entries"]


def _fits(entry: dict[str, Any], part: Part) -> bool:
    """Return whether a slot can be divided by rows, or belongs to these rows as a whole."""
    same = (entry["first"], entry["rows"]) == (part.first, part.rows)
    return same or entry["by_rows"] or not entry["shape"]


def _put_together(
    slot: str, pieces: Sequence[tuple[_File, dict[str, Any]]], part: Part
) -> Restored:
    """Return the slot of a part."""
    file, first = pieces[0]
    if not first["by_rows"]:
        data = _read(file, first, 0, first["bytes"])
        return Restored(slot, first["dtype"], tuple(first["shape"]), bytearray(data))
    size = first["bytes"] // first["rows"] if first["rows"] else 0
    whole = bytearray(part.rows * size)  # Rows whose optimizer has no state yet are zero.
    covered = 0
    for file, entry in pieces:
        begin = max(entry["first"], part.first)
        end = min(entry["first"] + entry["rows"], part.first + part.rows)
        found = _read(file, entry, (begin - entry["first"]) * size, (end - begin) * size)
        whole[(begin - part.first) * size : (end - part.first) * size] = found
        covered += end - begin
    if slot == "" and covered != part.rows:
        raise ArgumentError(
            f"the checkpoint has {covered} of {part.rows} rows of tensor {part.spec.name!r}"
        )
    return Restored(slot, first["dtype"], part.shape, whole)


def _read(file: _File, entry: dict[str, Any], skip: int, count: int) -> bytes:
    with open(file.path, "rb") as stream:
        stream.seek(file.data_at + entry["offset"] + skip)
        data = stream.read(count)
    if len(data) != count:
        raise ArgumentError(f"{file.path} is shorter than its header says; it was damaged")
    return data


def find(path: str) -> Checkpoint | None:
    """Return the newest complete checkpoint under a path; None if there is none."""
    # A damaged file raises ArgumentError.
    sets: dict[int, dict[int, Path]] = {}
    folder, name = os.path.split(path)
    for one in _listed(folder or "."):
        match = _NAME.fullmatch(one)
        if match is not None and match[1] == name:
            sets.setdefault(int(match[3]), {})[int(match[2])] = Path(folder, one)
    complete = [
        [_open(some[server]) for server in range(servers)]
        for servers, some in sorted(sets.items())
        if set(range(servers)) <= set(some)
    ]
    if not complete:
        return None
    return Checkpoint(max(complete, key=_age))


def _age(files: Sequence[_File]) -> tuple[int, int]:
    """Return what is larger for newer sets."""
    written = min(one.path.stat().st_mtime_ns for one in files)
    return min(one.generation for one in files), written


def _listed(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _open(path: Path) -> _File:
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
        return _File(path, stream.tell(), header)
