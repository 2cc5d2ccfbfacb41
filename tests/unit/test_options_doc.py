"""docs/options.md is up to date with hvdlite-run's parser."""

from __future__ import annotations

from pathlib import Path

import options_doc

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert options_doc.options_page() == page, "run `make docs`"
    for row in ("| `-np`, `--num-proc`, `--np N` | number of ranks |", "| `--help-all` | "):
        assert row in page
