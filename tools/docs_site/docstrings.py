"""Take apart docstrings in Google style, and write them as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_TITLE = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):$")
_ITEM = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?:(?:\s+|$)(.*)$", re.DOTALL)
_SEE_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
_CODE = re.compile(r"`([^`\n]+)`")
_FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}


@dataclass(frozen=True)
class Docstring:
    """The text before the sections, and the sections by title, without their indentation."""

    text: str
    sections: dict[str, str] = field(default_factory=dict)

    @property
    def example(self) -> str:
        """The code of the example, "" if there is none."""
        return self.sections.get("Example", self.sections.get("Examples", ""))

    def items(self, title: str) -> dict[str, str]:
        """Return the items of a section ("name: what it is"), by name."""
        found: dict[str, str] = {}
        for block in _blocks(self.sections.get(title, "")):
            match = _ITEM.match(block)
            if match is not None:
                for name in match[1].split(", "):
                    found[name.lstrip("*")] = " ".join(match[2].split())
        return found


def _blocks(section: str) -> Iterator[str]:
    """Give the items of a section: a line that is not indented begins one."""
    lines: list[str] = []
    for line in section.splitlines():
        if lines and line and not line.startswith(" "):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    if lines:
        yield "\n".join(lines)


def parse(docstring: str) -> Docstring:
    """Split a docstring into its text and its sections."""
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    into = text
    for line in docstring.splitlines():
        match = _TITLE.match(line)
        if match is not None:
            into = sections.setdefault(match[1], [])
        elif into is not text and line and not line.startswith(" "):
            into = text  # This is prose after a section.
            text.append(line)
        else:
            into.append(line)
    inner = {name: textwrap.dedent("\n".join(rows)).strip() for name, rows in sections.items()}
    return Docstring("\n".join(text).strip(), inner)


Link = Callable[[str], str | None]


def referring(code: str, target: str) -> str:
    """Return a code span that links the entry of `target` in the reference."""
    return f"{{py:obj}}`{code} <{target}>`"


def linked(text: str, link: Link) -> str:
    """Make links of the names of pages and of the public names in a text of Markdown."""
    # `link` returns the full name of what a code span names, or None.

    def name(match: re.Match[str]) -> str:
        target = link(match[1])
        return match[0] if target is None else referring(match[1], target)

    return _SEE_PAGE.sub(r"[\1.md](/\1.md)", _CODE.sub(name, text))


def markdown(docstring: Docstring, link: Link) -> str:
    """Write a docstring as Markdown, with field lists as Sphinx's Python domain reads them."""
    parts = [linked(docstring.text, link)]
    fields = []
    for title, role in _FIELDS.items():
        for name, meaning in docstring.items(title).items():
            fields.append(f":{role} {name}: {linked(meaning, link)}")
    for title in ("Returns", "Yields"):
        if title in docstring.sections:
            meaning = " ".join(docstring.sections[title].split())
            fields.append(f":{title.lower()}: {linked(meaning, link)}")
    parts.append("\n".join(fields))
    if "Note" in docstring.sections:
        parts.append(linked(docstring.sections["Note"], link))
    if docstring.example:
        language = "pycon" if ">>>" in docstring.example else "python"
        parts.append(f"```{language}\n{docstring.example}\n```")
    return "\n\n".join(part for part in parts if part)
