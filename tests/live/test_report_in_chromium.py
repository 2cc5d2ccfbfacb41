"""The report of a job in a real browser: while the job runs, when it is killed, and to be read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hvdlite.live.report import Record, write
from hvdlite.live.run import About, End, Run
from hvdlite.live.sample import Event, Stall
from live.made_up_run import BEGAN, FIRST, make_run
from patience import HANG

pytestmark = pytest.mark.page

HOSTILE = "<img src=x onerror=\"document.title='taken'\"></style><script>alert(1)</script>"


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab without network, whose `said` is what its console said."""
    context = browser.new_context(viewport={"width": 1000, "height": 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(1000 * HANG)
    page.said = []
    page.on("console", lambda said: page.said.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: page.said.append(f"exception: {error}"))
    page.on("dialog", lambda dialog: page.said.append(f"dialog: {dialog.message}"))
    yield page
    context.close()


def make_report(run: Run, end: End | None, folder: Path, late: float = HANG) -> str:
    about = About(("python", "train.py", HOSTILE), 3, ("node1",), 0.0)
    record = Record.of(run, about, end, FIRST + 30, 60.0)
    assert record.figures is not None
    assert math.isfinite(record.origin)
    write(record, folder / "out.html", late)
    return (folder / "out.html").as_uri()


def test_it_follows_the_job_where_its_reader_is(tab: Any, tmp_path: Path) -> None:
    tab.set_viewport_size({"width": 400, "height": 500})
    run = make_run(30, 40)
    tab.goto(make_report(run, None, tmp_path))
    assert "running, written" in tab.locator("#status").inner_text()
    tab.evaluate("scrollTo(0, 700); document.querySelector('.scroll').scrollTo(0, 300)")
    run.note(Event(BEGAN, "tuned", -1, "", "fusion_threshold is 32 MiB"))
    make_report(run, None, tmp_path)
    tab.locator("#events", has_text="fusion_threshold is 32 MiB").wait_for(state="attached")
    where = "[scrollY, document.querySelector('.scroll').scrollTop]"
    tab.wait_for_function(f"() => String({where}) === '700,300'")
    make_report(run, End(1, "rank 1 was killed by signal 9"), tmp_path)
    ended = "The job ended with status 1: rank 1 was killed by signal 9"
    tab.locator("#status", has_text=ended).wait_for()
    tab.evaluate("window.stays = true")
    time.sleep(4)  # A page of a job that runs would have loaded itself again by now.
    assert tab.evaluate("window.stays")
    assert tab.said == []


def test_a_selection_is_not_taken_away(tab: Any, tmp_path: Path) -> None:
    tab.goto(make_report(make_run(), None, tmp_path))
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    time.sleep(4)
    assert tab.evaluate("String(getSelection())") == "train.py"
    with tab.expect_navigation():
        tab.evaluate("getSelection().removeAllRanges()")
    assert tab.said == []


def test_a_reader_sees_that_it_is_not_written_any_more(tab: Any, tmp_path: Path) -> None:
    """And sees it also where the clock of the browser is not that of the job."""
    run = make_run()
    address = make_report(run, None, tmp_path, late=0.0)
    tab.goto(address)
    late = tab.locator("#status.lost", has_text="the job has been killed, or cannot write")
    late.wait_for()
    assert "written " in late.inner_text()
    assert tab.locator("#ranks tbody tr:not(.note, .bar)").count() == 2
    text = (tmp_path / "out.html").read_text()
    earlier = f'data-written="{1000 * (time.time() - 3600):.0f}" data-late="{HANG:.0f}"'
    (tmp_path / "out.html").write_text(re.sub(r'data-written="\d+" data-late="0"', earlier, text))
    tab.locator("#status.running").wait_for()  # A newer state has come.
    assert tab.said == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_it_fits_its_window_and_can_be_read(
    browser: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    stalls = (Stall("x" * 200, 1, (0,), (1,)),)
    run = make_run(30, 4, {"stalled": stalls}, host="a-rather-long-name-of-a-host.cluster.example")
    for second in (2, 22, 23, 29):
        run.note(Event(BEGAN + second, "stall", 2, "x" * 200, "x" * 200))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(make_report(run, None, tmp_path))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    labels = page.locator("figure").first.locator(".labels span")
    assert labels.all_inner_texts() == ["stall", "stall (3)"]
    boxes = [label.bounding_box() for label in labels.all()]
    assert all(a["x"] + a["width"] < b["x"] for a, b in pairwise(boxes)), "labels overlap"
    assert page.evaluate(CONTRAST) == [], "text that is hard to read"
    sizes = "(all) => all.map((one) => parseFloat(getComputedStyle(one).fontSize))"
    assert min(page.locator("body :not(script):not(rect)").evaluate_all(sizes)) >= 11
    page.close()


# Texts whose contrast against the background is below 4.5, as WCAG 2.1 AA asks.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((one) => {
    one /= 255;
    return one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.body.querySelectorAll(":not(title):not(script)")) {
    if (![...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${node.tagName} ${node.textContent.trim()}: ${contrast}`);
  }
  return faint;
}"""
