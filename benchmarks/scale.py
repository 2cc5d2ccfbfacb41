"""Measure what a start costs, by the number of ranks on this machine.

    python benchmarks/scale.py > scale.jsonl

The ranks are *light* (light_rank.py): Python processes that import hvdlite's core and
`hvdlite.basics`, and no framework. This process serves the store for them, as a launcher does. For
each number of ranks there are two starts:

- In the first one, the ranks connect as soon as they can. `start_ms` is the time from the first
  process until the last rank is connected, and `import_ms` the median time of the imports.
- In the second one they wait until all of them are there, then connect together. `connect_ms` is
  the time until the last rank is connected, `barrier_ms` that of the first barrier from the moment
  in which all are connected, and `again_ms` the median of later ones. The rest is of the rank with
  the most: `rss_mib`, `pss_mib` (shared pages count in parts), `descriptors`, `threads`, and
  `shared_mib`, the memory that is touched of all segments that the rank maps. `shm_bytes` is what
  lies in /dev/shm: hvdlite puts nothing there.

With `--hosts H` the ranks act as those of H hosts, which are connected by TCP.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workers import hand_on

RANKS = [2, 4, 8, 16, 32, 64]
LIGHT_RANK = str(Path(__file__).with_name("light_rank.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="numbers of ranks")
    parser.add_argument("--hosts", type=int, default=1, help="hosts that they act as (1)")
    parser.add_argument("--repeat", type=int, default=3, help="starts of each kind; medians (3)")
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        rows = [
            {**start(ranks, arguments.hosts, gated=False), **start(ranks, arguments.hosts)}
            for _ in range(arguments.repeat)
        ]
        row = {name: statistics.median(one[name] for one in rows) for name in rows[0]}
        load = round(os.getloadavg()[0], 1)
        row |= {"cores": len(os.sched_getaffinity(0)), "load": load}
        hand_on(json.dumps({"ranks": ranks, "hosts": arguments.hosts, **row}), arguments.output)
    return 0


def start(ranks: int, hosts: int, gated: bool = True) -> dict[str, float]:
    """Start a world of light ranks, and return what the start took."""
    from hvdlite.rendezvous.handshake import Job
    from hvdlite.rendezvous.store import Store

    token, job_id = secrets.token_bytes(32), secrets.token_bytes(16)
    with Store.start(ranks, Job(token, job_id, 0)) as store:
        begun = time.monotonic()
        common = {
            "HVDLITE_SIZE": str(ranks),
            "HVDLITE_RENDEZVOUS": store.address,
            "HVDLITE_TOKEN": token.hex(),
            "HVDLITE_JOB_ID": job_id.hex(),
        }
        processes = []
        for rank in range(ranks):
            own = {**common, "HVDLITE_RANK": str(rank)}
            if hosts > 1:
                own["HVDLITE_HOST_ID"] = f"host{rank * hosts // ranks}"
            processes.append(spawn({**os.environ, **own, "OMP_NUM_THREADS": "1"}))
        try:
            told = run_world(processes, gated)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if not gated:
        return {
            "start_ms": since(begun, (one["connected"] for one in told)),
            "import_ms": round(statistics.median(one["import_ms"] for one in told), 1),
        }
    opened = min(one["opened"] for one in told)
    connected = max(one["connected"] for one in told)
    most = {name: max(one["footprint"][name] for one in told) for name in told[0]["footprint"]}
    return {
        "connect_ms": since(opened, (one["connected"] for one in told)),
        "barrier_ms": since(connected, (one["met"] for one in told)),
        "again_ms": round(max(one["again_ms"] for one in told), 3),
        "shm_bytes": sum(file.stat().st_size for file in Path("/dev/shm").glob("*hvdlite*")),
        **most,
    }


def spawn(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, LIGHT_RANK],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_world(processes: list[subprocess.Popen[str]], gated: bool) -> list[dict[str, Any]]:
    """Open the gates, and return what the ranks say, by rank."""
    if not gated:
        open_gates(processes)
    for process in processes:
        answer(process)  # It has imported what it needs.
    if gated:
        open_gates(processes)
    told = [json.loads(answer(process)) for process in processes]
    open_gates(processes)  # None leaves while another one still measures.
    return told


def open_gates(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a rank has ended")
    return line


def since(begun: float, ends: Any) -> float:
    return round(1e3 * (max(ends) - begun), 1)


if __name__ == "__main__":
    sys.exit(main())
