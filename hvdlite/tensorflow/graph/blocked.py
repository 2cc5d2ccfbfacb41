"""A thread that looks whether all of this process waits: csrc/python/native_waits.h."""

from __future__ import annotations

import threading

from hvdlite import _core


class Watch:
    """Looks at one engine's waits until it is stopped."""

    def __init__(self, engine: _core.Engine) -> None:
        self._waits = _core.NativeWaits(engine)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-waits", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more, and let go of the engine."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while (pause := self._waits.look()) is not None:
            if self._stopped.wait(pause):
                return
