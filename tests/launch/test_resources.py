from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.launch import resources


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path)
    monkeypatch.setattr(resources, "_own_cgroup", lambda: tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


MEMBERSHIP = "9:cpuset:/job\n4:cpu,cpuacct:/job\n0::/pods/one\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "300000 100000"}, 3),
        ({"pods/cpu.max": "250000 100000", "pods/one/cpu.max": "400000 100000"}, 2),
        ({"pods/one/cpu.max": "50000 100000"}, 1),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
        (
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({"cpuset/job/cpu.max": "100000 100000"}, None),
        ({"cpu.max": "0 0"}, None),
    ],
)
def test_quota_is_the_strictest_on_the_way_up(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    """tests/cpp/base/test_cpu.cc has the same cases for the core."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert resources.quota_cores(tmp_path, MEMBERSHIP) == cores


def test_memory_follows_the_containers_limit(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1048576\n")
    assert resources.memory_bytes() == 1 << 20
    (cgroup / "memory.max").write_text("max\n")
    assert resources.memory_bytes() > 1 << 20


def test_kills_for_lack_of_memory_are_counted(cgroup: Path) -> None:
    assert resources.oom_kills() == 0
    (cgroup / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert resources.oom_kills() == 2
