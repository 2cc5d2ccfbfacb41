"""Writes the checkpoints of one server in the background, and reads the one to begin with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.parameter_server import checkpoint
from hvdlite.parameter_server.checkpoint import Checkpoint, Snapshot
from hvdlite.parameter_server.collection import Collection
from hvdlite.parameter_server.tensors import difference


class Saving:
    """The checkpoints of one server."""

    def __init__(
        self,
        server: int,
        servers: int,
        save: str | None = None,
        every: float = 60.0,
        load: str | None = None,
    ) -> None:
        """Find the checkpoint to begin with: that of `load`, or else of `save`, if there is one."""
        # `every` is in seconds; without a path `save`, no checkpoints are written. The call raises
        # ArgumentError if there is no checkpoint in `load`, or one of another number of servers.
        if not every > 0:
            raise ArgumentError(f"save_every={every!r} is not a number of seconds above 0")
        self._server = server
        self._every = every
        self._begun = _begin_with(save, load, server, servers)
        # The number of the last checkpoint counts those of all jobs that trained this model.
        self.number = 0 if self._begun is None else self._begun.number
        self.file = None if save is None else checkpoint.file_of(save, server, servers)
        self._version: int | None = None  # The last checkpoint has this version.
        self._collection: Callable[[], Collection | None] = lambda: None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-saving", daemon=True)

    def start(self, collection: Callable[[], Collection | None]) -> None:
        """Write checkpoints from now on, of what `collection` returns."""
        self._collection = collection
        if self.file is not None:
            self._thread.start()

    def close(self) -> None:
        """Write the last checkpoint, and stop."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._save()

    def restore(self, collection: Collection) -> None:
        """Set a new collection to what the checkpoint has, if there is one."""
        # The call raises MismatchError if the checkpoint has other tensors.
        begun = self._begun
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
        collection = self._collection()
        if collection is None or collection.version == self._version:
            return
        assert self.file is not None
        try:
            snapshot = _snapshot(collection)
            checkpoint.write(self.file, self.number + 1, snapshot)
        except (OSError, HvdliteError) as error:
            print(
                f"hvdlite: parameter server {self._server} cannot write its checkpoint "
                f"{self.file}: {error}; it goes on without",
                file=sys.stderr,
            )
            return
        self._version, self.number = snapshot.version, self.number + 1


def _snapshot(collection: Collection) -> Snapshot:
    with collection.lock:
        slots = list(collection.storage.slots())
        version = collection.version
    least = collection.clocks.least
    return Snapshot(version, least, collection.specs, collection.tensors, slots)


def _begin_with(save: str | None, load: str | None, server: int, servers: int) -> Checkpoint | None:
    path = save if load is None else load
    found = None if path is None else checkpoint.find(path, server, servers)
    if load is not None and found is None:
        raise ArgumentError(
            f"there is no complete checkpoint {load!r}: one file of each server that wrote it, "
            f"such as {checkpoint.file_of(load, 0, 2)!r} and {checkpoint.file_of(load, 1, 2)!r}"
        )
    return found
