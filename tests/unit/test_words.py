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


PYTHON, CPP = "hvdlite/basics.py", "csrc/base/text.cc"


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        (PYTHON, "epoch = 0  # of the last world", [1]),
        (PYTHON, "x = 1\n# by rank, its host\ny = 2", [2]),
        (PYTHON, "# A rank takes the number\n# of its worker.", []),
        (PYTHON, "x = 1  # It has a number.\n# of its worker", [2]),
        (PYTHON, "x = '# of a text'", []),
        (PYTHON, "x = None  # None: the whole world", [1]),
        (PYTHON, "x = 1  # Likewise for rank 0.", [1]),
        (PYTHON, "x = 1  # of", [1]),
        (PYTHON, "x = 1  # By chance one of two ranks is late.", []),
        ("examples/torch_mnist.py", "x = 1  # of", []),
        (CPP, "int rank;  // of the peer", [1]),
        (CPP, "int rank;\n// By rank: what it sends.\nint sent;", [2]),
        (CPP, "int a;  // likewise\nint* b;  // null: there is none", [1, 2]),
        (CPP, "// The peers count, and those\n// of other hosts do not.", []),
        (CPP, "int rank;  // The peer has it.\n// of the peer", [2]),
        (CPP, "int offset;  // offers nothing", []),
    ],
)
def test_comments_that_are_not_sentences(name: str, text: str, lines: list[int]) -> None:
    assert [line for line, _, _ in load().fragments_in(name, text)] == lines
