"""The product and its tests only become smaller, and pages stay short.

A change that needs more lines or files removes as many elsewhere, or raises a number here and says
in its commit why. A change that removes some lowers the numbers.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from api_doc import LIST as DOCSTRINGS

ROOT = Path(__file__).resolve().parents[2]
MOST = {  # the most lines, and the most files
    "hvdlite": (39_523, 172),
    "csrc": (23_140, 140),
    "tests": (61_254, 384),
}
MOST_WORDS = 24_000  # of README.md and docs/, as `wc -w` counts them


@pytest.mark.parametrize("folder", MOST)
def test_lines_and_files_only_go_down(folder: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", folder], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    # The PTX is generated. A file that the next commit deletes may still be listed.
    files = [file for file in files if file.suffix != ".ptx" and file.exists()]
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    most_lines, most_files = MOST[folder]
    assert lines <= most_lines, f"{folder} has {lines:,} lines, more than {most_lines:,}"
    assert len(files) <= most_files, f"{folder} has {len(files)} files, more than {most_files}"


def test_pages_have_few_words() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    # Docstrings on the pages of docs/api are generated.
    assert len(DOCSTRINGS.sub("", text).split()) <= MOST_WORDS
