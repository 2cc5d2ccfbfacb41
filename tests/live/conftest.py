"""A page over a made-up run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage
from typing import Any

import pytest

from hvdlite.live.listener import Listener, open_listener
from hvdlite.live.run import Run
from hvdlite.live.viewer import About, End
from patience import HANG

MISSING = "starlette, uvicorn or prometheus_client is missing: pip install 'hvdlite[live]'"


@dataclass(frozen=True)
class Answer:
    """An answer; of one without an end, only the beginning."""

    status: int
    headers: HTTPMessage
    body: bytes


@dataclass
class Served:
    """A page that is served, and a client that has its token."""

    page: Any
    run: Run
    listener: Listener
    said: list[str]

    @property
    def url(self) -> str:
        """The address with the token."""
        return f"{self.listener.address}?token={self.listener.token}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send a request, with the token unless it has headers of its own; return the answer."""
        given = headers or {"Authorization": f"Bearer {self.listener.token}"}
        with closing(HTTPConnection("127.0.0.1", self.listener.port, timeout=HANG)) as connection:
            connection.request(method, path, headers=given)
            answer = connection.getresponse()
            ends = answer.headers["Content-Length"] is not None
            return Answer(answer.status, answer.headers, answer.read() if ends else b"")


@pytest.fixture
def serve() -> Iterator[Callable[[Run], Served]]:
    """A function that serves a run; what it has begun ends with the test."""
    page_module = pytest.importorskip("hvdlite.live.page", reason=MISSING, exc_type=ImportError)
    served: list[Served] = []

    def begin(run: Run, **arguments: Any) -> Served:
        listener = open_listener(**arguments)
        said: list[str] = []
        page = page_module.Page(listener, said.append)
        page.start(run, About(("python", "train.py"), 2, ("node1",), 0.0))
        served.append(Served(page, run, listener, said))
        return served[-1]

    yield begin
    for one in served:
        one.page.stop(End(0, ""))
        one.page._thread.join(HANG)  # On a busy machine it may have its last turn a bit later.
        assert not [t for t in threading.enumerate() if t is one.page._thread], "it still serves"
