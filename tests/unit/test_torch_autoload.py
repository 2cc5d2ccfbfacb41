"""PyTorch finds the backend hvdlite by itself, and pays next to nothing for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import hvdlite_autoload
from harness import base_environment

LIMIT_MS = 2.0


def run(source: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**base_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_entry_point_is_installed() -> None:
    for group in ("torch.backends", "torch.distributed.backends"):
        found = [one.value for one in entry_points(group=group) if one.name == "hvdlite"]
        assert found == ["hvdlite_autoload:register"]
    assert dist.is_backend_available("hvdlite")


def test_import_torch_imports_nothing_else_of_hvdlite() -> None:
    output = run("import sys, torch; print([m for m in sys.modules if m.startswith('hvdlite')])")
    assert output.strip() == "['hvdlite_autoload']"


def test_import_torch_leaves_the_secret_to_children() -> None:
    assert run("import os, torch; print(os.environ['HVDLITE_TOKEN'])", HVDLITE_TOKEN="x") == "x\n"


def test_registering_is_cheap() -> None:
    timed = (
        "import time, importlib.metadata as m; load = m.EntryPoint.load; times = []\n"
        "def slow(self):\n"
        "    begin = time.process_time(); call = load(self); loaded = time.process_time() - begin\n"
        "    def register():\n"
        "        begin = time.process_time(); call()\n"
        "        times.append(loaded + time.process_time() - begin)\n"
        "    return register\n"
        "m.EntryPoint.load = slow\n"
        "import torch; print(1000 * sum(times))"
    )
    assert min(float(run(timed)) for _ in range(3)) < LIMIT_MS


def test_registering_never_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("another release")

    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo"])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    hvdlite_autoload.register()
    assert "another release" in capsys.readouterr().err
    monkeypatch.setattr("torch.distributed", SimpleNamespace(is_available=lambda: False))
    hvdlite_autoload.register()


def test_without_autoload_the_adapter_registers() -> None:
    source = (
        "import torch.distributed as dist; print(dist.is_backend_available('hvdlite'))\n"
        "import hvdlite.torch; print(dist.is_backend_available('hvdlite'))"
    )
    found = hasattr(dist.Backend, "_ensure_backend_registered")  # torch 2.14 and newer
    assert run(source, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == [str(found), "True"]


def test_registering_twice_changes_nothing() -> None:
    before = list(dist.Backend.backend_list)
    hvdlite_autoload.register()
    assert dist.Backend.backend_list == before


def test_env_without_a_launcher_gives_torchs_own_error() -> None:
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group("hvdlite")
