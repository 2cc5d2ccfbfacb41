"""Writes the checkpoints of one server in the background, and reads the one to begin with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

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
        # ArgumentError if there is no checkpoint in `load`.
        if not every > 0:
            raise ArgumentError(f"save_every={every!r} is not a number of seconds above 0")
        self._server, self._servers = server, servers
        self._path = save
        self._every = every
        self._begun = _begin_with(save, load)
        self._generation = 0 if self._begun is None else self._begun.generation + 1
        # The number of the last checkpoint counts those of all jobs that trained this model.
        self.number = 0 if self._begun is None else self._begun.number
        self.file = None if save is None else checkpoint.file_of(save, server, servers)
        self._versions: list[int] = []
        self._collections: Callable[[], Sequence[Collection]] = list
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-saving", daemon=True)

    def start(self, collections: Callable[[], Sequence[Collection]]) -> None:
        """Write checkpoints from now on, of what `collections` returns."""
        self._collections = collections
        if self._path is not None:
            self._thread.start()

    def close(self) -> None:
        """Write the last checkpoint, and stop."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._save()

    def restore(self, collection: Collection) -> None:
        """Set a collection to what the checkpoint has of it; new collections stay as they are."""
        # The call raises ArgumentError if the files lack rows.
        begun, name = self._begun, collection.name
        specs = None if begun is None else begun.specs(name)
        if begun is None or specs is None:
            return
        what = difference(collection.specs, specs)
        if what is not None:
            raise MismatchError(
                f"the checkpoint {begun.files[0]} is of another model: {what}; train the same "
                "model, or give serve() another path"
            )
        try:
            for index, part in enumerate(collection.parts):
                for one in begun.slots(name, part):
                    collection.storage.restore(index, *one)
        except OSError as error:
            raise HvdliteError(
                f"the checkpoint {begun.files[0]} cannot be read: {error}"
            ) from error
        collection.begin_at(begun.version(name), begun.clock(name))

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            self._save()

    def _save(self) -> None:
        """Write a checkpoint if something has changed; a failure does not end the service."""
        some = self._collections()
        versions = [one.version for one in some]
        if not some or versions == self._versions:
            return
        assert self._path is not None
        number = self.number + 1
        try:
            snapshots = [_snapshot(one) for one in some]
            where = (self._server, self._servers, self._generation, number)
            checkpoint.write(self._path, *where, snapshots)
        except (OSError, HvdliteError) as error:
            print(
                f"hvdlite: parameter server {self._server} cannot write its checkpoint "
                f"{self.file}: {error}; it goes on without",
                file=sys.stderr,
            )
            return
        self._versions, self.number = [one.version for one in snapshots], number


def _snapshot(collection: Collection) -> Snapshot:
    with collection.lock:
        slots = list(collection.storage.slots())
        version = collection.version
    return Snapshot(
        collection.name,
        version,
        collection.clocks.least,
        collection.specs,
        collection.parts,
        slots,
    )


def _begin_with(save: str | None, load: str | None) -> Checkpoint | None:
    path = save if load is None else load
    found = None if path is None else checkpoint.find(path)
    if load is not None and found is None:
        raise ArgumentError(
            f"there is no complete checkpoint {load!r}: one file of each server that wrote it, "
            f"such as {checkpoint.file_of(load, 0, 2)!r} and {checkpoint.file_of(load, 1, 2)!r}"
        )
    return found
