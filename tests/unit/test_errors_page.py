"""docs/api/errors.md explains every class of error."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hvdlite import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "errors.md"


@pytest.mark.parametrize(
    "name",
    [name for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"],
)
def test_every_error_class_is_explained(name: str) -> None:
    assert f"### hvd.{name}\n" in PAGE.read_text(encoding="utf-8")
