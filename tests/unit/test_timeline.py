"""Merging the parts of timelines: clocks, parts that were cut, and files that are not parts."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest

from hvdlite.errors import ArgumentError, ForkedError
from hvdlite.rendezvous.connection import ROUNDS, ClockOffset, measure_offset
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import timeline_parts
from hvdlite.timeline import recorder
from hvdlite.timeline.__main__ import main
from hvdlite.timeline.recorder import Recorder
from patience import HANG
from trace_rows import read_merged

END = {"ph": "M", "pid": 1, "tid": 0, "name": "hvdlite_end", "args": {"events": 2, "dropped": 7}}


def write_part(
    folder: Path,
    rank: int,
    clock: ClockOffset,
    begin: int,
    complete: bool = True,
    target: Path = Path("/nowhere/out.json"),
) -> Path:
    """Write the part of one of two ranks: a batch of 5 us, on the rank's own clock."""
    header = recorder.Header(rank, 2, "here", 1, str(target), begin - 1000, *clock)
    process = rank + 1
    lines = ["[\n", *recorder.opening_lines(header)]
    row = {"ph": "M", "pid": process, "tid": 1, "name": "thread_name", "args": {"name": "engine"}}
    lines.append(json.dumps(row, separators=(",", ":")) + ",\n")
    for kind, at in (("B", begin), ("E", begin + 5000)):
        time_field = f"{at // 1000}.{at % 1000:03d}"
        lines.append(f'{{"ts":{time_field},"ph":"{kind}","pid":{process},"tid":1,"name":"x"}},\n')
    if complete:
        lines.append(json.dumps(END, separators=(",", ":")) + "\n]\n")
    path = folder / f"rank.{rank}.{'json' if complete else 'part'}"
    path.write_text("".join(lines))
    return path


def test_merge_puts_all_ranks_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    ahead = 7_000_000_000_123
    parts = [
        write_part(tmp_path, 1, ClockOffset(-ahead, 50), 2_000_500 + ahead),
        write_part(tmp_path, 0, ClockOffset(0, 0), 2_000_000),
    ]
    recorder.merge(parts, tmp_path / "out.json")
    merged = read_merged(tmp_path / "out.json")
    (first,), (second,) = merged.batches(0), merged.batches(1)
    assert first.begin == 1000  # since the first rank began
    assert second.begin - first.begin == 500
    assert second.end == second.begin + 5000
    assert [rank["rank"] for rank in merged.ranks] == [0, 1]
    assert [rank["dropped"] for rank in merged.ranks] == [7, 7]


@pytest.mark.parametrize("cut", range(1, 50, 7))
def test_merge_tolerates_a_part_that_was_cut(tmp_path: Path, cut: int) -> None:
    whole = write_part(tmp_path, 0, ClockOffset(0, 0), 5_000_000)
    killed = write_part(tmp_path, 1, ClockOffset(0, 0), 5_000_000, complete=False)
    killed.write_bytes(killed.read_bytes()[:-cut])
    recorder.merge([whole, killed], tmp_path / "out.json")
    merged = read_merged(tmp_path / "out.json")
    assert [rank["complete"] for rank in merged.ranks] == [True, False]
    (span,) = merged.batches(1)
    assert span.end is None  # Its end was in the line that was cut.
    assert "was killed" in (tmp_path / "out.json").read_text()


def test_sessions_beside_one_that_cannot_be_merged_are_merged(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "parts" / name).mkdir(parents=True)
    (tmp_path / "parts" / "a" / "rank.0.part").touch()
    target = tmp_path / "out.json"
    write_part(tmp_path / "parts" / "b", 0, ClockOffset(0, 0), 3_000_000, target=target)
    with pytest.raises(ArgumentError, match=r"rank\.0\.part is not a part"):
        recorder.merge_leftovers(tmp_path / "parts")
    assert len(read_merged(target).ranks) == 1
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["a"]


def test_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "_write_merged", fill)
    target = tmp_path / "out.json"
    write_part(tmp_path, 0, ClockOffset(0, 0), 3_000_000, target=target)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.json'"):
        recorder.merge(sorted(tmp_path.glob("rank.*")), target)
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]


def test_what_is_not_a_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = tmp_path / "stranger.json"
    stranger.write_text('[\n{"name":"something"}\n]\n')
    target = tmp_path / "out.json"
    with pytest.raises(ArgumentError, match=r"stranger\.json is not a part"):
        recorder.merge([stranger], target)
    assert main(["merge", str(target), str(stranger)]) == 1
    assert "is not a part" in capsys.readouterr().err
    assert main(["merge", str(target), str(tmp_path / "missing")]) == 1
    assert not target.exists()


def test_quickest_round_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server is a second ahead; every round but one takes long on one of the ways.
    took = [9 if i == 5 else 900 for i in range(ROUNDS)]
    own = iter([at for i in range(ROUNDS) for at in (i * 1000, i * 1000 + took[i])])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for i in range(ROUNDS):
            reading = 1_000_000_000 + i * 1000 + (4 if i == 5 else 10)
            theirs.sendall(reading.to_bytes(8, "little", signed=True))
        monkeypatch.setattr(time, "monotonic_ns", lambda: next(own))
        offset = measure_offset(ours, Deadline(HANG))
    assert offset == ClockOffset(1_000_000_000, 5)


def test_one_timeline_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLITE_TIMELINE_PARTS", raising=False)
    recorder = Recorder(0, [0, 0], ClockOffset(0, 0), b"job", timeline_parts())
    assert recorder.begin_by_knob("") == recorder.begin_by_knob("DYNAMIC") == -1
    os.close(recorder.begin(tmp_path / "out.json"))
    with pytest.raises(ArgumentError, match="already"):
        recorder.begin(tmp_path / "other.json")
    recorder.cancel()
    assert not list(tmp_path.glob("*.parts"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ForkedError, match="child"):
        recorder.begin(tmp_path / "other.json")
