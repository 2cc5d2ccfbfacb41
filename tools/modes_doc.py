"""Write the table of docs/modes.md that says what combines with what (`make docs`)."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hvdlite.modes import REFUSED_IN_A_STEP, Mode, refusal, with_wholes

TABLE = re.compile(r"(?<=<!-- table of modes: run `make docs` -->\n).*?(?=<!-- end -->)", re.DOTALL)


def cell_of(mode: Mode) -> str:
    """Format the names of the modes with which one cannot be combined."""
    parts = [one for one in Mode if refusal(mode, one)]
    wholes = [one for one in parts if not set(parts) & {*with_wholes(one)} - {one}]
    later = {*REFUSED_IN_A_STEP.get(mode, ())}
    later |= {one for one, others in REFUSED_IN_A_STEP.items() if mode in others}
    names = [quoted(one) for one in wholes] + [f"{quoted(one)} *" for one in Mode if one in later]
    return ", ".join(names)


def quoted(mode: Mode) -> str:
    """Format a name: what users write as code, and the rest as words."""
    return mode.value if " " in mode.value else f"`{mode.value}`"


def with_table(page: str) -> str:
    """Return the text of the page with a new table."""
    rows = [f"| {quoted(mode)} | {cell_of(mode) or 'nothing'} |\n" for mode in Mode]
    return TABLE.sub("".join(["\n| | not with |\n|---|---|\n", *rows, "\n"]), page)


def main() -> None:
    """Write the table into the page given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
