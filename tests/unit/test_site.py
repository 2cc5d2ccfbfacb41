"""The site of docs/ builds without a warning, links its names, and fetches nothing."""

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

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long  # They build the whole site.
pytest.importorskip("furo", reason="the extra `docs` is missing: pip install 'hvdlite[docs]'")


def build(root: Path, html: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a repository as `make docs-site` does."""
    options = ["-q", "-E", "-W", "--keep-going", "-c", "tools/docs_site"]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-d", html.parent / "doctrees", ".", html],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    html = tmp_path_factory.mktemp("site") / "html"
    result = build(ROOT, html)
    assert result.returncode == 0, result.stdout + result.stderr
    return html


def test_a_page_links_the_names_that_it_mentions(site: Path) -> None:
    page = (site / "docs" / "uneven_data.html").read_text(encoding="utf-8")
    assert 'href="api/torch.html#hvd-join"' in page
    page = (site / "docs" / "keras.html").read_text(encoding="utf-8")
    assert 'href="api/keras.html#hvd-distributedoptimizer"' in page


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
    for name in ("index", "api/keras", "horovod", "architecture", "troubleshooting"):
        page.goto(f"{address}docs/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0, name
    page.goto(f"{address}search.html?q=broadcast_optimizer_state")
    found = page.locator("#search-results a[href$='torch.html#hvd-broadcast-optimizer-state']")
    found.first.wait_for()
    assert said == []
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    context.close()


INDEX = "# A\n\n## Start\n\n- [One](one.md): all\n"
BROKEN = """
# One

[anchor](two.md#not-there) and [page](three.md)

```mermaid
A
```
"""


def write_pages(root: Path, **texts: str) -> None:
    shutil.copytree(ROOT / "tools" / "docs_site", root / "tools" / "docs_site")
    (root / "docs").mkdir()
    (root / "pyproject.toml").write_text('version = "1"\n')
    for name, text in texts.items():
        (root / "docs" / f"{name}.md").write_text(text)


def test_a_broken_page_fails_the_build(tmp_path: Path) -> None:
    write_pages(tmp_path, index=INDEX, one=BROKEN, two="# Two\n")
    result = build(tmp_path, tmp_path / "site" / "html")
    assert result.returncode != 0
    for problem in ("'not-there'", "'three.md'", "docs/pictures/diagram_", "docs/two.md: WARNING"):
        assert problem in result.stderr


def test_a_line_that_begins_with_a_percent_sign_is_shown(tmp_path: Path) -> None:
    write_pages(tmp_path, index=INDEX, one="# One\n\nIt takes 4\n% of the time.\n")
    result = build(tmp_path, tmp_path / "site" / "html")
    assert result.returncode == 0, result.stdout + result.stderr
    page = tmp_path / "site" / "html" / "docs" / "one.html"
    assert "It takes 4\n% of the time." in page.read_text(encoding="utf-8")
