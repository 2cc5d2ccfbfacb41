"""Timelines of whole worlds: the contents of the file, for every way to start and to end it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from harness import run_world
from hvdlite import _core, basics
from hvdlite.errors import ArgumentError, RankFailedError
from launcher import run_launcher
from patience import wait_until
from trace_rows import Merged, Span, read_merged

PRELOAD = ("numpy",)

PHASES = ["queue", "negotiate", "wait for batch", "allreduce"]
STEPS = 4
NAMES = [f"layer{i}.weight" for i in range(5)]


def start(name: str, count: int = 256) -> _core.Handle:
    """Submit an allreduce of `count` floats."""
    memory = (ctypes.c_float * count)(1.0)
    address = ctypes.addressof(memory)
    tensor = _core.Tensor(name, _core.DTYPES["float32"], [count], address, address)
    return basics.engine().allreduce(name, [tensor], _core.REDUCE_OPS["sum"], keep=memory)


def start_and_send(name: str) -> _core.Handle:
    """Submit an allreduce of a new name, and wait until the engine has sent the request."""
    counters = basics.engine().counters
    sent = counters()["full_requests"]
    handle = start(name)
    wait_until(lambda: counters()["full_requests"] > sent, f"the request of {name}")
    return handle


def step(names: list[str] = NAMES, count: int = 256) -> None:
    """Do the work of a training step: submit all, then wait for all."""
    for handle in [start(name, count) for name in names]:
        handle.wait()


def train(steps: int = STEPS, count: int = 256) -> None:
    basics.init()
    for _ in range(steps):
        step(count=count)
    basics.shutdown()


def names_of(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def check_tensors(merged: Merged, ranks: int, names: list[str], steps: int) -> None:
    """Every tensor of every step is in the file on every rank, with all its phases in a row."""
    for rank in range(ranks):
        spans = merged.tensors(rank)
        for name in names:
            assert names_of(spans).count(name) == steps
        for span in spans:
            assert names_of(span.inner) == PHASES
            assert span.begin == span.inner[0].begin
            for before, after in zip(span.inner, span.inner[1:], strict=False):
                assert before.end == after.begin
            assert span.inner[-1].end == span.end


def check_batches(merged: Merged, rank: int) -> None:
    """Each tensor's collective has the times of the batch with its number."""
    batches = {span.args["batch"]: span for span in merged.batches(rank)}
    for span in merged.tensors(rank):
        phase = span.inner[-1]
        batch = batches[phase.args["batch"]]
        assert batch.begin <= phase.begin
        assert phase.end is not None
        assert phase.end >= max(inner.end or 0 for inner in batch.inner)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_tensor_of_every_step_on_every_rank(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "timeline.json"
    run_world(ranks, train, env={"HVDLITE_TIMELINE": str(path)})
    merged = read_merged(path)
    assert os.listdir(tmp_path) == ["timeline.json"]
    check_tensors(merged, ranks, NAMES, STEPS)
    assert sorted(names_of(merged.negotiations())) == sorted(NAMES * STEPS)
    for rank in range(ranks):
        check_batches(merged, rank)
        assert merged.processes[rank + 1].startswith(f"rank {rank} (")
        assert merged.ranks[rank]["complete"]
        assert merged.ranks[rank]["dropped"] == 0
    for span in merged.negotiations():
        assert sorted(name for name, _ in span.marks) == [f"rank {rank}" for rank in range(ranks)]


def test_parts_of_a_batch_lie_within_it(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_world(2, train, 2, 1 << 20, env={"HVDLITE_TIMELINE": str(path)})
    merged = read_merged(path)
    for rank in range(2):
        batches = merged.batches(rank)
        assert sum(span.args["bytes"] for span in batches) == 2 * len(NAMES) * (4 << 20)
        for batch in batches:
            assert {"pack", "reduce", "unpack"} <= set(names_of(batch.inner))
            assert set(names_of(batch.inner)) <= {"pack", "reduce", "unpack", "wait for ranks"}


def late_rank(submitted: str) -> None:
    basics.init()
    step(["ready"])
    if basics.rank() == 0:
        late = start_and_send("late")
        Path(submitted).touch()
    else:
        wait_until(Path(submitted).exists, "the request of rank 0")
        time.sleep(0.2)
        late = start("late")
    late.wait()
    basics.shutdown()


def test_negotiation_shows_who_came_late_on_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    run_world(2, late_rank, str(tmp_path / "submitted"), hosts=[0, 1], env=env)
    merged = read_merged(path)
    (late,) = (span for span in merged.negotiations() if span.name == "late")
    marks = dict(late.marks)
    assert marks["rank 1"] - marks["rank 0"] >= 150_000_000
    waits: list[Span] = []
    for rank in range(2):
        (span,) = (span for span in merged.tensors(rank) if span.name == "late")
        negotiate = span.inner[1]
        waits.append(negotiate)
        assert [name for name, _ in merged.marks[rank + 1, "engine"]].count("round") >= 2
        assert "exchange" in {part.name for batch in merged.batches(rank) for part in batch.inner}
        # Both hosts are this one: the true offset of their clocks is zero.
        assert abs(merged.ranks[rank]["offset"]) <= merged.ranks[rank]["error"]
    early, behind = waits
    assert early.end is not None and early.end - early.begin >= 150_000_000
    assert behind.begin - early.begin >= 150_000_000
    assert merged.ranks[0]["error"] == 0 < merged.ranks[1]["error"]


def test_parts_of_other_hosts_travel_to_rank_0(tmp_path: Path) -> None:
    # Hosts 0 and 1 have separate folders.
    path, hosts = tmp_path / "timeline.json", [0, 0, 1, 1]
    results = run_world(
        4,
        train,
        1,
        hosts=hosts,
        env=lambda rank: {
            "HVDLITE_TIMELINE": str(path),
            "HVDLITE_TIMELINE_PARTS": str(tmp_path / f"host{hosts[rank]}"),
        },
    )
    check_tensors(read_merged(path), 4, NAMES, 1)
    assert os.listdir(tmp_path) == ["timeline.json"]
    assert all(result.stderr == "" for result in results)


def start_and_stop(folder: str) -> None:
    basics.init()
    basics.stop_timeline()  # there is none
    step(["before"])
    for number in range(2):
        basics.start_timeline(f"{folder}/{number}.json")
        with pytest.raises(ArgumentError, match="already"):
            basics.start_timeline(f"{folder}/other.json")
        step([f"during.{number}"])
        basics.stop_timeline()
        basics.stop_timeline()
        step(["between"])
    basics.start_timeline(f"{folder}/open.json")
    held = start("open")
    if basics.rank() == 0:
        time.sleep(0.05)
    held.wait()
    basics.shutdown()


@pytest.mark.parametrize("ranks", [1, 3])
def test_start_and_stop_in_the_middle(tmp_path: Path, ranks: int) -> None:
    run_world(ranks, start_and_stop, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["0.json", "1.json", "open.json"]
    for name, tensor in (("0", "during.0"), ("1", "during.1"), ("open", "open")):
        merged = read_merged(tmp_path / f"{name}.json")
        for rank in range(ranks):
            assert names_of(merged.tensors(rank)) == [tensor]
            assert names_of(merged.tensors(rank)[0].inner) == PHASES


def stop_while_in_flight(folder: str) -> None:
    basics.init()
    basics.start_timeline(f"{folder}/a.json")
    if basics.rank() == 0:
        held = start_and_send("held")
    basics.stop_timeline()
    basics.engine().barrier("stopped").wait()
    basics.start_timeline(f"{folder}/b.json")
    if basics.rank() == 1:
        held = start("held")
    held.wait()
    basics.shutdown()


def test_tensor_in_flight_at_the_stop_ends_with_the_file(tmp_path: Path) -> None:
    run_world(2, stop_while_in_flight, str(tmp_path))
    (cut,) = read_merged(tmp_path / "a.json").tensors(0)
    assert names_of(cut.inner) == PHASES[:2]
    assert cut.args["failed"] == "still under way when the timeline ended"
    after = read_merged(tmp_path / "b.json")
    assert after.tensors(0) == []  # its beginning was before
    assert names_of(after.tensors(1)) == ["held"]


def survivor(path: str) -> None:
    basics.init()
    basics.start_timeline(path)
    step(["good"])
    submitted = Path(f"{path}.submitted")
    if basics.rank() == 1:
        wait_until(submitted.exists, "the request of rank 0")
        os._exit(3)
    bad = start("bad")
    submitted.touch()
    with pytest.raises(RankFailedError):
        bad.wait()
    basics.stop_timeline()
    basics.shutdown()


def test_stop_after_a_failure_completes_the_part(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_world(2, survivor, str(path), expect_failure=True)
    part = next(tmp_path.glob("timeline.json.parts/*/rank.0.json"))
    assert '"name":"bad"' in part.read_text()
    assert part.with_name("rank.1.part").exists()


def refused_path(path: str) -> str:
    basics.init()
    with pytest.raises(ArgumentError) as refused:
        basics.start_timeline(path)
    step()  # the world can still be used
    basics.shutdown()
    return str(refused.value)


@pytest.mark.parametrize(
    "path, reason",
    [("/nowhere/timeline.json", "No such file"), ("/proc", "regular"), ("/dev/null", "regular")],
)
def test_path_that_cannot_be_written_is_refused(path: str, reason: str) -> None:
    for result in run_world(2, refused_path, path):
        assert path in result.value
        assert reason in result.value


def refused_init() -> str:
    with pytest.raises(ArgumentError) as refused:
        basics.init()
    assert not basics.is_initialized()
    return str(refused.value)


def test_knob_with_a_path_that_cannot_be_written_is_an_error_of_init() -> None:
    path = "/nowhere/timeline.json"
    for result in run_world(2, refused_init, env={"HVDLITE_TIMELINE": path}):
        assert path in result.value


def two_worlds() -> None:
    for name in ("first", "second"):
        basics.init()
        step([name])
        basics.shutdown()


def test_each_world_of_a_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    run_world(2, two_worlds, env={"HVDLITE_TIMELINE": str(tmp_path / "out.json")})
    assert names_of(read_merged(tmp_path / "out.json").tensors(1)) == ["first"]
    assert names_of(read_merged(tmp_path / "out.1.json").tensors(1)) == ["second"]


def fork_and_train() -> None:
    basics.init()
    step()
    child = os.fork()
    if child == 0:
        basics.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    step()
    basics.shutdown()


def test_forked_child_leaves_the_timeline_alone(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_world(2, fork_and_train, env={"HVDLITE_TIMELINE": str(path)})
    check_tensors(read_merged(path), 2, NAMES, 2)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {path!r}
from hvdlite import basics
from parallel.core.test_timeline import NAMES, step
from patience import wait_until

def is_written():  # all that has begun, and its end, which both have the name
    (part,) = Path(os.environ["HVDLITE_TIMELINE_PARTS"]).rglob("rank.1.part")
    text = part.read_text()
    begun = all(text.count(f'"name":"{{name}}"') >= 30 for name in NAMES)
    return begun and text.count('"ph":"b"') == text.count('"ph":"e"')

basics.init()
for number in range(20):
    if number == 15 and basics.rank() == 1:
        wait_until(is_written, "the file has what was before")
        os.kill(os.getpid(), signal.SIGKILL)
    step()
"""


def test_killed_rank_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    tests = str(Path(__file__).resolve().parents[2])
    program = KILLED.format(path=[tests])
    job = ("-np", "3", "--timeline-filename", str(path), sys.executable, "-c", program)
    (tmp_path / "empty").mkdir()  # nothing there that the ranks could import
    result = run_launcher(*job, cwd=tmp_path / "empty")
    assert result.returncode == 128 + signal.SIGKILL
    assert "rank 1 (host" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["empty", "timeline.json"]
    merged = read_merged(path)
    assert [rank["complete"] for rank in merged.ranks] == [True, False, True]
    for name in NAMES:
        assert names_of(merged.tensors(1)).count(name) == 15
    failed = [span for span in merged.tensors(0) if "failed" in span.args]
    assert failed
    assert all("rank 1 died" in span.args["failed"] for span in failed)


def some_ranks(path: str) -> None:
    basics.init()
    if basics.rank() == 0:
        basics.start_timeline(path)
    step()
    if basics.rank() == 0:
        basics.stop_timeline()
    basics.shutdown()


def test_ranks_alone_leave_parts_that_can_be_merged_by_hand(tmp_path: Path) -> None:
    from hvdlite.timeline.__main__ import main

    path = tmp_path / "timeline.json"
    run_world(2, some_ranks, str(path))
    parts = list(tmp_path.glob("timeline.json.parts/*/rank.*"))
    assert [part.name for part in parts] == ["rank.0.json"]
    assert main(["merge", str(path), *map(str, parts)]) == 0
    check_tensors(read_merged(path), 1, NAMES, 1)


def test_launcher_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "timeline.json"
    result = run_launcher("-np", "2", "--timeline", str(path), sys.executable, "-c", "pass")
    assert result.returncode == 2
    assert f"--timeline-filename {path}: there is no such folder" in result.stderr
