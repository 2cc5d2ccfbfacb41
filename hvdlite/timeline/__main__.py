"""Merge the parts of a timeline that neither the ranks nor hvdlite-run have merged.

python -m hvdlite.timeline merge merged.json timeline.json.parts/*/rank.*
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdlite.errors import ArgumentError
from hvdlite.timeline.recorder import merge


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hvdlite.timeline")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("merge", help="make one timeline of the parts of several ranks")
    command.add_argument("target", type=Path, help="the file to write")
    command.add_argument("parts", type=Path, nargs="+", help="the files of the ranks")
    options = parser.parse_args(arguments)
    try:
        merge(options.parts, options.target)
    except (OSError, ArgumentError) as error:
        print(f"hvdlite.timeline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
