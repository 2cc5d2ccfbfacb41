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
        ("epoch = 0  # of the last world", [1]),
        ("x = 1\n# by rank, its host\ny = 2", [2]),
        ("# A rank takes the number\n# of its worker.", []),
        ("x = 1  # It has a number.\n# of its worker", [2]),
        ("x = '# of a text'", []),
        ("x = None  # None: the whole world", [1]),
        ("x = 1  # Likewise for rank 0.", [1]),
        ("x = 1  # of", [1]),
    ],
)
def test_comments_of_python_that_are_not_sentences(text: str, lines: list[int]) -> None:
    assert [line for line, _, _ in load().python_fragments_in(text)] == lines
