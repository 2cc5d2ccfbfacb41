"""Fixtures for all tests: the session fails if tests leave processes or shared memory behind.

Some tests look at pages in a browser.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkserver import close_nurseries
from harness import shm_entries
from pythons import close_pythons

_SETTLE = 20.0  # seconds


def _children() -> set[int]:
    """List the live descendants of this process."""
    found: set[int] = set()
    frontier = [os.getpid()]
    while frontier:
        parent = frontier.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
            texts = [Path(f"/proc/{parent}/task/{t}/children").read_text() for t in threads]
        except OSError:
            continue  # It has ended.
        for pid in map(int, " ".join(texts).split()):
            found.add(pid)
            frontier.append(pid)
    return found


def _new_shm_entries(before: set[str]) -> set[str]:
    return {name for name in shm_entries() - before if "hvdlite" in name}


def pytest_configure(config: pytest.Config) -> None:
    """Set the default signal handlers, since nohup and background jobs make some ignored."""
    if importlib.util.find_spec("hypothesis") is not None:  # A machine with a GPU may lack it.
        from hypothesis import HealthCheck, settings

        # How long an example takes says nothing on a crowded machine.
        patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("patient", patient)
        settings.load_profile("patient")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look for garbage neither while tests are collected nor, later, in what this has made.

    The time to collect all tests is 40 % shorter so.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_PAGES = "test_docs_snippets.py::"  # each page is a test, which may take a minute
# Each of these folders is one worker's, which imports TensorFlow once for all of their worlds.
_FOLDERS = ("tests/parallel/keras/", "tests/parallel/tensorflow/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: (_PAGES not in item.nodeid, not item.nodeid.startswith(_FOLDERS)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `--dist loadfile`, give a file's tests to one worker, but each page to any."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if _PAGES in nodeid:
                return nodeid
            folder = next((one for one in _FOLDERS if nodeid.startswith(one)), None)
            return folder or super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail if the tests left processes or shared memory behind."""
    children_before, shm_before = _children(), shm_entries()
    yield
    close_nurseries()
    close_pythons()
    deadline = time.monotonic() + _SETTLE
    while True:
        children = _children() - children_before
        entries = _new_shm_entries(shm_before)
        if not (children or entries) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not children, f"tests left processes: {sorted(children)}"
    assert not entries, f"tests left shared memory: {sorted(entries)}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, one for all tests of a file."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is missing")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()
