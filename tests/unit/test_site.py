"""The site of docs/ builds without a warning, has every public name, and fetches nothing."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from docs_site import reference

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "build_site.py"
pytestmark = pytest.mark.long  # They build the whole site.
pytest.importorskip("furo", reason="the extra `docs` is missing: pip install 'hvdlite[docs]'")


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, folder, "--root", root],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "html"


def test_every_public_name_is_in_the_reference_once(site: Path) -> None:
    listed = reference.listed_names()
    shown = [public.path for public in listed.values()]
    assert sorted(set(shown)) == sorted(shown)
    assert {public.path for public in reference.every_name().values()} - set(shown) == set()
    html = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    assert [path for path in listed if f'id="{path}"' not in html] == []


def test_a_page_links_the_names_that_it_mentions(site: Path) -> None:
    page = (site / "uneven_data.html").read_text(encoding="utf-8")
    assert 'href="api/torch.html#hvdlite.torch.join"' in page
    page = (site / "keras.html").read_text(encoding="utf-8")
    assert 'href="api/keras.html#hvdlite.keras.DistributedOptimizer"' in page


def test_a_reader_s_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>"""
        r"""|@import[^;]*//[^;]*;|url\(["']?(?:https?:)?//[^)]*\)"""
    )
    found = [
        (file.relative_to(site).as_posix(), match[0])
        for file in site.rglob("*")
        if file.suffix in (".html", ".css")
        for match in loads.finditer(file.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_search_knows_the_pages_and_the_names(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "broadcast_optimizer_state" in index
    assert "Troubleshooting" in index


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Write no log."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.page
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (400, "dark")])
def test_pages_fit_the_screen(address: str, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index", "api/torch", "horovod", "architecture", "troubleshooting"):
        page.goto(f"{address}{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0, name
    page.goto(f"{address}search.html?q=broadcast_optimizer_state")
    first = page.locator("#search-results li a").first
    assert first.get_attribute("href").endswith("#hvdlite.torch.broadcast_optimizer_state")
    assert said == []
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    context.close()


INDEX = "# A\n\n## Start\n\n- [One](one.md): all\n"
BROKEN = {
    "anchor": ("one.md", "# One\n\n[x](one.md#not-there)\n", "not-there"),
    "page": ("one.md", "# One\n\n[x](two.md)\n", "docs/one.md links two.md"),
    "folder": ("one.md", "# One\n\n[x](../docs)\n", "docs/one.md links ../docs"),
    "page without a place": ("two.md", "# Two\n", "two.md: give it a row"),
    "name": ("one.md", "# One\n\n```api hvdlite.torch\nallredcue\n```\n", "allredcue"),
    "diagram without a picture": ("one.md", "# One\n\n```mermaid\nA\n```\n", "draw_diagrams"),
}


def test_a_line_that_begins_with_a_percent_sign_is_shown(tmp_path: Path) -> None:
    docs = tmp_path / "root" / "docs"
    docs.mkdir(parents=True)
    (docs / "index.md").write_text(INDEX)
    (docs / "one.md").write_text("# One\n\nIt takes 4\n% of the time.\n")
    result = build(tmp_path / "site", tmp_path / "root")
    assert result.returncode == 0, result.stdout + result.stderr
    shown = (tmp_path / "site" / "html" / "one.html").read_text(encoding="utf-8")
    assert "It takes 4\n% of the time." in shown


@pytest.mark.parametrize("page, text, said", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_page_fails_the_build(tmp_path: Path, page: str, text: str, said: str) -> None:
    docs = tmp_path / "root" / "docs"
    docs.mkdir(parents=True)
    (docs / "index.md").write_text(INDEX)
    (docs / "one.md").write_text("# One\n")
    (docs / page).write_text(text)
    result = build(tmp_path / "site", tmp_path / "root")
    assert result.returncode != 0
    assert said in result.stdout + result.stderr
    shutil.rmtree(tmp_path)
