"""docs/horovod.md lists every name of Horovod, and its statements about each are true."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import run_world
from hvdlite import _core
from hvdlite.errors import ArgumentError
from hvdlite.launch import cli, description, flags
from hvdlite.rendezvous import environment
from launcher import run_launcher
from unit.horovod_names import NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "horovod.md"
STATES = ("same", "better", "accepted", "refused", "not there")
HERE = ("same", "better", "accepted")


@dataclass(frozen=True)
class Row:
    """One name of a table: the section's heading, the name, its parameters, and its state."""

    heading: str
    name: str
    parameters: str | None
    state: str


def rows_of(page: str) -> Iterator[Row]:
    """Read the tables.

    Raises:
        ValueError: the state of a row is not known, or lacks its reason.
    """
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        for line in re.findall(r"^\| (`.*`) \| (.*) \|$", section, flags=re.MULTILINE):
            state = next((one for one in STATES if line[1].startswith(one)), None)
            if state is None or (state in STATES[2:] and ":" not in line[1]):
                raise ValueError(f"{line}: begin with one of {STATES}, and say why not")
            for name, parameters in re.findall(r"`([^`(]+)(\([^`]*\))?`", line[0]):
                yield Row(heading, name, parameters[1:-1] if parameters else None, state)


ROWS = list(rows_of(PAGE.read_text(encoding="utf-8")))
SECTIONS = {key: [row for row in ROWS if row.heading.startswith(key)] for key in NAMES}


def parameters_of(text: str) -> tuple[list[str], list[str]]:
    """Return the parameters of a row: those that may be positional, and those by keyword only."""
    (function,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return [one.arg for one in arguments.args], [one.arg for one in arguments.kwonlyargs]


def names_in(section: str) -> list[str]:
    if section == "From":
        listed = [parameters_of(row.parameters or "") for row in SECTIONS[section]]
        return [name for positional, keywords in listed for name in positional + keywords]
    return [row.name for row in SECTIONS[section]]


@pytest.mark.parametrize("section", NAMES)
def test_every_name_of_horovod_is_in_the_table_once(section: str) -> None:
    listed = names_in(section)
    assert sorted(set(listed)) == sorted(listed)
    assert sorted(set(NAMES[section]) - set(listed)) == []


def difference(found: Any, wanted: str) -> str:
    """Describe parameters that `found` lacks, or has in another position; "" if there are none."""
    positional, keywords = parameters_of(wanted)
    try:
        ours = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return "has no signature"
    kinds = {one.kind for one in ours.values()}
    if (
        inspect.Parameter.VAR_POSITIONAL not in kinds
        and list(ours)[: len(positional)] != positional
    ):
        return f"has the parameters {list(ours)}"
    if inspect.Parameter.VAR_KEYWORD not in kinds and not set(keywords) <= set(ours):
        return f"lacks {sorted(set(keywords) - set(ours))}"
    return ""


def examples() -> dict[tuple[str, str], Any]:
    """Make an object of each class, on which the rows of its methods are looked up."""
    import tensorflow as tf
    import torch

    import hvdlite.tensorflow
    import hvdlite.torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    one = {
        ("hvdlite.torch", "DistributedOptimizer"): hvdlite.torch.DistributedOptimizer(optimizer),
        ("hvdlite.tensorflow", "DistributedGradientTape"): (
            hvdlite.tensorflow.DistributedGradientTape(tf.GradientTape())
        ),
    }
    for name in ("torch", "tensorflow", "keras"):
        one[f"hvdlite.{name}", "ProcessSet"] = hvdlite.torch.ProcessSet([0])
    return one


_MISSING = object()


def look_up(module: str, name: str, found: dict[tuple[str, str], Any]) -> Any:
    first, *rest = name.split(".")
    try:
        value = getattr(importlib.import_module(module), first, _MISSING)
        if rest and value is _MISSING:
            value = importlib.import_module(f"{module}.{first}")
    except ModuleNotFoundError:
        return _MISSING
    value = found.get((module, first), value) if rest else value
    for part in rest:
        value = getattr(value, part, _MISSING)
    return value


def problems_of(module: str, row: Row, found: dict[tuple[str, str], Any]) -> str:
    """Compare a row with a module; return what is wrong, or "" if nothing is."""
    value = look_up(module, row.name, found)
    if row.state == "not there":
        return "" if value is _MISSING else "is there"
    if value is _MISSING:
        return "is not there"
    if row.state == "refused":
        try:
            value()
        except ArgumentError:
            return ""
        return "does not refuse"
    return difference(value, row.parameters) if row.parameters is not None else ""


def modules_of(row: Row) -> list[str]:
    from hvdlite.compat import target_of

    return sorted({target_of(name) for name in re.findall(r"`([^`]*)`", row.heading)})


def compare_modules(rows: list[Row]) -> list[str]:
    """Compare rows with the modules that their headings name; this runs in a rank."""
    from hvdlite import basics

    basics.init()
    found = examples()
    return [
        f"{module}: {row.name} {problem}"
        for row in rows
        for module in modules_of(row)
        if (problem := problems_of(module, row, found))
    ]


@pytest.mark.long
def test_modules_have_what_the_table_says() -> None:
    sections = ("Everywhere", "PyTorch", "TensorFlow", "Keras")
    rows = [row for key in sections for row in SECTIONS[key]]
    (result,) = run_world(1, compare_modules, rows, env={"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert result.value == []


@pytest.mark.parametrize("row", SECTIONS["From"], ids=lambda row: row.state)
def test_run_takes_what_the_table_says(row: Row) -> None:
    from hvdlite.compat.runner import run

    if row.state == "better":
        assert difference(run, row.parameters or "") == ""
        return
    _, keywords = parameters_of(row.parameters or "")
    for name in keywords:
        # np=0 is refused last, so an argument that is accepted leads to that message.
        with pytest.raises(ArgumentError, match="at least one rank"):
            run(print, np=0, **{name: 1})


@pytest.mark.parametrize("state", STATES)
def test_launcher_has_the_flags(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = flags.build_parser()
    named = [row.name for row in SECTIONS["Flags"] if row.state == state]
    known = {flag for flag in named if flag in parser._option_string_actions}
    assert sorted(known) == (sorted(named) if state in HERE else [])
    if state == "refused":
        for flag in named:
            with pytest.raises(SystemExit):
                parser.parse_args([flag])
            assert f"error: {flag}: " in capsys.readouterr().err


def test_knobs_have_the_variables() -> None:
    read = {knob["horovod"] for knob in _core.knobs()}
    for module in (environment, description, cli):
        read |= set(re.findall(r'"(HOROVOD_\w+)"', inspect.getsource(module)))
    for row in SECTIONS["Variables that Horovod reads"]:
        assert (row.name in read) == (row.state in HERE), row


def test_ranks_get_the_variables() -> None:
    script = [sys.executable, "-c", "import os; print(*os.environ)"]
    result = run_launcher("-np", "1", "--network-interfaces", "lo", *script)
    given = result.stdout.split()
    for row in SECTIONS["Variables that ranks get"]:
        assert (row.name in given) == (row.state in HERE), row


def test_alias_package_answers_for_the_modules() -> None:
    from hvdlite.compat import AliasFinder

    for row in SECTIONS["The rest"]:
        try:
            spec = AliasFinder().find_spec(row.name)
        except ModuleNotFoundError:
            spec = None
        assert (spec is not None) == (row.state in HERE), row
