"""A light rank of benchmarks/scale.py: connects, meets the others, and says what it took.

What it needs for its figures it imports when they are taken, because a light rank imports nothing
but hvdlite.
"""

from __future__ import annotations

import os
import sys
import time

BARRIERS = 20


def be_a_rank() -> int:
    """Connect, meet the others, and say what it took."""
    begun = time.monotonic()
    from hvdlite import basics

    imported = time.monotonic()
    print("imported", flush=True)
    sys.stdin.readline()
    opened = time.monotonic()
    basics.init()
    connected = time.monotonic()
    engine = basics.engine()
    engine.barrier("scale.first", 0, True).wait()
    met = time.monotonic()
    times = []
    for number in range(BARRIERS):
        at = time.monotonic()
        engine.barrier(f"scale.{number}", 0, True).wait()
        times.append(1e3 * (time.monotonic() - at))
    import json
    import statistics

    row = {
        "import_ms": 1e3 * (imported - begun),
        "opened": opened,
        "connected": connected,
        "met": met,
        "again_ms": statistics.median(times),
        "footprint": footprint(),
    }
    print(json.dumps(row), flush=True)
    sys.stdin.readline()
    basics.shutdown()
    return 0


def footprint() -> dict[str, float]:
    """Return what this process occupies."""
    import re
    from pathlib import Path

    rollup = Path("/proc/self/smaps_rollup").read_text()
    sizes = {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB", rollup, re.M)}
    shared = 0
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            here = "/memfd:" in line
        elif here and line.startswith("Rss:"):
            shared += int(line.split()[1])
    return {
        "rss_mib": round(sizes["Rss"] / 1024, 1),
        "pss_mib": round(sizes["Pss"] / 1024, 1),
        "shared_mib": round(shared / 1024, 2),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


if __name__ == "__main__":
    sys.exit(be_a_rank())
