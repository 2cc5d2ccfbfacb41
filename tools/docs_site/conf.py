"""Sphinx's settings for the site of the pages (`make docs-site`).

The source is the repository itself, whose pages stay readable on a git host. While Sphinx reads
them, docs/index.md gets the tables of contents, from its lists; diagrams become their pictures, and
names in `code` become links to docs/api. Nothing is imported from hvdlite, and nothing is fetched,
neither now nor by a reader's browser.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_DOCS = _ROOT / "docs"
_INDEX = (_DOCS / "index.md").read_text(encoding="utf-8")
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)

project = "hvdlite"
release = _VERSION.findall((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]
project_copyright = "the authors of hvdlite"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", *re.findall(r"\]\(\.\./(.+?)\)", _INDEX)]
exclude_patterns = [".*", "build", "csrc", "hvdlite", "site"]

myst_heading_anchors = 4
myst_heading_slug_func = "myst_parser.slugs.github_slugify"
myst_disable_syntax = ["myst_line_comment"]  # A line of a page may begin with "%".
smartquotes_action = "D"  # Quotes stay straight; Sphinx writes dashes as --.

html_theme = "furo"
html_title = f"hvdlite {release}"
html_favicon = str(_HERE / "static" / "icon.svg")
html_static_path = [str(_HERE / "static")]
html_extra_path = [str(_HERE / "root")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^### (hvd\S+)$", re.MULTILINE)
_ADAPTER = re.compile(r"^hvdlite\.(torch|tensorflow|keras|numpy)\.")
# A name in `code`, but not in a fence or in a heading, nor where it is a link.
_NAME = re.compile(
    r"^([ \t]*)(`{3,})[^\n]*\n.*?^\1\2[ \t]*$|^#[^\n]*$"
    r"|(?<![`\[])`(?P<name>hvd(?:lite)?\.[\w.]+|\w+(?:Error|Warning|Interrupt))(?:\([^`\n]*\))?`"
    r"(?![`\]])",
    re.MULTILINE | re.DOTALL,
)
_PAGES = {
    page.stem: set(_HEADING.findall(page.read_text(encoding="utf-8")))
    for page in (_DOCS / "api").glob("*.md")
}


def _target(name: str, page: str) -> str | None:
    """Return where docs/api tells of a name that a page mentions."""
    adapter = _ADAPTER.match(name)
    own = adapter[1] if adapter else page if page in _PAGES else "torch"
    name = _ADAPTER.sub("hvd.", name) if "." in name else f"hvd.{name}"
    while "." in name:
        for where in (own, "common", "elastic", "parameter_server", "errors", "running"):
            if name in _PAGES[where]:
                return f"/docs/api/{where}.md#{name.replace('.', '').lower()}"
        name = name.rpartition(".")[0]
    return None


def _tables_of_contents() -> str:
    tables = ""
    for section in _INDEX.split("\n## ")[1:]:
        rows = re.findall(r"^- \[(.+?)\]\((.+?)\.md\)", section, re.MULTILINE)
        entries = "\n".join(f"{title} <{page}>" for title, page in rows)
        caption = section.partition("\n")[0]
        tables += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{entries}\n```\n"
    return tables


def picture_of(diagram: str) -> str:
    """Return the name of the picture of a diagram, which depends on the diagram's text."""
    return f"diagram_{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"


def _read(app: Any, page: str, source: list[str]) -> None:
    """Change the text of a page to what Sphinx shall read."""

    def linked(found: re.Match[str]) -> str:
        target = _target(found["name"], page.rpartition("/")[2]) if found["name"] else None
        return f"[{found[0]}]({target})" if target else found[0]

    def drawn(found: re.Match[str]) -> str:
        return f"![The diagram of this section](/docs/pictures/{picture_of(found[1])})"

    source[0] = _NAME.sub(linked, MERMAID.sub(drawn, source[0]))
    if page == root_doc:
        source[0] += _tables_of_contents()


def setup(app: Any) -> None:
    """Have Sphinx call `_read`."""
    app.connect("source-read", _read)
