"""Merge the parts of a timeline: `python -m hvdlite.timeline merge TARGET PARTS...`."""

import sys

from hvdlite.timeline.recorder import main

if __name__ == "__main__":
    sys.exit(main())
