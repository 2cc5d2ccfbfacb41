"""Errors: docs/api/errors.md explains every class, and as_shown() loses nothing."""

from __future__ import annotations

import inspect
import traceback
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


def test_what_an_error_says_besides_is_shown() -> None:
    ours = errors.RankFailedError("rank 1 died")
    own, copy = ValueError(f"epoch 7: {ours}"), RuntimeError(f"{ours}\n\nAt:\n  train.py(1): f")
    own.__cause__ = ours
    errors.passed_on.append(ours)
    with pytest.raises(errors.RankFailedError):
        exec(compile("raise ours", "site-packages/mine/train.py", "exec"), {"ours": ours})
    assert "train.py" in str(traceback.extract_tb(errors.as_shown(ours).__traceback__)[-1])
    assert (errors.as_shown(own), errors.as_shown(copy)) == (own, ours)
    copy.__notes__ = ["epoch 7"]
    assert errors.as_shown(copy) is copy
