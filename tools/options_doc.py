"""Write docs/options.md from hvdlite-run's parser (`make docs`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from hvdlite.launch.command.flags import build_parser

INTRODUCTION = """\
# Options of hvdlite-run

<!-- Written by tools/options_doc.py from hvdlite/launch/command: run `make docs`, do not edit. -->

`hvdlite-run -np N [-H host:slots,...] [options] command...`; [launch.md](launch.md) says what a job
does, and `hvdlite-run --help` shows the same list. Options come before the program's name: what
follows it belongs to the program.
"""
CLOSING = """
Most [knobs](knobs.md) are flags, too: `HVDLITE_STALL_WARNING` is `--stall-warning`, and knobs of 0
and 1 are switches, such as `--require-nccl` and `--no-require-nccl`. `--help-all` shows them.
Horovod's flags are understood; [horovod.md](horovod.md) says which of them change something.
"""


def titled(group: argparse._ArgumentGroup) -> str:
    """Format the heading of a group, and what its description says."""
    title = group.title or ""
    title = {"options": "The job"}.get(title, title[:1].upper() + title[1:])
    description = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", group.description or "")
    if not description.startswith("hvdlite-run"):
        description = description[:1].upper() + description[1:]
    text = f"{description}.\n\n" if description else ""
    return f"\n## {title}\n\n{text}| Option | Meaning |\n|---|---|\n"


def row_of(option: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Format the row of an option: the names in its order, with the value after the last one."""
    *before, last = (f"`{name}`" for name in option.option_strings)
    value = "" if option.nargs == 0 else formatter._format_args(option, option.dest.upper())
    last = f"{last[:-1]} {value}`" if value else last
    meaning = (option.help or "") % vars(option) if "%" in (option.help or "") else option.help
    return f"| {', '.join([*before, last])} | {meaning} |\n"


def shown(group: argparse._ArgumentGroup) -> Iterable[argparse.Action]:
    """Return the options of a group that the help shows."""
    return [
        one
        for one in group._group_actions
        if one.option_strings and one.help not in (None, argparse.SUPPRESS)
    ]


def options_page() -> str:
    """Return the text of docs/options.md."""
    parser = build_parser()
    formatter = argparse.HelpFormatter(parser.prog)
    parts = [INTRODUCTION]
    for group in parser._action_groups:
        if options := shown(group):
            parts += [titled(group), *(row_of(one, formatter) for one in options)]
    return "".join(parts) + CLOSING


def main() -> None:
    """Write the page to the path given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(options_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
