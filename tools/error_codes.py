"""Write hvdlite/errors/codes.txt from the headings of docs/troubleshooting.md (`make docs`)."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
HEADING = re.compile(r"^### (HVD\d{3,}): `(.+)`$", re.MULTILINE)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    rows = sorted(HEADING.findall(PAGE.read_text(encoding="utf-8")))
    lines = "".join(f"{code} {pattern}\n" for code, pattern in rows)
    parser.parse_args().table.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
