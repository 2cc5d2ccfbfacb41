"""The search for NCCL finds copies in the documented order; a missing one gets a clear message."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import gpu as fake_gpu
from harness import base_environment
from hvdlite import _core, basics

# A program that loads a library, if one is given, as a framework does, and then searches NCCL.
SEARCH = """\
import ctypes, sys
loaded, *folders = sys.argv[1:]
library = ctypes.CDLL(loaded) if loaded else None
from hvdlite import _core
print(*_core.gpu_report(folders)[1], sep="|")
"""


def test_wheels_are_found_on_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "empty"), str(tmp_path)])
    assert basics.nccl_folders() == [str(library.parent)]


def test_missing_libraries_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    monkeypatch.setenv("HVDLITE_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    driver, nccl = _core.gpu_report([])
    assert driver[:2] == ("CUDA driver", False)
    assert "there is no NVIDIA driver here" in driver[2]
    assert nccl[:2] == ("NCCL", False)
    assert "HVDLITE_NCCL_LIBRARY=/nowhere/libnccl.so.2 cannot be loaded" in nccl[2]


class Copies:
    """Copies of the fake NCCL in all locations where NCCL may be."""

    def __init__(self, folder: Path) -> None:
        self.loaded = self._copy(folder / "framework")
        self.named = self._copy(folder / "named")
        self.wheel = self._copy(folder / "wheel")
        self.system = self._copy(folder / "system")

    @staticmethod
    def _copy(folder: Path) -> Path:
        folder.mkdir()
        for library in ("libcuda.so.1", "libnccl.so.2"):
            shutil.copy(fake_gpu.FOLDER / library, folder)
        return folder / "libnccl.so.2"

    def search(self, version: int, *, loaded: Path | None, named: bool, wheel: bool) -> str:
        """Return what a new process finds, where the system always has a copy."""
        fakes = fake_gpu.environment(self.system.parent, FAKE_NCCL_VERSION=version)
        env = {**base_environment(), **fakes}
        if named:
            env["HVDLITE_NCCL_LIBRARY"] = str(self.named)
        folders = [str(self.wheel.parent)] if wheel else []
        command = [sys.executable, "-c", SEARCH, str(loaded or ""), *folders]
        found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return found.stdout.strip()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    return Copies(tmp_path_factory.mktemp("copies of NCCL"))


def test_first_place_that_has_a_copy_decides(copies: Copies) -> None:
    found = copies.search(22807, loaded=copies.loaded, named=True, wheel=True)
    assert found.startswith(f"NCCL|True|2.28.7, {copies.loaded} (loaded already by the framework)")
    found = copies.search(22602, loaded=None, named=True, wheel=True)
    assert found.startswith(f"NCCL|True|2.26.2, {copies.named} (named by HVDLITE_NCCL_LIBRARY)")
    found = copies.search(22203, loaded=None, named=False, wheel=True)
    assert found.startswith(f"NCCL|True|2.22.3, {copies.wheel} (of an nvidia-nccl wheel)")
    found = copies.search(21905, loaded=None, named=False, wheel=False)
    assert found.startswith(f"NCCL|True|2.19.5, {copies.system} (of the system)")


def test_loaded_copy_that_is_too_old_is_not_passed_over(copies: Copies) -> None:
    found = copies.search(21805, loaded=copies.loaded, named=True, wheel=True)
    assert found == (
        f"NCCL|False|{copies.loaded} (loaded already by the framework) is NCCL 2.18.5, "
        "but 2.19 or newer is needed"
    )
