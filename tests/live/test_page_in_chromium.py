"""The page of a job in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from faults.ports import free_port
from hvdlite.live.sample import Event, Stall
from hvdlite.live.viewer import End
from live.made_up_run import BEGAN, MadeUpJob
from patience import HANG

pytestmark = pytest.mark.page

Serve = Callable[..., Any]
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>alert(1)</script>"


class Tab:
    """A tab of the browser, and what its console said."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(1000 * HANG)
        self.console: list[str] = []
        self.page.on("console", lambda said: self.console.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.console.append(f"exception: {error}"))
        self.page.on("dialog", lambda dialog: self.console.append(f"dialog: {dialog.message}"))

    def open(self, served: Any) -> None:
        self.page.goto(served.url)
        self.wait_for_status("live")

    def wait_for_status(self, text: str) -> None:
        self.page.locator("#status", has_text=text).wait_for()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield Tab(context)
    context.close()


def test_the_page_shows_the_job(serve: Serve, tab: Tab) -> None:
    job = MadeUpJob(3, seconds=60, hosts=("node1", "node1", "node2"))
    event = Event(BEGAN + 20, "stall", 2, "layer.weight", "layer.weight waits for rank 2")
    job.say((event,), (Stall("layer.weight", 12.0, (0, 1), (2,)),))
    served = serve(job.run)
    tab.open(served)
    assert "token" not in tab.page.url
    headline = tab.text("#headline")
    assert f"{served.run.figures(10, time.monotonic()).total_steps:,}" in headline
    assert "loss" in headline
    assert tab.page.locator("#ranks tr:not(.note)").count() == 3
    assert tab.text("#ranks tr:nth-child(5) th") == "2"
    assert "node2" in tab.text("#ranks tr:nth-child(5)")
    assert "ranks 0, 1 for 12 s; missing: rank 2" in tab.text("#stalled")
    assert "0:00:20" in tab.text("#events")
    assert "layer.weight waits for rank 2" in tab.text("#events")
    for name in ("bars", "step", "samples", "bytes"):
        pixels = tab.page.evaluate(
            "id => { const c = document.getElementById(id);"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " return d.filter((one, i) => i % 4 === 3 && one).length; }",
            name,
        )
        assert pixels > 1000, f"the chart {name} is empty"
    assert tab.console == []


def test_the_page_follows_the_job(serve: Serve, tab: Tab) -> None:
    job = MadeUpJob(1, seconds=5)
    tab.open(serve(job.run))
    assert tab.page.locator("#stalled-box").is_hidden()
    job.say((Event(BEGAN, "tuned", -1, "", "fusion_threshold is 32 MiB"),))
    tab.page.locator("#events", has_text="fusion_threshold is 32 MiB").wait_for()
    job.next_epoch(2)
    job.say()
    tab.page.locator("#ranks tr:nth-child(3) th", has_text="1").wait_for()
    assert tab.console == []


def test_hostile_names_stay_text(serve: Serve, tab: Tab) -> None:
    job = MadeUpJob(2, seconds=5, hosts=(HOSTILE, "node2"))
    sample = job.run.latest()[1]
    values = {HOSTILE: 1.0}
    job.run.add(type(sample)(**{**vars(sample), "values": values}), time.monotonic())
    job.say((Event(BEGAN, HOSTILE, 1, HOSTILE, HOSTILE),), (Stall(HOSTILE, 1.0, (0,), (1,)),))
    served = serve(job.run)
    tab.open(served)
    for selector in ("#ranks", "#events", "#stalled"):
        assert HOSTILE in tab.text(selector)
    assert tab.page.locator("main img, main script").count() == 0
    assert tab.page.title().endswith("hvdlite")
    served.page.stop(End(1, HOSTILE))
    tab.wait_for_status("the job has ended")
    assert HOSTILE in tab.text("#status")
    assert tab.console == []


