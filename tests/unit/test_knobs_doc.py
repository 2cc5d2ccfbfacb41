"""docs/knobs.md is up to date with the core's table of knobs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hvdlite import _core

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "knobs.md"
    subprocess.run([sys.executable, ROOT / "tools" / "knobs_doc.py", page], check=True)
    written = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == written, "run `make docs`"


def test_every_variable_that_python_reads_is_on_the_page() -> None:
    page = set(re.findall(r"`(HVDLITE_\w+)`", (ROOT / "docs" / "knobs.md").read_text("utf-8")))
    code = "".join(path.read_text("utf-8") for path in (ROOT / "hvdlite").rglob("*.py"))
    read = set(re.findall(r"""["'](HVDLITE_[A-Z_]*[A-Z])["']""", code))
    assert sorted(read - page) == [], "add it to tools/knobs_doc.py, and run `make docs`"


def test_every_knob_is_described() -> None:
    rows = _core.knobs()
    assert len({row["name"] for row in rows}) == len(rows) > 0
    for row in rows:
        assert row["environment"] == "HVDLITE_" + row["name"].upper()
        assert row["type"] in ("int", "float", "str")
        assert row["help"]
        assert not row["help"].endswith(".")
        assert "|" not in row["help"]
