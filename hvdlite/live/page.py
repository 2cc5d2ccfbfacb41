"""The page of a running job: a small web server in a thread, which nobody can steer the job by.

It serves the page, its script and its style; the state of the job once a second as server-sent
events, or when asked for as JSON; and metrics. Viewers are bounded and dropped when they are slow:
the threads that feed the `Run` never wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn import Config, Server

from hvdlite.live.authentication import Authentication
from hvdlite.live.connections import Connection
from hvdlite.live.listener import Listener
from hvdlite.live.metrics import exposition
from hvdlite.live.run import Run
from hvdlite.live.state import state
from hvdlite.live.viewer import About, End

MOST_STREAMS = 128  # So many pages may be open.
_PERIOD = 1.0  # seconds between two states
_RETRY = 2.0  # seconds until a browser that has lost the connection tries again
_GRACE = 1  # seconds that answers get to end
_STATIC = {
    "/": ("page.html", "text/html"),
    "/live.js": ("live.js", "text/javascript"),
    "/live.css": ("live.css", "text/css"),
}


class Page:
    """A page over a run; a `Viewer`."""

    def __init__(self, listener: Listener, say: Callable[[str], None]) -> None:
        """Make a page that is not served yet; it closes the socket of its listener."""
        self._run = Run()
        self._program = ""
        self._listener = listener
        self._say = say
        self._outcome: str | None = None
        self._failed = False
        self._streams = 0
        self._made = (-_PERIOD, b"")  # All pages share this state, made at this time.
        self._is_last = False  # whether that is the state at the end of the job
        self._ended = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._server = Server(
            Config(
                Authentication(_routes(self), listener),
                http=Connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="hvdlite-page", daemon=True)

    def start(self, run: Run, about: About) -> None:
        """Begin to serve, and print the address."""
        self._run = run
        self._program = about.program
        self._thread.start()
        for line in self._listener.lines():
            self._say(line)

    def stop(self, end: End) -> None:
        """Tell all pages how the job has ended, and stop serving within a moment."""
        self._outcome = in_words(end)
        with contextlib.suppress(RuntimeError):  # The loop is closed: serving has failed before.
            self._loop.call_soon_threadsafe(self._ended.set)
        self._server.should_exit = True
        self._thread.join(2 * _GRACE)

    def _serve(self) -> None:
        # Signals are for the main thread. This also turns SIGPIPE into an error.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve([self._listener.socket]))
        except Exception as error:
            self._report(error)
        finally:
            self._listener.socket.close()
            self._loop.close()

    def _report(self, error: Exception) -> None:
        """Print the first error; the others have the same cause, most likely."""
        if not self._failed:
            self._failed = True
            self._say(f"the live page has failed, and the job goes on: {error!r}")

    async def send_error(self, request: Request, error: Exception) -> Response:
        """Answer that the page has failed."""
        self._report(error)
        return PlainTextResponse("The live page has failed; the job goes on.\n", 500)

    async def send_static(self, name: str, kind: str, request: Request) -> Response:
        """Answer with a file of the package."""
        return Response((files("hvdlite.live") / "static" / name).read_bytes(), media_type=kind)

    async def send_state(self, request: Request) -> Response:
        """Answer with the state."""
        return Response(self._state(), media_type="application/json")

    async def send_metrics(self, request: Request) -> Response:
        """Answer with the metrics."""
        accept = request.headers.get("accept", "")
        content, kind = exposition(self._run, time.monotonic(), accept)
        return Response(content, headers={"Content-Type": kind})

    async def send_events(self, request: Request) -> Response:
        """Answer with the state, again and again."""
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse(f"{MOST_STREAMS} pages are open already.\n", 503)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            yield f"retry: {1000 * _RETRY:.0f}\n\n".encode()
            while True:
                ended = self._ended.is_set()
                yield b"data: " + self._state() + b"\n\n"
                if ended:
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _PERIOD)
        except Exception as error:
            self._report(error)
        finally:
            self._streams -= 1

    def _state(self) -> bytes:
        now, ended = time.monotonic(), self._ended.is_set()
        if not self._is_last and (ended or now - self._made[0] >= 0.9 * _PERIOD):
            outcome = self._outcome if ended else None
            self._made = (now, state(self._run, now, self._program, outcome))
            self._is_last = ended
        return self._made[1]


def in_words(end: End) -> str:
    """Say how a job has ended."""
    if end.status == 0 and not end.why:
        return "all ranks have done their work"
    return end.why or f"exit status {end.status}"


def _routes(page: Page) -> Starlette:
    static = [
        Route(path, partial(page.send_static, name, kind)) for path, (name, kind) in _STATIC.items()
    ]
    return Starlette(
        routes=[
            *static,
            Route("/events", page.send_events),
            Route("/state.json", page.send_state),
            Route("/metrics", page.send_metrics),
        ],
        exception_handlers={Exception: page.send_error},
    )
