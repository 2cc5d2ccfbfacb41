"""The report of a job that has ended: what it says, that it is text, and what it survives."""

from __future__ import annotations

import errno
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.live import charts
from hvdlite.live.record import Record, read_baseline
from hvdlite.live.report import Report, check_path, page, write
from hvdlite.live.run import Run
from hvdlite.live.sample import Event, RankSteps, Sample, Steps
from hvdlite.live.viewer import About, End

HOSTILE = '<img src=x onerror="alert(1)"></td><script>$x$ \x1b[2J&lt; \u202e'
ABOUT = About(("python", "a/train.py", "--name", HOSTILE), 2, ("node0", "node1"), 1e9)
GOOD = End(0, "")


def make_run(seconds: int = 30, size: int = 2, host: str = "node", late: float = 0.02) -> Run:
    """Ranks that do ten steps a second, of which the last rank is late in data or forward."""
    run = Run()
    for second in range(1, seconds + 1):
        count = 10 * second
        early = RankSteps(*(x * count for x in (0.04, late, 0.01, 0.05 - late)), 0, 0, 0)
        last = RankSteps(*(x * count for x in (0.04, 0, 0.01, 0.05)), count, late * count, 0)
        for rank in range(size):
            steps = Steps(count, 0.1 * count, (*[early] * (size - 1), last))
            sample = Sample(
                rank=rank,
                size=size,
                epoch=0,
                host=f"{host}{rank}",
                pid=7,
                time=100.0 + second,
                began=100.0,
                counters={"bytes": 4_000_000 * count},
                cpu=0.9 * second,
                rss=1 << 30,
                cores=4,
                samples=32 * count,
                values={"loss": 1 / second},
                steps=steps if rank == 0 else None,
            )
            run.add(sample, 50.0 + second)
    return run


def make_record(run: Run, end: End = GOOD) -> Record:
    return Record.of(run, ABOUT, end, 81.0, 30.0, None)


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
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "img"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + "\n"


def test_the_answer_stands_on_top_and_all_is_well_formed() -> None:
    reader = Reader(page(make_record(make_run())))
    assert reader.open == []
    for words in (
        "The job succeeded: 2 ranks on 2 hosts, 0:00:30, 300 steps, 100 ms each, 640 samples/s",
        "Rank 1 on node1 holds the others up: it is the last in 100 % of the steps, 20 ms late in",
        "late in data or forward; the others wait 20 % of the step.",
        "num_workers=",
        "a step of each rank, ms",
        "node1  rank 1",
        "samples/s of all ranks",
    ):
        assert words in reader.text, words
    assert reader.text.index("holds the others up") < reader.text.index("Ranks")
    assert reader.tags.count("svg") == 1


def test_it_has_no_script_and_asks_for_nothing() -> None:
    reader = Reader(page(make_record(make_run())))
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert not [name for name in reader.attributes if name.startswith("on")]
    assert all(link.startswith("#") for link in reader.links)
    assert "@import" not in page(make_record(make_run()))


def test_hostile_names_stay_text() -> None:
    run = make_run(host=HOSTILE)
    run.note(Event(105.0, HOSTILE, 0, HOSTILE, HOSTILE))
    for end in (GOOD, End(9, HOSTILE)):
        reader = Reader(page(make_record(run, end)))
        assert reader.open == []
        assert not {"script", "img"} & set(reader.tags)
        assert reader.text.count("onerror=") >= 5
        assert "<img src=x" in reader.text


@pytest.mark.parametrize("size", [1, 9, 80])
def test_any_number_of_ranks_is_drawn(size: int) -> None:
    record = make_record(make_run(3, size, late=0.0))
    text = page(record)
    assert "There are no charts" not in text
    assert len(charts.chosen(record)) == min(size, charts.MOST_RANKS)
    assert ("32 ranks that were the last" in text) == (size > 32)
    assert f"<td>{size - 1}</td>" in text


def test_the_late_rank_is_among_those_that_are_drawn() -> None:
    assert charts.chosen(make_record(make_run(3, 80)))[-1].rank == 79


def test_a_phase_has_the_colour_that_it_has_on_the_page() -> None:
    style = (Path(charts.__file__).parent / "static" / "live.css").read_text(encoding="utf-8")
    light = style[: style.index("@media")]
    assert dict(re.findall(rf"--({'|'.join(charts.PHASES)}): (#\w+);", light)) == charts.PHASES


@pytest.mark.parametrize("seconds", [1, 2])
def test_a_short_job_has_a_report(seconds: int) -> None:
    assert "There are no charts" not in page(make_record(make_run(seconds)))


def test_a_job_that_said_nothing_has_a_report() -> None:
    reader = Reader(page(make_record(Run(), End(1, "rank 1 (host h) failed first: status 1"))))
    assert "The job ended with status 1: rank 1 (host h) failed first: status 1 (2 ranks" in (
        reader.text
    )
    assert "No rank has said anything" in reader.text


