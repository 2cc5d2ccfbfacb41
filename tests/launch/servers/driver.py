"""hvdlite-run whose servers have to end soon by themselves, so that tests need not wait for it."""

from __future__ import annotations

import sys

from hvdlite.launch import servers
from hvdlite.launch.cli import main

if __name__ == "__main__":
    servers._SERVERS_END = 0.3
    sys.exit(main())
