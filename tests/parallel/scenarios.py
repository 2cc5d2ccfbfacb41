"""Many scenarios in one world: starting ranks and importing a framework takes the most time.

A test file has functions `scenario_x()` that run on every rank and assert; `run_all(globals())`
runs them in order, and `check(results, name)` fails with the traceback of a scenario.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness import RankResult
from hvdlite import basics

PREFIX = "scenario_"


class Later:
    """A module that is imported at the first use of an attribute: by the ranks, not by pytest."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def names_in(namespace: dict[str, Any]) -> list[str]:
    """List the scenarios of a test file, in the order of the file."""
    return [name for name in namespace if name.startswith(PREFIX)]


def run_all(
    namespace: dict[str, Any],
    start: Callable[[], None] = basics.init,
    before_each: Callable[[], object] = lambda: None,
    forms: Sequence[Callable[[Any], Any]] = (),
) -> dict[str, str]:
    """Run the scenarios on this rank; return each one's traceback, "" if it passed.

    After a failure the ranks may be out of step, so the others are not run.

    Args:
        namespace: the globals of the test file.
        start: begins the world.
        before_each: is called before each scenario.
        forms: a scenario with an argument is called once with each of them.
    """
    start()
    warnings.simplefilter("error")
    outcomes = {}
    for name in names_in(namespace):
        outcomes[name] = ""
        try:
            before_each()
            scenario = namespace[name]
            takes_form = bool(inspect.signature(scenario).parameters)
            for arguments in [(form,) for form in forms] if takes_form else [()]:
                scenario(*arguments)
            basics.engine().barrier(f"after.{name}").wait()
        except Exception:
            outcomes[name] = traceback.format_exc()
            break
    basics.shutdown()
    return outcomes


def check(results: Sequence[RankResult], name: str) -> None:
    """Fail with every rank's traceback unless a scenario passed on all ranks."""
    failures = [
        f"rank {result.rank}: {(result.value or {}).get(name, 'not reached')}"
        for result in results
        if (result.value or {}).get(name, "not reached")
    ]
    assert not failures, "\n".join(failures)


@contextlib.contextmanager
def heard_from(logger_name: str) -> Iterator[list[str]]:
    """Collect the messages of a logger, at INFO and above."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def tensors_sent_by(call: Callable[[], Any]) -> int:
    """Count the tensors that were sent between the ranks during a call."""

    def count() -> int:
        time.sleep(0.05)  # the engine publishes its counts at the end of a cycle
        return basics.engine().counters()["tensors"]

    begin = count()
    call()
    return count() - begin
