"""The checkpoint of a server: a file that it writes in the background, and begins with next time.

Server i of n writes PATH.i-of-n, under another name at first, so that a file is complete or not
there. A file begins with a mark and a header in JSON, and the raw bytes follow. A checkpoint is
*complete* when each of the n servers has written its file, and only servers of the same number
read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.parameter_server.collection import Collection
from hvdlite.parameter_server.tensors import Slot, TensorSpec, decode, difference, encode

_MARK = b"HVLPS02\n"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 << 20
_NAME = re.compile(r"(?s)(.*)\.(\d+)-of-(\d+)")


def file_of(path: str, server: int, servers: int) -> str:
    """Return the name of a server's file, such as "ps.ckpt.0-of-2"."""
    return f"{path}.{server}-of-{servers}"


def write(
    file: str,
    numbers: Mapping[str, int],
    specs: Sequence[TensorSpec],
    tensors: Sequence[TensorSpec],
    slots: Sequence[Slot],
) -> None:
    """Write a server's file, in place of the one before it, which stays if an OSError is raised.

    `numbers` are those of a `Checkpoint`. `specs` are all tensors of the model, and `tensors` those
    that the server holds.
    """
    offset = 0
    entries = []
    for slot in slots:
        entries.append(
            {
                "tensor": tensors[slot.tensor].name,
                "slot": slot.name,
                "dtype": slot.dtype,
                "shape": list(slot.shape),
                "offset": offset,
                "bytes": slot.data.nbytes,
            }
        )
        offset += slot.data.nbytes
    header = {**numbers, "tensors": encode(specs), "entries": entries}
    text = json.dumps(header).encode()
    partial = f"{file}.partial"
    with open(partial, "wb") as stream:
        stream.writelines([_MARK, _LENGTH.pack(len(text)), text])
        stream.writelines(slot.data for slot in slots)
        stream.flush()
        os.fsync(stream.fileno())
    Path(partial).replace(file)


@dataclass(frozen=True)
class Checkpoint:
    """The file of a server, whose header alone has been read."""

    path: Path
    number: int  # of this one among the checkpoints of all jobs that have trained this model
    version: int  # the number of pushes that the server had applied
    clock: int  # at which workers go on
    specs: Sequence[TensorSpec]  # all tensors of the model
    entries: Sequence[Mapping[str, Any]]
    data_at: int

    def slots(self, tensors: Sequence[TensorSpec]) -> Iterator[Slot]:
        """Read what the file has of these tensors; missing values raise ArgumentError."""
        with open(self.path, "rb") as stream:
            for index, spec in enumerate(tensors):
                own = [one for one in self.entries if one["tensor"] == spec.name]
                if not any(one["slot"] == "" for one in own):
                    raise ArgumentError(f"{self.path} has no values of tensor {spec.name!r}")
                for one in own:
                    data = memoryview(bytearray(one["bytes"]))
                    stream.seek(self.data_at + one["offset"])
                    if stream.readinto(data) != len(data):
                        short = "is shorter than its header says; it was damaged"
                        raise ArgumentError(f"{self.path} {short}")
                    yield Slot(index, one["slot"], one["dtype"], tuple(one["shape"]), data)


def find(path: str, server: int, servers: int) -> Checkpoint | None:
    """Return the file of a server if the checkpoint is complete; None if there is none.

    A checkpoint of another number of servers, and a damaged file, raise ArgumentError.
    """
    written: dict[int, set[int]] = {}
    folder, name = os.path.split(path)
    with contextlib.suppress(FileNotFoundError):
        for one in os.listdir(folder or "."):
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


def _open(path: Path) -> Checkpoint:
    with open(path, "rb") as stream:
        head = stream.read(len(_MARK) + _LENGTH.size)
        known = head.startswith(_MARK) and len(head) == len(_MARK) + _LENGTH.size
        length = _LENGTH.unpack_from(head, len(_MARK))[0] if known else 0
        if not known or length > _MAX_HEADER_BYTES:
            raise ArgumentError(f"{path} is not a checkpoint of a parameter server")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ArgumentError(f"the header of {path} is damaged") from None
        specs = decode(header.pop("tensors"))
        return Checkpoint(path, specs=specs, data_at=stream.tell(), **header)


class Saving:
    def __init__(
        self,
        server: int,
        servers: int,
        save: str | None = None,
        every: float = 60.0,
        load: str | None = None,
    ) -> None:
        """Find the checkpoint to begin with: that of `load`, or else of `save`, if there is one.

        `every` is in seconds; without a path `save`, no checkpoints are written. It raises
        ArgumentError if there is no checkpoint in `load`, or one of another number of servers.
        """
        if not every > 0:
            raise ArgumentError(f"save_every={every!r} is not a number of seconds above 0")
        self._server = server
        self._every = every
        path = save if load is None else load
        self._begun = None if path is None else find(path, server, servers)
        if load is not None and self._begun is None:
            raise ArgumentError(
                f"there is no complete checkpoint {load!r}: one file of each server that wrote it, "
                f"such as {file_of(load, 0, 2)!r} and {file_of(load, 1, 2)!r}"
            )
        # The number of the last checkpoint counts those of all jobs that trained this model.
        self.number = 0 if self._begun is None else self._begun.number
        self.file = None if save is None else file_of(save, server, servers)
        self._version: int | None = None  # The last checkpoint has this version.
        self._collection: Collection | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-saving", daemon=True)

    def start(self) -> None:
        if self.file is not None:
            self._thread.start()

    def close(self) -> None:
        """Write the last checkpoint, and stop."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._save()

    def restore(self, collection: Collection) -> None:
        """Set a new collection to what the checkpoint has, if there is one; save it from now on.

        It raises MismatchError if the checkpoint has other tensors.
        """
        self._collection, begun = collection, self._begun
        if begun is None:
            return
        what = difference(collection.specs, begun.specs)
        if what is not None:
            raise MismatchError(
                f"the checkpoint {begun.path} is of another model: {what}; train the same "
                "model, or give serve() another path"
            )
        try:
            for slot in begun.slots(collection.tensors):
                collection.storage.restore(slot)
        except OSError as error:
            raise HvdliteError(f"the checkpoint {begun.path} cannot be read: {error}") from error
        collection.begin_at(begun.version, begun.clock)

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            self._save()

    def _save(self) -> None:
        """Write a checkpoint if something has changed; a failure does not end the service."""
        collection = self._collection
        if collection is None or not collection.filled or collection.version == self._version:
            return
        assert self.file is not None
        try:
            with collection.lock:
                slots, version = list(collection.storage.slots()), collection.version
            clock = collection.least_clock()
            numbers = {"number": self.number + 1, "version": version, "clock": clock}
            write(self.file, numbers, collection.specs, collection.tensors, slots)
        except (OSError, HvdliteError) as error:
            print(
                f"hvdlite: parameter server {self._server} cannot write its checkpoint "
                f"{self.file}: {error}; it goes on without",
                file=sys.stderr,
            )
            return
        self._version, self.number = version, self.number + 1
