"""Take pictures of the built site, to look at, and for CONTRIBUTING.md.

    python tools/site_pictures.py build/site docs/pictures

They show two pages at two widths, in light and dark. Chromium takes them, as in the tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

_PICTURES = (
    ("index", "light", 1280),
    ("api/torch", "dark", 1280),
    ("troubleshooting", "light", 400),
    ("architecture", "dark", 400),
)


def take(browser: Any, site: Path, folder: Path) -> None:
    """Take all pictures into a folder."""
    for name, scheme, width in _PICTURES:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.goto((site / "html" / f"{name}.html").resolve().as_uri())
        path = folder / f"site_{name.rsplit('/', 1)[-1]}_{scheme}_{width}.png"
        page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
        context.close()


def main() -> None:
    """Take the pictures of the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=given.chromium, args=arguments)
        take(browser, given.site, given.folder)
        browser.close()


if __name__ == "__main__":
    main()
