"""Write docs/knobs.md from the core's table of knobs (`make docs`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdlite import _core

INTRODUCTION = """\
# Knobs

<!-- Written by tools/knobs_doc.py from csrc/base/config.h: run `make docs`, do not edit. -->

Each knob is an environment variable that every rank reads when hvdlite starts. Set it in front of
`hvdlite-run`, which passes it on to all ranks, or give hvdlite-run the flag of that name
(`--fusion-threshold`). If Horovod has a variable for the same thing, hvdlite reads that one where
its own is not set. All ranks must have the same values.

Numbers are written with a point in every locale. For every time in seconds, 0 and `inf` mean never,
or no limit.
"""


def quoted(text: str) -> str:
    """Format `text` as code; return "" for an empty text."""
    return f"`{text}`" if text else ""


def knobs_page() -> str:
    """Return the text of docs/knobs.md."""
    lines = [
        INTRODUCTION,
        "| Variable | Type | Default | Unit | What it does | Horovod's name |",
        "|---|---|---|---|---|---|",
    ]
    for knob in _core.knobs():
        cells = [
            quoted(knob["environment"]),
            f"{knob['type']}, {knob['range']}" if knob["range"] else knob["type"],
            quoted(knob["default"]),
            knob["unit"],
            knob["help"],
            quoted(knob["horovod"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page to the path given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(knobs_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
