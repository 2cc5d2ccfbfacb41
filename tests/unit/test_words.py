from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def load() -> Any:
    path = Path(__file__).resolve().parents[2] / "tools" / "words.py"
    spec = importlib.util.spec_from_file_location("words", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("rank 3 is no member", [1]),
        ("// a rank that is\n// no member", [1]),
        ("there is no driver", []),
        ("it is no longer there, and was no more than a test", []),
        ("fine\nWhoever asks", [2]),
        ("so that all hear of it", [1]),
    ],
)
def test_phrases_that_the_style_page_rules_out(text: str, lines: list[int]) -> None:
    assert [line for line, _, _ in load().phrases_in(text)] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("int rank;  // of the peer", [1]),
        ("int rank;\n// By rank: what it sends.\nint sent;", [2]),
        ("int a;  // likewise\nint* b;  // null: there is none", [1, 2]),
        ("// The peers count, and those\n// of other hosts do not.", []),
        ("int rank;  // The peer has it.\n// of the peer", [2]),
        ("int offset;  // offers nothing", []),
    ],
)
def test_comments_without_a_subject(text: str, lines: list[int]) -> None:
    assert [line for line, _ in load().fragments_in(text)] == lines
