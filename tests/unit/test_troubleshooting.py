"""docs/troubleshooting.md explains messages that exist, and every class of error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hvdlite import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = [
    path
    for folder in ("csrc", "hvdlite")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cc", ".h", ".py")
]
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
HEADINGS = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def literals() -> str:
    """Join all string literals in order: adjacent ones make one message, as they do in the code."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCES)
    return "".join(literal for text in texts for literal in LITERAL.findall(text))


@pytest.mark.parametrize("heading", HEADINGS)
def test_message_is_in_the_code(heading: str, literals: str) -> None:
    parts = [part.strip(" '") for part in heading.split("…")]
    assert max(map(len, parts)) >= 6, "too short to be found by"
    for part in parts:
        assert part in literals


def test_page_explains_messages() -> None:
    assert len(HEADINGS) >= 20


@pytest.mark.parametrize(
    "name", [name for name, value in vars(errors).items() if inspect.isclass(value)]
)
def test_every_error_class_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE
