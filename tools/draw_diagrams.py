"""Draw the diagrams of the pages for the site (after a change to one of them).

    python tools/draw_diagrams.py mermaid.min.js

A git host draws the ```mermaid fences itself. The site shows pictures, docs/pictures/diagram_*.svg,
so that a reader's browser neither fetches nor runs Mermaid. A picture is named for the text of its
diagram: the site does not build while one is missing. The argument is the file of that name in the
package `mermaid`; Chromium runs it here.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from playwright.sync_api import sync_playwright

from docs_site.conf import MERMAID, picture_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
_DRAW = """async text => {
  mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false,
    fontFamily: "Helvetica, Arial, sans-serif", deterministicIds: true,
    flowchart: {htmlLabels: false, useMaxWidth: false, rankSpacing: 30, wrappingWidth: 300},
    sequence: {mirrorActors: false, useMaxWidth: false, wrap: true, width: 100, actorMargin: 30}});
  return (await mermaid.render("diagram", text)).svg;
}"""


def diagrams() -> dict[str, str]:
    """Return the texts of all diagrams, by the names of their pictures."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))]
    texts = [fence[1] for page in pages for fence in MERMAID.finditer(page)]
    return {picture_of(text): text for text in texts}


def main() -> None:
    """Draw what is missing, and remove the pictures of diagrams that are not there any more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mermaid", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    folder, wanted = DOCS / "pictures", diagrams()
    folder.mkdir(exist_ok=True)
    for picture in folder.glob("diagram_*.svg"):
        if picture.name not in wanted:
            picture.unlink()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=given.chromium, args=["--no-sandbox"], headless=True
        )
        page = browser.new_page()
        page.set_content("<!doctype html><body></body>")
        page.add_script_tag(path=given.mermaid)
        for name, text in wanted.items():
            if not (folder / name).is_file():
                picture = page.evaluate(_DRAW, text)
                (folder / name).write_text(re.sub(r"\s+\n", "\n", picture) + "\n", encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main()
