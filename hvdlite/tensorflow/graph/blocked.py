"""A thread that looks whether all of this process waits: csrc/python/native_waits.h."""

from __future__ import annotations

import threading

from hvdlite import _core


class Watch:
    """Looks at one engine's waits until it is told of another one."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def look_at(self, engine: _core.Engine | None) -> None:
        """Let go of the engine, and look at this one, if there is one."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
        if engine is not None:
            self._stopped = threading.Event()
            self._thread = threading.Thread(
                target=self._run,
                args=(_core.NativeWaits(engine), self._stopped),
                name="hvdlite-waits",
                daemon=True,
            )
            self._thread.start()

    @staticmethod
    def _run(waits: _core.NativeWaits, stopped: threading.Event) -> None:
        while (pause := waits.look()) is not None:
            if stopped.wait(pause):
                return
