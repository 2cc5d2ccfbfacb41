"""Take the picture of docs/live.md from a report: on a phone, to the end of the ranks.

hvdlite-run -np 4 --report out.html python train.py
python tests/live/pictures.py out.html docs/live_report.png
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

_WIDTH, _HEIGHT = 400, 800


def main() -> None:
    """Take the picture, in few colours."""
    report, picture = map(Path, sys.argv[1:])
    with sync_playwright() as running:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = running.chromium.launch(executable_path=program, args=flags)
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(report.resolve().as_uri())
        ranks = page.locator("#ranks").bounding_box()
        assert ranks is not None
        frame = {"x": 0, "y": 0, "width": _WIDTH, "height": ranks["y"] + ranks["height"] + 12}
        page.screenshot(path=picture, full_page=True, clip=frame)
        browser.close()
    Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main()
