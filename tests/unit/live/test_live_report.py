"""The report of a job: what it says, that it is text, and what it survives."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.live import report
from hvdlite.live.report import Record, Report, check_path, page
from hvdlite.live.run import About, End, Run
from hvdlite.live.sample import Event, RankSteps, Sample, Stall, Steps
from live.made_up_run import make_run, make_sample
from patience import wait_until

HOSTILE = '<img src=x onerror="alert(1)"></td><script>$x$ \x1b[2J&lt; \u202e'
ABOUT = About(("python", "a/train.py", "--name", HOSTILE), 2, ("node0", "node1"), 1e9)
GOOD = End(0, "")


def make_record(run: Run, end: End | None = GOOD) -> Record:
    return Record.of(run, ABOUT, end, 81.0, 30.0)


VOID = ("meta", "img", "link")


class Reader(HTMLParser):
    """Reads a page as a browser does; knows its tags, its attributes and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.links += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and not {"style", "script"} & set(self.open):
            self.text += data + "\n"


def test_the_answer_stands_on_top_and_all_is_well_formed() -> None:
    reader = Reader(page(make_record(make_run())))
    assert reader.open == []
    for words in (
        "The job succeeded.",
        "steps\n300\n",
        "time of a step\n100 ms\n",
        "samples/s\n640\n",
        "ranks\n2\nhosts\n2\ntime\n0:00:30\n",
        "Rank 1 on node1 holds the others up: it is the last in 100 % of the steps, 20 ms late in",
        "late in data or forward; the others wait 20 % of the step.",
        "num_workers=",
        "means of the job",
        "straggler: 20 ms late in data or forward, 100 % of steps",
        "Steps a second",
    ):
        assert words in reader.text, words
    assert reader.text.index("holds the others up") < reader.text.index("Ranks")
    assert reader.tags.count("svg") == 2


