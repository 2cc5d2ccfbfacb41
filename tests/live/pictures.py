"""Take pictures of the live page, to look at, and for docs/live.md.

    python tests/live/pictures.py FOLDER

They show a made-up job at two widths, in light and dark. The picture of docs/live.md is
live_page.png, the first frame on a phone.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvdlite.live.listener import open_listener
from hvdlite.live.page import Page
from hvdlite.live.sample import Event
from hvdlite.live.viewer import About, End
from live.made_up_run import BEGAN, MadeUpJob

_SIZES = ((1280, 900), (400, 800))
_FRAME = {"x": 0, "y": 0, "width": 400, "height": 1045}  # to the end of the phases


def make_job() -> MadeUpJob:
    """A job of two minutes on two hosts, of which the last rank is late."""
    job = MadeUpJob(4, 100, ("node1", "node1", "node2", "node2"))
    tuned = "fusion_threshold is 32 MiB and cycle_time 1 ms from now on"
    name = "encoder.layers.11.weight"
    stall = f"{name} has waited 10 s for rank 3"
    job.say((Event(BEGAN + 31, "tuned", -1, "", tuned), Event(BEGAN + 77, "stall", 3, name, stall)))
    return job


def take(browser: Any, address: str, folder: Path) -> None:
    """Take all pictures of the page at this address."""
    for scheme in ("light", "dark"):
        for width, height in _SIZES:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page = context.new_page()
            page.goto(address)
            page.locator("#status", has_text="live").wait_for()
            keep(page, folder / f"live_page_{scheme}_{width}.png")
            if (scheme, width) == ("light", _FRAME["width"]):
                keep(page, folder / "live_page.png", clip=_FRAME)
            context.close()


def keep(page: Any, path: Path, **part: Any) -> None:
    """Take a picture of a page, or of a part of it, in few colours."""
    page.screenshot(path=path, full_page=True, **part)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    """Serve the job, and take the pictures."""
    folder = Path(sys.argv[1])
    job, listener, over = make_job(), open_listener(), threading.Event()

    def live() -> None:
        while not over.wait(1):
            job.say()

    page = Page(listener, print)
    page.start(job.run, About(("python", "train.py"), 4, ("node1", "node2"), 0.0))
    ranks = threading.Thread(target=live)
    ranks.start()
    try:
        with sync_playwright() as running:
            program = shutil.which("chromium") or shutil.which("google-chrome")
            flags = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = running.chromium.launch(executable_path=program, args=flags)
            take(browser, f"{listener.address}?token={listener.token}", folder)
            browser.close()
    finally:
        over.set()
        ranks.join()
        page.stop(End(0, ""))


if __name__ == "__main__":
    main()
