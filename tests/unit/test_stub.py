"""hvdlite/_core.pyi describes the module as it was compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stubtest(stubs: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Compare the compiled module with stubs/hvdlite/_core.pyi."""
    config = scratch / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {stubs}\ncache_dir = {scratch / 'cache'}\n")
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "hvdlite._core"]
    return subprocess.run(
        [*command, "--mypy-config-file", str(config)],
        cwd=scratch,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def planted(scratch: Path, text: str) -> Path:
    package = scratch / "stubs" / "hvdlite"
    package.mkdir(parents=True)
    (package / "__init__.pyi").touch()
    (package / "_core.pyi").write_text(text)
    return package.parent


def test_stub_describes_the_module(tmp_path: Path) -> None:
    stub = (ROOT / "hvdlite" / "_core.pyi").read_text()
    result = stubtest(planted(tmp_path, stub), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("def knobs()", "def knots()", "knots"),
        ("class Handle:", "class Handle:\n    def vanish(self) -> None: ...", "vanish"),
    ],
)
def test_wrong_stub_is_noticed(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    stub = (ROOT / "hvdlite" / "_core.pyi").read_text()
    assert old in stub
    result = stubtest(planted(tmp_path, stub.replace(old, new)), tmp_path)
    assert result.returncode != 0
    assert complaint in result.stdout + result.stderr
