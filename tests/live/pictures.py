"""Take pictures of a report, to look at, and for docs/live.md.

    python tests/live/pictures.py FOLDER

They show a made-up job while it runs and at its end, at two widths, in light and dark. The picture
of docs/live.md is live_report.png: on a phone, to the end of the phases.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvdlite.live.record import Record
from hvdlite.live.report import write
from hvdlite.live.sample import Event
from hvdlite.live.viewer import About, End
from live.made_up_run import BEGAN, MadeUpJob

_SIZES = ((1280, 900), (400, 800))


def make_job() -> MadeUpJob:
    """A job of two minutes on two hosts, of which the last rank is late."""
    job = MadeUpJob(4, 100, ("node1", "node1", "node2", "node2"))
    tuned = "fusion_threshold is 32 MiB and cycle_time 1 ms from now on"
    name = "encoder.layers.11.weight"
    stall = f"{name} has waited 10 s for rank 3"
    job.say((Event(BEGAN + 31, "tuned", -1, "", tuned), Event(BEGAN + 77, "stall", 3, name, stall)))
    return job


def keep(page: Any, path: Path, **part: Any) -> None:
    """Take a picture of a page, or of a part of it, in few colours."""
    page.screenshot(path=path, full_page=True, **part)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    """Write the reports, and take the pictures."""
    folder = Path(sys.argv[1])
    job = make_job()
    about = About(("python", "train.py"), 4, ("node1", "node2"), time.time() - 101)
    with sync_playwright() as running:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = running.chromium.launch(executable_path=program, args=flags)
        for state, end in (("running", None), ("ended", End(0, ""))):
            file = folder / f"report_{state}.html"
            record = Record.of(job.run, about, end, time.monotonic(), 101.0, None)
            write(record, file, late=1e6)
            for scheme in ("light", "dark"):
                for width, height in _SIZES:
                    page = browser.new_page(
                        viewport={"width": width, "height": height}, color_scheme=scheme
                    )
                    page.goto(file.as_uri())
                    keep(page, folder / f"report_{state}_{scheme}_{width}.png")
                    if (state, scheme, width) == ("running", "light", 400):
                        bars = page.locator("figure").first.bounding_box()
                        frame = {
                            "x": 0,
                            "y": 0,
                            "width": width,
                            "height": bars["y"] + bars["height"] + 12,
                        }
                        keep(page, folder / "live_report.png", clip=frame)
                    page.close()
        browser.close()


if __name__ == "__main__":
    main()
