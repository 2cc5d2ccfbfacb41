"""Write docs/knobs.md from the core's table of knobs (`make docs`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdlite import _core
from hvdlite.launch.command.flags import EXPERT

INTRODUCTION = """\
# Knobs

<!-- Written by tools/knobs_doc.py from csrc/base/config.h: run `make docs`, do not edit. -->

Each knob is an environment variable that every rank reads when hvdlite starts. hvdlite-run passes
it on to all ranks, and has a flag of that name, such as `--fusion-threshold`
([expert knobs](#expert-knobs) have none). Where a knob is not set, hvdlite reads Horovod's
variable, in brackets here. All ranks must have the same values. For every time in seconds, 0 and
`inf` mean never.
"""


# Variables that the core does not know, and their meaning.
PYTHON = {
    "TOKEN": "The job's secret, 64 hexadecimal digits",
    "RENDEZVOUS": "`host:port` where ranks meet: rank 0's host, and a free port there",
    "RANK": "This process's rank",
    "SIZE": "The number of ranks; 1 alone insists on a world of one",
    "LOCAL_RANK": "This process's number on its host",
    "LOCAL_SIZE": "How many ranks the host has",
    "NODE": "The number of the host",
    "SERVERS": "How many of the first ranks are parameter servers",
    "HOST_ID": "Stands for the host: only ranks with the same text share memory",
    "EPOCH": "The number of this start (0), if a launcher starts the job again",
    "NETWORK_INTERFACES": "Interfaces at which ranks can be reached: `eth1,ib0`"
    " (`HOROVOD_GLOO_IFACE`)",
    "BIND_ADDRESS": "The IP address of this host at which this rank listens",
    "START_TIMEOUT": "Seconds that `hvd.init()` waits for all ranks (60; `HOROVOD_START_TIMEOUT`)",
    "ALLOW_PICKLE": "0 refuses collectives of Python objects, which travel pickled",
    "REPORT": "The HTML file to which rank 0 writes a report, under other launchers",
    "INDEPENDENT": "1: it is not an error if no rank joins a world (`--independent`)",
}
HEAD = (
    "| Variable | Default | What it does |",
    "|---|---|---|",
)
EXPERT_INTRODUCTION = """
## Expert knobs

Hardly any job sets these: their defaults were measured, or are chosen by the machine.
"""
PYTHON_INTRODUCTION = """
## Variables that Python reads

hvdlite-run sets most of these itself. [Other launchers](launchers.md) need some of them from you.

| Variable | What it does |
|---|---|
"""
# What hvdlite-run passes to its own processes.
INTERNAL = (
    *("AGENT_ID", "AGENT_TOKEN", "ELASTIC", "ELASTIC_HEARTBEAT", "HOSTNAME", "JOB_ID", "JOINER"),
    *("LIVE_FD", "RESULT_FD", "TIMELINE_PARTS", "TORCH_MASTER", "WORKER"),
)


def quoted(text: str) -> str:
    """Format `text` as code; return "" for an empty text."""
    return f"`{text}`" if text else ""


def row_of(knob: dict[str, str]) -> str:
    """Format the row of a knob."""
    cells = [
        quoted(knob["environment"]),
        f"{quoted(knob['default'])} {knob['unit']}".strip() if knob["default"] else "",
        knob["help"] + (f" ({quoted(knob['horovod'])})" if knob["horovod"] else ""),
    ]
    return "| " + " | ".join(cells) + " |"


def knobs_page() -> str:
    """Return the text of docs/knobs.md."""
    knobs = _core.knobs()
    lines = [INTRODUCTION, *HEAD, *(row_of(knob) for knob in knobs if knob["name"] not in EXPERT)]
    lines += [EXPERT_INTRODUCTION, *HEAD]
    lines += [row_of(knob) for knob in knobs if knob["name"] in EXPERT]
    rows = [f"| {quoted(f'HVDLITE_{name}')} | {meaning} |" for name, meaning in PYTHON.items()]
    internal = ", ".join(quoted(f"HVDLITE_{name}") for name in INTERNAL)
    closing = f"hvdlite-run sets variables for its own processes; leave them alone: {internal}."
    python = PYTHON_INTRODUCTION + "\n".join(rows)
    return "\n".join(lines) + "\n" + python + "\n\n" + closing + "\n"


def main() -> None:
    """Write the page to the path given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(knobs_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
