"""The launcher's side of a view: lines of the ranks, and viewers that may fail."""

from __future__ import annotations

import time

from hvdlite.launch.console import Console
from hvdlite.launch.output import View
from hvdlite.live.run import About, End, Run
from hvdlite.live.sample import RankSteps, Sample, Steps

ABOUT = About(("train.py",), 2, ("here",), 0.0)


class Said(Console):
    """A console that keeps what the launcher says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Kept:
    """A viewer that keeps what it is given, and may fail."""

    def __init__(self, fails_in: str = "") -> None:
        self.run: Run | None = None
        self.about: About | None = None
        self.end: End | None = None
        self._fails_in = fails_in

    def start(self, run: Run, about: About) -> None:
        if self._fails_in == "start":
            raise RuntimeError("no start")
        self.run, self.about = run, about

    def stop(self, end: End) -> None:
        self.end = end
        if self._fails_in == "stop":
            raise RuntimeError("no stop")


def sample(rank: int = 0, **more: object) -> Sample:
    steps = Steps(3, 0.3, (RankSteps(0, 0, 0, 0, 0, 0, 0, 0),) * 2)
    return Sample(rank, 2, 0, "h", 1, 5.0, 1.0, {}, steps=steps, **more)  # type: ignore[arg-type]


def test_what_is_not_a_sample_is_counted() -> None:
    with Said() as console:
        view = View([], console)
        view.took(0, sample().line()[:30])
        view.took(1, b"nonsense\n" + sample(1).line())
        view.took(0, sample().line()[30:])
        for _ in range(100):
            view.took(7, b"x" * 100_000)
        view.closed(7)
        assert [one.rank for one in view.run.latest()] == [0, 1]
        assert view.run.lost == 1  # the nonsense; the endless line does not end
        assert console.lines == []


def test_event_of_the_launcher_has_the_time_of_the_samples() -> None:
    with Said() as console:
        view = View([], console)
        begun = time.monotonic()
        view.took(0, sample().line())
        view.note("worker 3 died")
        took = time.monotonic() - begun
        (event,) = view.run.events()
    assert event.text == "worker 3 died"
    assert 5.0 - 1e-6 <= event.time <= 5.0 + took + 1e-6


def test_viewer_that_fails_is_one_line_and_the_others_go_on() -> None:
    well, starts, stops = Kept(), Kept("start"), Kept("stop")

    def cannot_be_made(console: Console) -> Kept:
        raise OSError("no port")

    with Said() as console:
        makers = [cannot_be_made, *(lambda _, one=one: one for one in (starts, stops, well))]
        view = View(makers, console)
        view.start(ABOUT)
        view.stop(End(3, "rank 1 failed first"))
        view.stop(End(0, ""))
        assert console.lines == [
            "no live view: OSError: no port",
            "no live view: RuntimeError: no start",
            "no live view: RuntimeError: no stop",
        ]
    assert well.run is view.run and well.about is ABOUT
    assert well.end == stops.end == End(3, "rank 1 failed first")
    assert starts.end is None
