"""hvdlite-run whose live view writes a line each second, so that tests need not wait for ten."""

from __future__ import annotations

import sys

from hvdlite.launch.command.cli import main
from hvdlite.live import screen

if __name__ == "__main__":
    screen._LINE_SECONDS = 1.0
    sys.exit(main())
