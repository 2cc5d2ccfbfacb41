"""hvdlite-run with other times for its output, so that tests neither wait nor depend on them.

Its live view writes a line each second, or after TEST_LINE_SECONDS. With TEST_REST_SECONDS a line
that is not complete is shown after so many seconds.
"""

from __future__ import annotations

import os
import sys

from hvdlite.launch import output
from hvdlite.launch.cli import main
from hvdlite.live import screen

if __name__ == "__main__":
    screen._LINE_SECONDS = float(os.environ.get("TEST_LINE_SECONDS", 1.0))
    if "TEST_REST_SECONDS" in os.environ:
        output._REST_SHOWN_AFTER = float(os.environ["TEST_REST_SECONDS"])
    sys.exit(main())
