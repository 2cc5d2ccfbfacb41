"""Write the tables of docs/knobs.md and docs/options.md (`make docs`).

A table, or tables with their headings, stand between two comments that name them. They come from
the core's table of knobs, and from hvdlite-run's parser.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from hvdlite import _core
from hvdlite.launch.flags import EXPERT, build_parser

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "knobs.md", DOCS / "options.md")
_MADE = re.compile(
    r"(<!-- make docs: (?P<name>[\w ]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL
)


def _quoted(text: str) -> str:
    return f"`{text}`" if text else ""


def _knobs(expert: bool) -> Iterator[str]:
    yield "| Variable | Default | What it does |\n|---|---|---|\n"
    for knob in _core.knobs():
        if (knob["name"] in EXPERT) == expert:
            unit = knob["unit"] if knob["default"] else ""
            default = f"{_quoted(knob['default'])} {unit}".strip()
            yield f"| {_quoted(knob['environment'])} | {default} | {knob['help']} |\n"


def _options() -> Iterator[str]:
    parser = build_parser()
    formatter = argparse.HelpFormatter(parser.prog)
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.option_strings and one.help]
        rows = [_option(one, formatter) for one in shown if one.help != argparse.SUPPRESS]
        if rows:
            yield f"\n{_titled(group)}\n\n| Option | Meaning |\n|---|---|\n"
            yield from rows


def _titled(group: argparse._ArgumentGroup) -> str:
    """Format the heading of a group, and what its description says."""
    title = {"options": "the job"}.get(group.title or "", group.title or "")
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", group.description or "")
    if not text.startswith("hvdlite-run"):
        text = text[:1].upper() + text[1:]
    return f"## {title[:1].upper()}{title[1:]}" + (f"\n\n{text}." if text else "")


def _option(option: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Format the row of an option: the names in its order, with the value after the last one."""
    *before, last = option.option_strings
    value = "" if option.nargs == 0 else formatter._format_args(option, option.dest.upper())
    names = ", ".join(f"`{name}`" for name in (*before, f"{last} {value}".rstrip()))
    meaning = (option.help or "") % vars(option) if "%" in (option.help or "") else option.help
    return f"| {names} | {meaning} |\n"


def page_of(text: str) -> str:
    """Return the text of a page with what the tables now are."""
    tables = {
        "knobs": "".join(_knobs(expert=False)),
        "expert knobs": "".join(_knobs(expert=True)),
        "options": "".join(_options()),
    }

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}\n{tables[found['name']].strip()}\n\n{found[3]}"

    return _MADE.sub(written, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(page_of(page.read_text(encoding="utf-8")), encoding="utf-8")
