"""docs/knobs.md and docs/options.md are up to date with the core and the parser of hvdlite-run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdlite import _core
from settings_doc import PAGES, page_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page_of(text) == text, "run `make docs`"


def test_every_variable_that_python_reads_is_on_the_page() -> None:
    page = set(re.findall(r"`(HVDLITE_\w+)`", (ROOT / "docs" / "knobs.md").read_text("utf-8")))
    code = "".join(path.read_text("utf-8") for path in (ROOT / "hvdlite").rglob("*.py"))
    read = set(re.findall(r"""["'](HVDLITE_[A-Z_]*[A-Z])["']""", code))
    assert sorted(read - page) == [], "add it to docs/knobs.md"


def test_every_knob_is_described() -> None:
    rows = _core.knobs()
    assert len({row["name"] for row in rows}) == len(rows) > 0
    for row in rows:
        assert row["environment"] == "HVDLITE_" + row["name"].upper()
        assert row["type"] in ("int", "float", "str")
        assert row["help"]
        assert not row["help"].endswith(".")
        assert "|" not in row["help"]
