"""Run hvdlite-run as `python -m hvdlite`."""

from __future__ import annotations

import sys

from hvdlite.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
