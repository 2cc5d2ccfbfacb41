"""Lists of test files: their files exist, and those of `make check` use every package."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensorflow_versions

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = [
    ROOT / line.partition("::")[0]
    for line in (ROOT / "tests" / "check.txt").read_text().split()
    if not line.startswith("--")
]
PACKAGES = sorted(path.parent.name for path in (ROOT / "hvdlite").glob("*/__init__.py"))


def test_every_line_is_a_test() -> None:
    assert [path for path in CHOSEN if not path.exists()] == []


def test_files_for_older_releases_of_tensorflow_exist() -> None:
    assert len(list(ROOT.glob(tensorflow_versions.TESTS))) > 1


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_used_by_a_chosen_test(package: str) -> None:
    files = [file for path in CHOSEN for file in ([path] if path.is_file() else path.rglob("*.py"))]
    own = Path(__file__)
    assert any(f"hvdlite.{package}" in file.read_text() for file in files if file != own), (
        f"no test in tests/check.txt uses hvdlite.{package}"
    )
