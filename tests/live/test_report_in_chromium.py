"""The report of a job in a real browser."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.live.record import Record
from hvdlite.live.report import write
from hvdlite.live.sample import Event
from hvdlite.live.viewer import About, End
from live.made_up_run import BEGAN, MadeUpJob

pytestmark = pytest.mark.page

HOSTILE = "<img src=x onerror=\"document.title='taken'\"></style><script>alert(1)</script>"


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab without network, whose `said` is what its console said."""
    context = browser.new_context(viewport={"width": 1000, "height": 900}, offline=True)
    page = context.new_page()
    page.said = []
    page.on("console", lambda said: page.said.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: page.said.append(f"exception: {error}"))
    page.on("dialog", lambda dialog: page.said.append(f"dialog: {dialog.message}"))
    yield page
    context.close()


def make_report(job: MadeUpJob, end: End, folder: Path) -> str:
    about = About(("python", "train.py", HOSTILE), 3, ("node1",), 0.0)
    record = Record.of(job.run, about, end, time.monotonic(), 60.0, None)
    assert record.figures is not None
    assert math.isfinite(record.origin)
    write(record, folder / "out.html")
    return (folder / "out.html").as_uri()


def test_the_report_shows_words_table_charts_and_events(tab: Any, tmp_path: Path) -> None:
    job = MadeUpJob(3, seconds=60, hosts=("node1", "node1", "node2"))
    job.say((Event(BEGAN + 20, "tuned", -1, "", "all ranks use 64 MiB"),))
    tab.goto(make_report(job, End(0, ""), tmp_path))
    assert "The job succeeded: 3 ranks on 2 hosts" in tab.locator("body").inner_text()
    assert tab.locator("ol.findings li").count() >= 1
    assert tab.locator("tbody").first.locator("tr").count() == 3
    assert tab.locator("svg").bounding_box()["height"] > 400
    assert tab.locator("svg text", has_text="seconds since hvd.init()").count() == 1
    assert "all ranks use 64 MiB" in tab.locator("table").last.inner_text()
    assert tab.said == []


def test_letters_of_the_charts_can_be_read_on_a_narrow_screen(tab: Any, tmp_path: Path) -> None:
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.goto(make_report(MadeUpJob(3, seconds=60), End(0, ""), tmp_path))
    title = tab.locator("svg text", has_text="seconds since hvd.init()")
    assert title.bounding_box()["height"] >= 8
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_hostile_names_are_text_in_a_browser(tab: Any, tmp_path: Path) -> None:
    job = MadeUpJob(3, seconds=10, hosts=(HOSTILE, "$\\frac{$", "node2"))
    job.say((Event(BEGAN + 5, "stall", 1, HOSTILE, HOSTILE),))
    tab.goto(make_report(job, End(1, HOSTILE), tmp_path))
    assert tab.title() == "train.py: report"
    assert tab.locator("img").count() == tab.locator("script").count() == 0
    assert tab.locator("body").inner_text().count("<script>alert(1)</script>") >= 5
    assert tab.locator("svg").count() == 1
    assert tab.said == []
