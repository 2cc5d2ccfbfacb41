"""docs/modes.md is up to date with the registry of modes."""

from __future__ import annotations

from pathlib import Path

import modes_doc
from hvdlite.modes import Mode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modes.md"


def test_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert modes_doc.with_table(page) == page, "run `make docs`"
    assert all(f"\n| {modes_doc.quoted(mode)} | " in page for mode in Mode)