def test_a_report_of_an_elastic_job_has_the_last_epoch_and_all_events() -> None:
    run = make_run(10)
    run.note(Event(105.0, "worker", 1, "", "worker 1 died of SIGKILL"))
    run.note(Event(104.0, "epoch", -1, "", "epoch 0 begins"))
    for second in range(1, 11):
        row = RankSteps(0.5 * second, 0, 0, 0.5 * second, 0, 0, 0)
        steps = Steps(10 * second, float(second), (row,))
        time = 110.0 + second
        run.add(Sample(0, 1, 1, "h", 7, time, 110.0, {}, steps=steps), 60.0 + second)
    record = make_record(run)
    assert [event.time for event in record.events] == [104.0, 105.0]
    text = Reader(page(record)).text
    assert "1 rank on 1 host, 0:00:30, 200 steps" in text
    assert "All figures are those of epoch 1, the last one." in text
    assert text.index("epoch 0 begins") < text.index("worker 1 died")


def test_a_job_without_samples_has_steps_per_second() -> None:
    run = Run()
    for second in (1, 2, 3):
        row = RankSteps(0.5 * second, 0, 0, 0.5 * second, 0, 0, 0)
        steps = Steps(10 * second, float(second), (row,))
        run.add(Sample(0, 1, 0, "h", 7, 100.0 + second, 100.0, {}, steps=steps), second)
    text = Reader(page(make_record(run))).text
    assert "steps/s" in text
    assert "samples/s of all ranks" not in text


def test_the_charts_failing_leaves_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Record) -> str:
        raise RuntimeError("<no font>")

    monkeypatch.setattr(charts, "draw", fail)
    text = page(make_record(make_run()))
    assert "There are no charts: RuntimeError: &lt;no font&gt;" in text
    assert "holds the others up" in text


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
        record = Record.of(run, ABOUT, end, 90.0, 40.0, None)
        assert (record.findings[0].rule == "silent") == silent


def test_the_json_file_is_a_baseline(tmp_path: Path) -> None:
    run = make_run()
    run.note(Event(101.0, "nonfinite", 1, "x", "x is not finite"))
    record = make_record(run)
    write(record, tmp_path / "out.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]
    figures = read_baseline(tmp_path / "out.json")
    assert record.figures is not None
    assert figures.step == record.figures.step
    assert figures.samples_per_step == record.figures.samples_per_step == 64
    again = Record.of(make_run(), ABOUT, GOOD, 81.0, 30.0, figures)
    assert again.findings[0].says == "2 ranks do 1.00 x the samples of 2"


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    run = Run()
    values = {"loss": math.nan, "norm": math.inf}
    run.add(Sample(0, 1, 0, "h", 7, 101.0, 100.0, {}, values=values), 1.0)
    record = Record.of(run, ABOUT, End(1, "died"), 2.0, 2.0, None)
    fields = json.loads(record.to_json(), parse_constant=pytest.fail)
    assert fields["figures"]["ranks"][0]["values"] == {"loss": None, "norm": None}
    assert "nan" in page(record)


def test_a_baseline_of_0_1_0_can_be_read(tmp_path: Path) -> None:
    """It does not tell how long threads waited for a core."""
    fields = json.loads(make_record(make_run(20)).to_json())
    for rank in fields["figures"]["ranks"]:
        del rank["core_wait"]
    (tmp_path / "one.json").write_text(json.dumps(fields))
    assert [rank.core_wait for rank in read_baseline(tmp_path / "one.json").ranks] == [0.0, 0.0]


def damaged(change: dict[str, object]) -> str:
    fields = json.loads(make_record(make_run()).to_json())
    fields["figures"] |= change
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "this is not the JSON file"),
        ("[1]", "this is not the JSON file"),
        ('{"version": 1}', "this is not the JSON file"),
        ("\xff\xfe", "this is not the JSON file"),
        ('{"hvdlite_report": 99}', "another version of hvdlite wrote this file"),
        ('{"hvdlite_report": 1}', "this file is damaged"),
        ('{"hvdlite_report": 1, "figures": null}', "that job has too few steps"),
        (damaged({"step": "fast"}), "this file is damaged"),
        (damaged({"step": None}), "this file is damaged"),
        (damaged({"ranks": [{}]}), "this file is damaged"),
        (damaged({"steps": 4}), "that job has too few steps"),
    ],
)
def test_what_is_not_a_baseline_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ArgumentError, match=rf"--baseline .*one\.json: {reason}"):
        read_baseline(path)


def test_a_missing_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        read_baseline(tmp_path / "one.json")


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
    report = Report(path, None, said.append)
    report.start(run, ABOUT)
    report.stop(GOOD)
    return said


def test_the_end_of_a_job_says_the_first_finding(tmp_path: Path) -> None:
    (line,) = show(tmp_path / "out.html", make_run())
    assert line.startswith(f"report in {tmp_path}/out.html: rank 1 on node1 holds the others up")
    (line,) = show(tmp_path / "none.html", Run())
    assert line == f"report in {tmp_path}/none.html"


def test_a_folder_that_has_gone_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    (line,) = show(folder / "out.html", make_run(3))
    assert line == f"there is no report in {folder}/out.html: No such file or directory"


def test_a_full_disk_is_one_line_and_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.html"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hvdlite.live.report.os.fsync", full)
    (line,) = show(path, make_run(3))
    assert line == f"there is no report in {path}: No space left on device"
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["out.html"]
