"""hvdlite-run whose servers have to end soon by themselves, so that tests need not wait for it."""

from __future__ import annotations

import sys

from hvdlite.launch.command.cli import main
from hvdlite.launch.policies import restarting

if __name__ == "__main__":
    restarting._PATIENCE = 0.3
    sys.exit(main())
