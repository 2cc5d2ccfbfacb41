"""Each page is in one group of docs/index.md, and a group that is too long gets a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import word_budget
from docs_site.staging import ROOT

DOCS = ROOT / "docs"


def test_each_page_is_in_one_group_with_a_budget() -> None:
    groups = word_budget.words_of(DOCS / "index.md")
    listed = [(DOCS / page).resolve() for pages in groups.values() for page in pages]
    assert sorted(listed) == sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - {DOCS / "index.md"})
    assert list(groups) == list(word_budget.BUDGETS)


def test_budgets_are_30_000_words() -> None:
    assert sum(word_budget.BUDGETS.values()) == 30_000


def test_a_group_over_its_budget_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("## Start\n\n- [A](a.md)\n\n## How-to\n\n- [B](b.md)\n")
    (docs / "a.md").write_text("one two three")
    (docs / "b.md").write_text("one two three")
    monkeypatch.setattr(word_budget, "ROOT", tmp_path)
    monkeypatch.setattr(word_budget, "BUDGETS", {"Start": 3, "How-to": 2})
    word_budget.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"warning: .*How-to.* 3 words, more than 2; .*b\.md \(3\)", line)


def test_make_test_ends_with_the_warning() -> None:
    recipe = re.findall(r"^test:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe[0].endswith("python tools/word_budget.py\n")
