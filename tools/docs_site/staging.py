"""Copy the pages of docs/ to where Sphinx reads them, with what a git host does not need.

A page stays readable on a git host: it has nothing of Sphinx in it. Here the pages get the tables
of contents, which come from the lists of docs/index.md; links that lead out of docs/ are led to
copies; names in `code` become links to the reference; and diagrams become pictures.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, relpath

from docs_site.docstrings import referring
from docs_site.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {".png", ".svg"}

_FENCED = re.compile(r"^([ \t]*)(`{3,})[^\n]*\n.*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_QUALIFIED = re.compile(r"^hvd(lite)?\.|^\w+(Error|Warning|Interrupt)$")
_SPAN = re.compile(r"(?<![`\[])`([^`\n]+)`(?![`\]])")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ROW = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)
MERMAID = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class StagingError(Exception):
    """A page cannot be staged; the message says which, and what to do."""


def sections_of(index: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Give (title, links as pairs of text and file) of each section of docs/index.md."""
    parts = _SECTION.split(index)[1:]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        yield title, _ROW.findall(body)


def staged_name(source: Path, root: Path = ROOT) -> str:
    """Return where a file of the repository is staged, as a path below the site's source."""
    inside = source.relative_to(root)
    if inside.parts[0] == "docs":
        return inside.relative_to("docs").as_posix()
    if source.suffix == ".md":
        return "_".join(inside.with_suffix("").parts).lower() + ".md"
    return f"repository/{inside.as_posix()}"


def outside_fences(text: str, change: re.Pattern[str], by: object) -> str:
    """Substitute in a page, but not in its fenced code."""
    parts: list[str] = []
    end = 0
    for fence in _FENCED.finditer(text):
        parts += [change.sub(by, text[end : fence.start()]), fence[0]]  # type: ignore[call-overload]
        end = fence.end()
    parts.append(change.sub(by, text[end:]))  # type: ignore[call-overload]
    return "".join(parts)


class Staging:
    """The source of the site, in a folder."""

    # Files in the folder that are as they should be are not touched, so that Sphinx reads again
    # only what changed.

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self._folder = folder
        self._root = root
        self._docs = root / "docs"
        self._written: set[Path] = set()
        self._index = (self._docs / "index.md").read_text(encoding="utf-8")
        linked = [link for _, links in sections_of(self._index) for link in links]
        self._titles = {(self._docs / file).resolve(): title for title, file in linked}
        sources = [self._docs / "index.md", *self._titles]
        for source in sources:
            if not source.is_file():
                raise StagingError(f"docs/index.md links {source}, which does not exist")
        self._texts = {source: source.read_text(encoding="utf-8") for source in sources}
        self._reference = Reference(self._texts.values())

    def write(self) -> None:
        """Write all pages and what they show, and remove what is not part of the site any more."""
        missing = set(self._docs.rglob("*.md")) - set(self._texts)
        if missing:
            names = ", ".join(sorted(self._name(page) for page in missing))
            raise StagingError(f"{names}: give it a row in one of the lists of docs/index.md")
        for source, text in self._texts.items():
            self._put(self._name(source), self._staged(source, text).encode())
        for picture in self._docs.rglob("*"):
            if picture.suffix in PICTURES:
                self._put(self._name(picture), picture.read_bytes())
        for path in [*self._folder.rglob("*")]:
            if path.is_file() and path not in self._written:
                path.unlink()

    def _name(self, source: Path) -> str:
        return staged_name(source, self._root)

    def _put(self, name: str, content: bytes) -> None:
        path = self._folder / name
        self._written.add(path)
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _staged(self, source: Path, text: str) -> str:
        """Return the text of a page as Sphinx reads it."""

        def relinked(match: re.Match[str]) -> str:
            shown, link, anchor = match[1], match[2], match[3] or ""
            target = (source.parent / link).resolve()
            if shown == target.name:
                shown = self._titles.get(target, shown)
            return f"[{shown}]({self._target(source, link)}{anchor})"

        def named(match: re.Match[str]) -> str:
            if not _QUALIFIED.search(match[1]):
                return match[0]
            target = self._reference.target(adapter_of(source), match[1])
            return match[0] if target is None else referring(match[1], target)

        text = outside_fences(text, _LINK, relinked)
        text = outside_fences(text, _SPAN, named)
        text = MERMAID.sub(self._picture, text)
        if source == self._docs / "index.md":
            return text + "\n" + "\n".join(self._tables_of_contents())
        return self._reference.expanded(text)

    def _tables_of_contents(self) -> Iterator[str]:
        for title, links in sections_of(self._index):
            rows = "\n".join(
                f"{text} <{self._name((self._docs / file).resolve()).removesuffix('.md')}>"
                for text, file in links
            )
            yield f"```{{toctree}}\n:caption: {title}\n:hidden:\n\n{rows}\n```\n"

    def _target(self, source: Path, link: str) -> str:
        """Return where a link of a page leads in the site."""
        target = (source.parent / link).resolve()
        page = source.relative_to(self._root)
        if not target.is_relative_to(self._root) or not target.exists():
            raise StagingError(f"{page} links {link}, which does not exist")
        if target.is_dir() or (target.suffix == ".md" and target not in self._texts):
            raise StagingError(
                f"{page} links {link}, which the site does not have; link a file, or give the "
                "page a row in one of the lists of docs/index.md"
            )
        name = self._name(target)
        if name.startswith("repository/"):
            self._put(name, target.read_bytes())
        return relpath(name, dirname(self._name(source)) or ".")

    def _picture(self, fence: re.Match[str]) -> str:
        name = picture_name(fence["text"])
        if not (self._docs / "pictures" / name).is_file():
            raise StagingError(f"docs/pictures has no {name}; run tools/draw_diagrams.py")
        return f"![The diagram of this section](/pictures/{name})"


def adapter_of(source: Path) -> str:
    """Return the module that `hvd` stands for on a page."""
    own = source.stem in ("keras", "numpy", "tensorflow")
    return f"hvdlite.{source.stem}" if own else "hvdlite.torch"


def picture_name(diagram: str) -> str:
    """Return the name of the picture of a diagram, which depends on the diagram's text."""
    return f"diagram_{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"
