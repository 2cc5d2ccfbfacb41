"""hvdlite-run whose servers have to end soon by themselves, so that tests need not wait for it."""

from __future__ import annotations

import sys

from hvdlite.launch.command.cli import main
from hvdlite.launch.servers import supervisor

if __name__ == "__main__":
    supervisor._PATIENCE = 0.3
    sys.exit(main())
