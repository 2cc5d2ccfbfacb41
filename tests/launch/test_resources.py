from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.launch import resources


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path)
    monkeypatch.setattr(resources, "_own_cgroup", lambda: tmp_path)
    return tmp_path


def test_memory_follows_the_containers_limit(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1048576\n")
    assert resources.memory_bytes() == 1 << 20
    (cgroup / "memory.max").write_text("max\n")
    assert resources.memory_bytes() > 1 << 20


def test_kills_for_lack_of_memory_are_counted(cgroup: Path) -> None:
    assert resources.oom_kills() == 0
    (cgroup / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert resources.oom_kills() == 2