@pytest.mark.parametrize("end", [GOOD, None])
def test_it_asks_for_nothing_and_its_only_script_is_that_of_a_running_job(end: End | None) -> None:
    reader = Reader(page(make_record(make_run(), end)))
    assert not {"img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert reader.tags.count("script") == reader.tags.count("noscript") == (end is None)
    assert not [name for name in reader.attributes if name.startswith("on")]
    assert all(link.startswith("data:") for link in reader.links)
    assert "@import" not in page(make_record(make_run()))


def test_hostile_names_stay_text() -> None:
    run = make_run(host=HOSTILE)
    run.note(Event(105.0, HOSTILE, 0, HOSTILE, HOSTILE))
    for end in (GOOD, End(9, HOSTILE), None):
        reader = Reader(page(make_record(run, end)))
        assert reader.open == []
        assert reader.tags.count("script") == (end is None)
        assert "img" not in reader.tags
        assert reader.text.count("onerror=") >= 5
        assert "<img src=x" in reader.text


@pytest.mark.parametrize("size", [1, 9, 80])
def test_any_number_of_ranks_is_drawn(size: int) -> None:
    record = make_record(make_run(3, size, late=0.0))
    text = page(record)
    assert text.count('<i class="between" style="width:') == size
    assert f"<td>{size - 1}</td>" in text


@pytest.mark.parametrize("seconds", [1, 2, 3])
def test_a_short_job_has_a_report(seconds: int) -> None:
    reader = Reader(page(make_record(make_run(seconds))))
    assert reader.open == []
    assert reader.tags.count("svg") == {1: 0, 2: 1, 3: 2}[seconds]


def test_the_curve_of_the_speed_falls_to_zero_where_there_was_no_step() -> None:
    run = make_run(5)
    for second in (6, 7, 70):  # The job may be stopped, too.
        for last in run.latest():
            run.add(dataclasses.replace(last, time=100.0 + second), 50.0 + second)
    speeds = [speed for _, speed in report.speeds(run.history())]
    assert speeds == pytest.approx([10] * 4 + [0] * 3)
    assert "<title>0 at 0:01:10</title>" in page(make_record(run, None))


def test_a_spike_is_cut_off_and_what_is_no_number_is_left_out() -> None:
    run = Run()
    for second in range(1, 302):
        loss = {102: 1000.0, 103: math.nan}.get(second, 3.0 - second / 150)
        sample = dataclasses.replace(make_sample(0, second, size=1), values={"loss": loss})
        run.add(sample, 50.0 + second)
    chart = page(make_record(run)).partition("Loss of rank 0")[2]
    assert "0.993 at 0:05:01; cut off: 1,000 at 0:01:42" in chart
    noise, smooth = (
        [float(point.partition(",")[2]) for point in points.split()]
        for points in re.findall(r'<polyline class="\w*" points="([^"]*)"', chart)
    )
    assert len(noise) == len(smooth) == 100, "one of three"
    assert noise[33] == 0 and smooth[33] > 40 > smooth[0] and smooth[-1] > 95


def test_a_running_job_has_the_figures_of_its_last_minute() -> None:
    run = make_run(100)
    stall = Stall("layer.weight", 12.0, (0,), (1,))
    for last in run.latest():
        run.add(dataclasses.replace(last, time=201.0, stalled=(stall,)), 151.0)
    record = Record.of(run, ABOUT, None, 151.0, 101.0)
    assert record.figures is not None
    assert record.figures.seconds == pytest.approx(60.0)
    text = Reader(page(record)).text
    assert "running, written " in text
    assert "means of the last 60 s" in text
    assert "steps\n1,000\n" in text
    assert "Rank 0 is in 'layer.weight'; rank 1 has not called it for 12 s" in text


def test_a_job_that_said_nothing_has_a_report() -> None:
    reader = Reader(page(make_record(Run(), End(1, "rank 1 (host h) failed first: status 1"))))
    assert "The job ended with status 1: rank 1 (host h) failed first: status 1\n" in reader.text
    assert "No rank has said anything" in reader.text


def test_a_report_of_an_elastic_job_has_the_last_epoch_and_all_events() -> None:
    run = make_run(10)
    run.note(Event(105.0, "worker", 1, "", "worker 1 died of SIGKILL"))
    run.note(Event(104.0, "world", -1, "", "world 0 begins"))
    for second in range(1, 11):
        row = RankSteps(0.5 * second, 0, 0, 0.5 * second, 0, 0, 0, 0)
        steps = Steps(10 * second, float(second), (row,))
        time = 110.0 + second
        run.add(Sample(0, 1, 1, "h", 7, time, 110.0, {}, steps=steps), 60.0 + second)
    record = make_record(run)
    assert [event.time for event in record.events] == [104.0, 105.0]
    text = Reader(page(record)).text
    assert "steps\n200\n" in text
    assert "ranks\n1\nhosts\n1\nworld\n1\ntime\n0:00:30\n" in text
    assert "All figures are those of world 1, the last one." in text
    assert text.index("worker 1 died") < text.index("world 0 begins"), "the newest is on top"


def test_the_warm_up_is_left_out_of_a_long_job() -> None:
    for seconds, shares in ((1, 0.0), (2, 0.5), (30, 29 / 30)):
        run = make_run(seconds)
        run.note(Event(100.5, "nonfinite", 1, "x", "x is not finite"))
        figures = make_record(run).figures
        assert figures is not None
        assert figures.steps == round(10 * seconds * (shares or 1))
        assert figures.total_steps == 10 * seconds
        assert len(figures.events) == 1


def test_a_rank_that_ended_early_is_silent_in_a_failed_job_only() -> None:
    run = make_run()
    for end, silent in ((GOOD, False), (End(1, "rank 1 failed first"), True)):
        record = Record.of(run, ABOUT, end, 90.0, 40.0)
        assert (record.findings[0].rule == "silent") == silent


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    run = Run()
    values = {"loss": math.nan, "norm": math.inf}
    run.add(Sample(0, 1, 0, "h", 7, 101.0, 100.0, {}, values=values), 1.0)
    record = Record.of(run, ABOUT, End(1, "died"), 2.0, 2.0)
    fields = json.loads(record.to_json(), parse_constant=pytest.fail)
    assert fields["figures"]["ranks"][0]["values"] == {"loss": None, "norm": None}
    assert "nan" in page(record)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    for name, reason in (
        ("out.json", "the name has to end with .html"),
        ("folder.html", "this is a folder"),
        ("missing/out.html", "no file can be written there: No such file or directory"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(reason)):
            check_path(tmp_path / name)
    check_path(tmp_path / "out.html")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def show(path: Path, run: Run) -> list[str]:
    said: list[str] = []
    report = Report(path, said.append)
    report.start(run, ABOUT)
    report.stop(GOOD)
    return said


def test_it_is_written_anew_while_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_PERIOD", 0.01)
    path = tmp_path / "out.html"
    path.write_text("of another job")
    run = make_run(20)
    writer = Report(path, print)
    writer.start(run, ABOUT)
    wait_until(lambda: "running, written" in path.read_text(), "the first state")
    run.note(Event(105.0, "tuned", -1, "", "all ranks use 64 MiB"))
    for _ in range(1000):  # A reader finds it whole at any time.
        text = path.read_text()
        assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n")
    wait_until(lambda: "all ranks use 64 MiB" in path.read_text(), "another state")
    assert not (tmp_path / "out.json").exists()
    writer.stop(GOOD)
    assert "The job succeeded." in path.read_text()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.html", "out.json"]


def test_a_folder_that_goes_and_comes_back_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_PERIOD", 0.01)
    folder, said = tmp_path / "folder", []
    folder.mkdir()
    writer = Report(folder / "out.html", said.append)
    writer.start(make_run(3), ABOUT)
    wait_until(lambda: (folder / "out.html").exists(), "the first state")
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    wait_until(lambda: said, "the line about it")
    folder.mkdir()
    wait_until(lambda: (folder / "out.html").exists(), "a state in the new folder")
    writer.stop(GOOD)
    gone, ended = said
    assert gone == f"there is no report in {folder}/out.html: No such file or directory"
    assert ended.startswith(f"report in {folder}/out.html")


def test_a_full_disk_is_one_line_and_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.html"
    path.write_text("old")

    def fill(part: Path, data: bytes) -> int:
        with part.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    (line,) = show(path, make_run(3))
    assert line == f"there is no report in {path}: No space left on device"
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["out.html"]


def test_an_error_of_its_own_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise ZeroDivisionError("a chart")

    monkeypatch.setattr(report, "speeds", fail)
    (line,) = show(tmp_path / "out.html", make_run(3))
    assert line == f"there is no report in {tmp_path}/out.html: ZeroDivisionError('a chart')"
