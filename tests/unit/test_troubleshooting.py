"""docs/troubleshooting.md explains messages that exist, by codes that stay, and all errors."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite import errors
from hvdlite.errors.codes import find_code, split_pattern, with_code

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = [
    path
    for folder in ("csrc", "hvdlite")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cc", ".h", ".py")
]
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
ROWS = re.findall(r"^### (HVD\d{3}): `(.+)`$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def literals() -> str:
    """Join all string literals in order: adjacent ones make one message, as they do in the code."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCES)
    return "".join(literal for text in texts for literal in LITERAL.findall(text))


@pytest.mark.parametrize(("code", "pattern"), ROWS)
def test_message_is_in_the_code(code: str, pattern: str, literals: str) -> None:
    parts = split_pattern(pattern)
    assert max(map(len, parts)) >= 6, "too short to be found by"
    for part in parts:
        assert part in literals
    assert find_code(pattern.replace("…", "x")) == code, "the words of two rows fit"


def test_no_code_is_used_again() -> None:
    # A message that has gone takes its code along, so a new one gets the number that is next.
    found = re.search(r"^<!-- The next code is HVD(\d+)\.", PAGE, re.MULTILINE)
    assert found is not None
    numbers = [int(code.removeprefix("HVD")) for code, _ in ROWS]
    assert len(set(numbers)) == len(numbers) == PAGE.count("\n### HVD")
    assert 450 <= int(found[1]) <= max(450, max(numbers) + 1)
    assert max(numbers) < int(found[1])
    assert PAGE.count("\n### `") == 0, "a message has a code: give it the next number"


def test_table_is_up_to_date(tmp_path: Path) -> None:
    table = tmp_path / "codes.txt"
    subprocess.run([sys.executable, ROOT / "tools" / "error_codes.py", table], check=True)
    shipped = (ROOT / "hvdlite" / "errors" / "codes.txt").read_text(encoding="utf-8")
    assert table.read_text(encoding="utf-8") == shipped, "run `make docs`"


DIED = "rank 1 died: its connections closed without a goodbye"


def test_errors_and_warnings_end_in_their_code() -> None:
    error = errors.RankFailedError(DIED)
    assert str(error) == f"{DIED} [HVD001]"
    assert error.args == (DIED,)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(errors.CollectiveTimeoutError(DIED)) == str(error)
    assert str(errors.StopHandlerWarning(DIED)) == str(error)
    assert str(errors.HvdliteError("of another library")) == "of another library"
    assert str(errors.HvdliteError()) == ""


def test_message_that_quotes_another_has_one_code() -> None:
    inner = str(errors.HvdliteError(DIED))
    outer = str(errors.HvdliteError(f"no live view: {inner}; the job goes on"))
    assert outer == f"no live view: {DIED}; the job goes on [HVD001]"
    assert with_code(outer) == outer
    assert with_code(f"quoted: x {inner} y") == f"quoted: x {DIED} y [HVD001]"


@pytest.mark.parametrize(
    "name",
    [name for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"],
)
def test_every_error_class_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE
