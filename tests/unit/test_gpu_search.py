"""Where NCCL is looked for, and what is said where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdlite import _core, gpu


def test_wheels_are_found_on_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "empty"), str(tmp_path)])
    assert gpu.nccl_folders() == [str(library.parent)]


def test_missing_libraries_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    monkeypatch.setenv("HVDLITE_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    driver, nccl = _core.gpu_report([])
    assert driver[:2] == ("CUDA driver", False)
    assert "there is no NVIDIA driver here" in driver[2]
    assert nccl[:2] == ("NCCL", False)
    assert "HVDLITE_NCCL_LIBRARY=/nowhere/libnccl.so.2 cannot be loaded" in nccl[2]
