"""Many scenarios in one world: starting ranks and importing a framework takes the most time.

A test file has functions `scenario_x()` that run on every rank and assert, and a function, `body`,
that is one rank: `run_all(globals())` in it runs them in order. `make_tests` makes of both one
test for each scenario and each world, which fails with what went wrong in that scenario.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from harness import RankResult, run_world
from hvdlite import basics

PREFIX = "scenario_"


class Later:
    """A module that is imported at the first use of an attribute: by the ranks, not by pytest."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest and its plugins look for attributes of their own in all that a test file holds.
        private = attribute.startswith("_") and attribute != "__version__"
        if private or attribute in ("pytestmark", "is_hypothesis_test"):
            raise AttributeError(attribute)
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
    warnings.filterwarnings("ignore", "This DataLoader will create")  # on a single core
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
        except (Exception, pytest.fail.Exception):  # `pytest.raises` that saw nothing
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


Worlds = Mapping[str, Mapping[str, Any]]  # by name in the tests' ids: arguments of `run_world`


def sizes(*sizes: int) -> Worlds:
    """Make worlds of one host with so many ranks."""
    return {str(size): {"n": size} for size in sizes}


def on_hosts(*placements: list[int]) -> Worlds:
    """Make worlds whose ranks play these hosts."""
    return {str(hosts): {"n": len(hosts), "hosts": hosts} for hosts in placements}


def cheapest(worlds: Worlds) -> str:
    """Return the name of the smallest world of several ranks, on several hosts if any world is."""
    hosts = {name: len({*(world.get("hosts") or [0])}) for name, world in worlds.items()}
    most = min(2, max(hosts.values()))
    several = [name for name, world in worlds.items() if world["n"] > 1 and hosts[name] >= most]
    return min(several or worlds, key=lambda name: worlds[name]["n"])


def make_tests(
    body: Callable[[], Any], worlds: Worlds, quick: Collection[str] = (), **options: Any
) -> Callable[..., None]:
    """Make a test for each scenario above and each world; a world is run once.

    Args:
        body: runs the scenarios of its file in one rank.
        worlds: in which they are run.
        quick: the names of those that `make test` runs, too; if there are none, `cheapest`.
        options: further arguments of `run_world`.

    Example:
        >>> test_tape = make_tests(body, sizes(1, 3), timeout=60)
    """
    chosen = quick or [cheapest(worlds)]
    assert {*chosen} <= {*worlds}, f"not among the worlds: {chosen}"
    starts = [
        pytest.param(
            functools.partial(run_world, body=body, **world, **options),
            id=name,
            marks=() if name in chosen else pytest.mark.long,
        )
        for name, world in worlds.items()
    ]

    @pytest.mark.parametrize("name", names_in(body.__globals__))
    @pytest.mark.parametrize("results", starts, indirect=True)
    def test(results: list[RankResult], name: str) -> None:
        check(results, name)

    return test


def raises(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    """Expect an error whose message has this text, a regular expression."""
    return pytest.raises(kind, match=text)


def tensors_sent_by(call: Callable[[], Any]) -> int:
    """Count the tensors that were sent between the ranks during a call."""

    begin = basics.engine().counters()["tensors"]
    call()
    return int(basics.engine().counters()["tensors"] - begin)
