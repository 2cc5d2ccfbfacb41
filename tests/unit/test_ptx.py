"""The core's PTX is up to date with its source, and assembles for every device.

Tests that compile or assemble need the extra `ptx`, which `make ptx` installs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (70, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121)


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_ptx", ROOT / "tools" / "make_ptx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_ptx = _load_tool()


def _ptxas() -> Path | None:
    library = make_ptx.wheel_file("cuda_nvcc/bin/ptxas")
    return library if library is None else Path(library)


def test_generated_file_is_of_this_source() -> None:
    generated = make_ptx.GENERATED.read_text()
    assert make_ptx.recorded_digest(generated) == make_ptx.source_digest(), "run make ptx"
    assert ".target sm_70" in generated


def test_every_header_that_a_source_includes_is_a_source() -> None:
    for name in make_ptx.SOURCES:
        included = re.findall(r'(?m)^#include "(.*)"$', (ROOT / name).read_text())
        assert {f"csrc/{header}" for header in included} <= set(make_ptx.SOURCES), name


@pytest.mark.skipif(make_ptx.nvrtc_library() is None, reason="NVRTC is not installed (make ptx)")
def test_compiler_gives_the_generated_file() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "make_ptx.py"), "--check"]
    result = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(_ptxas() is None, reason="ptxas is not installed (make ptx)")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_assembler_takes_it(architecture: int, tmp_path: Path) -> None:
    command = [str(_ptxas()), f"-arch=sm_{architecture}", "--verbose", str(make_ptx.GENERATED)]
    result = subprocess.run(
        [*command, "-o", str(tmp_path / "pack.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    functions = result.stderr.count("bytes stack frame")
    assert functions == make_ptx.GENERATED.read_text().count(".entry")
    assert result.stderr.count(" 0 bytes stack frame, 0 bytes spill stores") == functions