def test_a_browser_without_the_token_is_told_where_to_get_it(serve: Serve, tab: Tab) -> None:
    served = serve(MadeUpJob(1, seconds=5).run)
    answer = tab.page.goto(served.listener.address)
    assert answer.status == 401
    assert "Open the whole address" in tab.text("body")
    assert tab.page.goto(served.listener.address + "?token=wrong").status == 401
    tab.open(served)
    assert tab.page.reload().status == 200  # by the cookie
    tab.wait_for_status("live")
    assert tab.page.evaluate("document.cookie") == "", "scripts must not see the cookie"


def test_the_page_says_how_the_job_ended_and_keeps_its_last_state(
    serve: Serve, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlite.live.page._RETRY", 0.1)
    served = serve(MadeUpJob(2, seconds=5).run)
    tab.open(served)
    before = tab.text("#headline")
    served.page.stop(End(1, "rank 1 was killed by signal 9"))
    tab.wait_for_status("the job has ended: rank 1 was killed by signal 9")
    time.sleep(1)  # A browser would have tried to connect again by now.
    assert tab.text("#headline") == before
    assert tab.page.locator("#ranks tr:not(.note)").count() == 2
    assert tab.console == []


def cut(served: Any, tab: Tab) -> None:
    """Cut the network of the browser."""
    tab.page.context.set_offline(True)
    for one in list(served.page._server.server_state.connections):
        served.page._loop.call_soon_threadsafe(one.transport.abort)
    tab.wait_for_status("the connection is lost; trying again")


@pytest.mark.long
def test_a_lost_connection_comes_back(serve: Serve, tab: Tab) -> None:
    served = serve(MadeUpJob(2, seconds=5).run)
    tab.open(served)
    cut(served, tab)
    assert tab.page.locator("#ranks tr:not(.note)").count() == 2
    tab.page.context.set_offline(False)
    tab.wait_for_status("live")
    assert [line for line in tab.console if "net::ERR" not in line] == []


@pytest.mark.long
def test_a_page_that_misses_the_end_of_the_job_gives_up(
    serve: Serve, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlite.live.page._RETRY", 0.1)
    served = serve(MadeUpJob(2, seconds=5).run)
    tab.open(served)
    cut(served, tab)
    served.page.stop(End(0, ""))
    tab.page.context.set_offline(False)
    tab.wait_for_status("the job does not answer any more; what you see is the last that it said")
    assert tab.page.locator("#ranks tr:not(.note)").count() == 2
    # The browser itself prints a line for each connection that it cannot make, and no more comes.
    assert [line for line in tab.console if "net::ERR" not in line] == []
    refused = len(tab.console)
    time.sleep(1)
    assert len(tab.console) == refused


def test_a_page_of_another_job_is_told_so(serve: Serve, tab: Tab, monkeypatch: Any) -> None:
    monkeypatch.setattr("hvdlite.live.page._RETRY", 0.1)
    address = f"127.0.0.1:{free_port()}"
    served = serve(MadeUpJob(2, seconds=5).run, address=address)
    tab.open(served)
    cut(served, tab)
    served.page.stop(End(0, ""))
    serve(MadeUpJob(1, seconds=5).run, address=address)
    tab.page.context.set_offline(False)
    tab.wait_for_status("this browser is not let in")
    assert tab.page.locator("#ranks tr:not(.note)").count() == 2


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_and_can_be_read(
    serve: Serve, browser: Any, scheme: str, width: int
) -> None:
    job = MadeUpJob(4, seconds=20, hosts=("a-rather-long-name-of-a-host.cluster.example", "node2"))
    job.say((Event(BEGAN, "stall", 2, "x" * 200, "x" * 200),), (Stall("x" * 200, 1, (0,), (1,)),))
    served = serve(job.run)
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    tab = Tab(context)
    tab.open(served)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    faint = tab.page.evaluate(CONTRAST)
    assert faint == [], "text that is hard to read"
    for table in tab.page.locator("table").all():
        assert table.locator("thead th[scope=col]").count() > 3
    assert tab.console == []
    context.close()


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
  for (const node of document.body.querySelectorAll("*")) {
    if (![...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${node.tagName} ${node.textContent.trim()}: ${contrast}`);
  }
  return faint;
}"""
