"""The page of a job over HTTP: who may look, what is answered, and that nobody holds up the job."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from hvdlite.live.run import Run
from hvdlite.live.sample import Event, Stall
from hvdlite.live.viewer import End
from live.made_up_run import BEGAN, MadeUpJob
from patience import HANG, Stopwatch, wait_until

Serve = Callable[[Run], Any]
PATHS = ("/", "/live.js", "/live.css", "/state.json", "/metrics", "/events")


def read_state(served: Any) -> dict[str, Any]:
    return json.loads(served.ask("/state.json").body)


def test_the_state_has_what_the_screen_has(serve: Serve) -> None:
    job = MadeUpJob(3, seconds=30, hosts=("node1", "node1", "node2"))
    event = Event(BEGAN + 20, "stall", 2, "layer.weight", "layer.weight waits for rank 2")
    job.say((event,), (Stall("layer.weight", 12.0, (0, 1), (2,)),))
    told = read_state(serve(job.run))
    assert told["outcome"] is None
    figures = job.run.figures(10.0, time.monotonic())
    assert figures is not None
    assert told["job"]["steps"] == figures.total_steps
    assert told["job"]["step"] == pytest.approx(figures.step, rel=1e-3)
    assert told["job"]["samples"] == pytest.approx(figures.samples, rel=1e-3)
    assert told["job"]["values"]["loss"] == pytest.approx(figures.ranks[0].values["loss"], abs=1e-6)
    assert [rank["host"] for rank in told["ranks"]] == ["node1", "node1", "node2"]
    for rank, expected in zip(told["ranks"], figures.ranks, strict=True):
        for name in ("backward", "waiting", "communicating", "between", "cpu"):
            assert rank[name] == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-6)
    assert told["events"] == [{**vars(event), "time": 20.0}]
    assert told["stalled"] == [
        {"name": "layer.weight", "seconds": 12.0, "submitted": [0, 1], "missing": [2]}
    ]
    curves = told["curves"]
    assert len(curves["time"]) == 30
    for step, *phases in zip(curves["step"], *curves["phases"].values(), strict=True):
        assert sum(phases) == pytest.approx(step, rel=1e-3)
    assert all(one > 0 for one in curves["samples"] + curves["bytes"])


def test_time_goes_on_in_the_next_epoch(serve: Serve) -> None:
    job = MadeUpJob(2, seconds=20)
    job.next_epoch(3)
    for _ in range(3):
        job.say((Event(BEGAN + job.second, "epoch", -1, "", "the world begins anew"),))
    told = read_state(serve(job.run))
    assert (told["job"]["epoch"], told["job"]["size"], told["job"]["age"]) == (1, 3, 23.0)
    assert told["curves"]["time"] == [22.0, 23.0]
    assert [event["time"] for event in told["events"]] == [22.0, 21.0, 20.0]


def test_a_run_without_lines_has_a_state(serve: Serve) -> None:
    told = read_state(serve(Run()))
    assert (told["job"], told["ranks"], told["events"]) == (None, [], [])


def test_a_process_that_says_nothing_of_itself_is_unknown(serve: Serve) -> None:
    job = MadeUpJob(1, seconds=3)
    sample = job.run.latest()[0]
    other = {"rank": 1, "threads": 0, "cpu": 0.0, "rss": 0, "steps": None}
    job.run.add(type(sample)(**{**vars(sample), **other}), time.monotonic())
    ranks = read_state(serve(job.run))["ranks"]
    assert [(rank["cpu"] is None, rank["rss"] is None) for rank in ranks] == [
        (False, False),
        (True, True),
    ]


def test_a_loss_that_is_not_a_number_is_told_as_text(serve: Serve) -> None:
    job = MadeUpJob(1, seconds=3)
    sample = job.run.latest()[0]
    values = {"loss": float("nan"), "norm": float("inf")}
    job.run.add(type(sample)(**{**vars(sample), "values": values}), time.monotonic())
    assert read_state(serve(job.run))["job"]["values"] == {"loss": "nan", "norm": "inf"}


def test_without_the_token_there_is_nothing_to_see(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    token = served.listener.token
    without: tuple[dict[str, str], ...] = (
        {"Accept": "*/*"},
        {"Authorization": "Bearer " + "x" * len(token)},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"Basic {token}"},
        {"Cookie": f"hvdlite-live-{served.listener.port}=wrong"},
        {"Cookie": f"hvdlite-live-1={token}"},
        {"Authorization": "Bearer \u00fc\u00ff"},
    )
    for path, headers in product(PATHS, without):
        answer = served.ask(path, **headers)
        assert answer.status == 401
        assert answer.body.startswith(b"This page needs the token")
        assert token.encode() not in answer.body


def test_the_token_becomes_a_cookie_and_leaves_the_address(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    token = served.listener.token
    answer = served.ask(f"/?token={token}", Accept="*/*")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert re.fullmatch(r"hvdlite-live-\d+=[^;]+; HttpOnly; Path=/; SameSite=strict", cookie)
    assert served.ask("/", Cookie=cookie.partition(";")[0]).status == 200
    assert served.ask(f"/?token={token[:-1]}", Accept="*/*").status == 401
    assert served.ask("/?token=%FF%00", Accept="*/*").status == 401
    assert served.ask(f"/state.json?token={token}", Accept="*/*").status == 401


def test_the_host_header_has_to_name_this_host(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    port, bearer = served.listener.port, f"Bearer {served.listener.token}"
    ours = (
        f"127.0.0.1:{port}",
        "localhost:8000",  # as `ssh -L 8000:...` makes it
        "[::1]:8000",
        "LOCALHOST",
        socket.gethostname(),
    )
    foreign = (
        "evil.example",
        f"127.0.0.1.evil.example:{port}",
        f"127.0.0.2:{port}",
        f"localhost:{port}@evil.example",
        "",
    )
    for host in (*ours, *foreign):
        status = served.ask("/state.json", Host=host, Authorization=bearer).status
        assert (host, status) == (host, 200 if host in ours else 400)


def test_every_answer_forbids_what_the_page_does_not_need(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    requests: tuple[dict[str, str], ...] = ({}, {"Accept": "*/*"}, {"Host": "evil.example"})
    for path, headers in product((*PATHS[:-1], "/nothing"), requests):
        answer = served.ask(path, **headers)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "Server" not in answer.headers


def test_nothing_can_be_changed(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    for path, method in product(PATHS, ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")):
        assert served.ask(path, method).status == 405


def open_stream(served: Any, receive_buffer: int | None = None) -> socket.socket:
    stream = socket.socket()
    if receive_buffer is not None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    stream.settimeout(HANG)
    stream.connect(("127.0.0.1", served.listener.port))
    stream.sendall(
        f"GET /events HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {served.listener.token}\r\n\r\n".encode()
    )
    return stream


def read_states(stream: socket.socket, count: int) -> bytes:
    """Read until this many states have come whole."""
    content = b""
    while content.count(b"data: ") < count or not content.endswith(b"\n\n\r\n"):
        piece = stream.recv(1 << 16)
        assert piece, "the stream has ended"
        content += piece
    return content


def read_to_the_end(stream: socket.socket) -> bytes:
    content = b""
    while piece := stream.recv(1 << 16):
        content += piece
        if b"0\r\n\r\n" in content[-7:]:
            break
    return content


def states(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: ")]


def test_a_stream_gives_the_state_each_second_and_the_end(serve: Serve) -> None:
    job = MadeUpJob(2, seconds=5)
    served = serve(job.run)
    with open_stream(served) as stream:
        watch = Stopwatch()
        content = read_states(stream, 2)
        assert watch.seconds() <= 2.5
        watch = Stopwatch()
        served.page.stop(End(1, "rank 1 exited with status 3"))
        assert watch.seconds() < 5.0
        told = states(content + read_to_the_end(stream))
    assert len(told) >= 3
    assert [one["outcome"] for one in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["outcome"] == "rank 1 exited with status 3"
    assert told[-1]["ranks"], "the last state stays"
    with pytest.raises(ConnectionRefusedError):
        served.ask("/")


def test_a_hundred_pages_see_the_end_and_the_job_does_not_wait(serve: Serve) -> None:
    job = MadeUpJob(4, seconds=60)
    served = serve(job.run)
    streams = [open_stream(served) for _ in range(100)]
    try:
        # The server has begun with each of them, however busy the machine is.
        began = [read_states(stream, 1) for stream in streams]
        slowest = 0.0
        for _ in range(200):
            watch = Stopwatch()
            job.say()
            slowest = max(slowest, watch.seconds())
            time.sleep(0.01)
        assert slowest < 5.0  # seconds; a line takes some tens of microseconds
        served.page.stop(End(0, ""))
        for stream, first in zip(streams, began, strict=True):
            told = states(first + read_to_the_end(stream))
            assert told[0]["outcome"] is None
            assert told[-1]["outcome"] == "all ranks have done their work"
    finally:
        for stream in streams:
            stream.close()


def test_there_are_no_more_streams_than_a_limit(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    monkeypatch.setattr("hvdlite.live.page.MOST_STREAMS", 2)
    streams = [open_stream(served) for _ in range(2)]
    for stream in streams:
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
    answer = served.ask("/events")
    assert (answer.status, answer.body) == (503, b"2 pages are open already.\n")
    assert served.ask("/").status == 200
    streams[0].close()
    wait_until(lambda: served.ask("/events").status != 503, "the server to see that it is closed")
    streams[1].close()


def test_there_are_no_more_connections_than_a_limit(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    monkeypatch.setattr("hvdlite.live.connections.MOST", 4)
    idle = [socket.create_connection(("127.0.0.1", served.listener.port)) for _ in range(4)]
    with pytest.raises(OSError):
        served.ask("/")
    for one in idle:
        one.close()

    def answers() -> bool:
        try:
            return bool(served.ask("/").status == 200)
        except OSError:
            return False

    wait_until(answers, "the server to see that the other connections are closed")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.live.connections.PATIENCE", 0.5)
    monkeypatch.setattr("hvdlite.live.page._PERIOD", 0.002)


@pytest.mark.usefixtures("impatient")
def test_a_browser_that_does_not_read_is_dropped(serve: Serve) -> None:
    job = MadeUpJob(16, seconds=120)
    served = serve(job.run)
    with open_stream(served, receive_buffer=4096) as slow, open_stream(served) as reader:
        received = 0
        deadline = time.monotonic() + HANG
        while served.page._streams == 2 or received < 1 << 20:
            received += len(reader.recv(1 << 16))
            assert time.monotonic() < deadline, served.page._streams
        assert served.page._streams == 1
        with pytest.raises(ConnectionError):
            while slow.recv(1 << 16):
                pass
            raise ConnectionError  # It ended in the middle of an answer.


@pytest.mark.usefixtures("impatient")
def test_a_connection_without_a_request_is_dropped(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    with socket.create_connection(("127.0.0.1", served.listener.port), timeout=HANG) as mute:
        mute.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        with pytest.raises(ConnectionResetError):
            assert mute.recv(100) == b""
            raise ConnectionResetError


def test_stopping_does_not_wait_for_a_browser_that_does_not_read(serve: Serve) -> None:
    served = serve(MadeUpJob(16, seconds=120).run)
    with open_stream(served, receive_buffer=4096):
        wait_until(lambda: served.page._streams == 1, "the stream to begin")
        time.sleep(0.1)  # The server sends more than the browser has read.
        watch = Stopwatch()
        served.page.stop(End(0, ""))
        assert watch.seconds() < 5.0
        served.page._thread.join(HANG)  # On a busy machine it may have its last turn a bit later.
        assert watch.seconds() < 5.0
        assert not [one for one in threading.enumerate() if one.name == "hvdlite-page"]


def test_what_fails_while_serving_is_one_line(serve: Serve) -> None:
    served = serve(MadeUpJob(1, seconds=3).run)
    served.run.figures = lambda *_: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    assert served.ask("/state.json").status == 500
    assert served.ask("/metrics").status == 500
    assert served.ask("/live.js").status == 200
    assert len([line for line in served.said if "ZeroDivisionError" in line]) == 1
