"""hvdlite/_core.pyi describes the compiled module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mypy", reason="mypy is missing: make dev (make lint runs these tests)")

# Complaints that concern every pybind11 class, and do not matter to users.
PYBIND11 = re.compile(
    r"is inconsistent, metaclass differs$"
    r"|(Handle|GradientMemory|Terms)\.__init__ is inconsistent, stub does not have \*args"
)


def complaints(stub: str, scratch: Path) -> list[str]:
    """Compare the compiled module with a stub's text."""
    package = scratch / "stubs" / "hvdlite"
    package.mkdir(parents=True)
    (package / "__init__.pyi").touch()
    (package / "_core.pyi").write_text(stub)
    config = scratch / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {package.parent}\ncache_dir = {scratch / 'cache'}\n")
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "hvdlite._core"]
    result = subprocess.run(
        [*command, "--mypy-config-file", str(config)],
        cwd=scratch,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    lines = (result.stdout + result.stderr).splitlines()
    return [line for line in lines if line and not PYBIND11.search(line)]


def test_stub_describes_the_module(tmp_path: Path) -> None:
    stub = (ROOT / "hvdlite" / "_core.pyi").read_text()
    assert complaints(stub, tmp_path) == []
