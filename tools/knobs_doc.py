"""Write docs/knobs.md from the core's table of knobs (`make docs`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdlite import _core
from hvdlite.launch.command.flags import EXPERT

INTRODUCTION = """\
# Knobs

<!-- Written by tools/knobs_doc.py from csrc/base/config.h: run `make docs`, do not edit. -->

Each knob is an environment variable that every rank reads when hvdlite starts. Set it in front of
`hvdlite-run`, which passes it on to all ranks, or give hvdlite-run the flag of that name, such as
`--fusion-threshold` ([expert knobs](#expert-knobs) have none). If Horovod has a variable for the
same thing, hvdlite reads that one where its own is not set. All ranks must have the same values.

Numbers are written with a point in every locale. For every time in seconds, 0 and `inf` mean never,
or no limit.
"""


# Variables that the core does not know: name, default, meaning, Horovod's name.
PYTHON = (
    ("TOKEN", "", "The job's secret, 64 hexadecimal digits; hvdlite-run makes one", ""),
    ("RENDEZVOUS", "", "`host:port` where ranks meet: rank 0's host, and a free port there", ""),
    ("RANK", "", "This process's rank, under a launcher that hvdlite does not recognise", ""),
    ("SIZE", "", "The number of ranks; 1 alone insists on a world of one", ""),
    ("LOCAL_RANK", "", "This process's number on its host", ""),
    ("LOCAL_SIZE", "", "How many ranks the host has", ""),
    ("NODE", "", "The number of the host", ""),
    ("SERVERS", "0", "How many of the first ranks are parameter servers", ""),
    ("HOST_ID", "", "Stands for the host: only ranks with the same text share memory", ""),
    ("EPOCH", "0", "The number of this start, where a launcher starts the job again", ""),
    (
        "NETWORK_INTERFACES",
        "",
        "Interfaces at which ranks can be reached, with commas between them",
        "HOROVOD_GLOO_IFACE",
    ),
    ("BIND_ADDRESS", "", "The IP address of this host at which this rank listens", ""),
    (
        "START_TIMEOUT",
        "60",
        "Seconds that `hvd.init()` waits for all ranks; 0 means no limit",
        "HOROVOD_START_TIMEOUT",
    ),
    ("ALLOW_PICKLE", "1", "0 refuses collectives of Python objects, which travel pickled", ""),
    ("ELASTIC_SNAPSHOT", "1", "0 keeps elastic states from copying tensors at commits", ""),
    ("ELASTIC_VERIFY", "0", "1 makes elastic ranks compare their parameters before a sync", ""),
    ("LIVE_SERVE", "", "`host:port` of rank 0's live page, under other launchers", ""),
    ("INDEPENDENT", "0", "1: it is no error if no rank joins a world (`--independent`)", ""),
    ("LIVE_TOKEN_FILE", "", "The file with the token of that page; without it one is drawn", ""),
)
HEAD = (
    "| Variable | Type | Default | Unit | What it does | Horovod's name |",
    "|---|---|---|---|---|---|",
)
EXPERT_INTRODUCTION = """
## Expert knobs

Hardly any job sets these: their defaults were measured, or are chosen by the machine. They have no
flags.
"""
PYTHON_INTRODUCTION = """
## Variables that Python reads

hvdlite-run sets the token, the rendezvous and the numbers of the ranks itself.
[Other launchers](launchers.md) need some of them from you.

| Variable | Default | What it does | Horovod's name |
|---|---|---|---|
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
        f"{knob['type']}, {knob['range']}" if knob["range"] else knob["type"],
        quoted(knob["default"]),
        knob["unit"],
        knob["help"],
        quoted(knob["horovod"]),
    ]
    return "| " + " | ".join(cells) + " |"


def knobs_page() -> str:
    """Return the text of docs/knobs.md."""
    knobs = _core.knobs()
    lines = [INTRODUCTION, *HEAD, *(row_of(knob) for knob in knobs if knob["name"] not in EXPERT)]
    lines += [EXPERT_INTRODUCTION, *HEAD]
    lines += [row_of(knob) for knob in knobs if knob["name"] in EXPERT]
    rows = [
        f"| {quoted(f'HVDLITE_{name}')} | {quoted(default)} | {meaning} | {quoted(horovod)} |"
        for name, default, meaning, horovod in PYTHON
    ]
    internal = ", ".join(quoted(f"HVDLITE_{name}") for name in INTERNAL)
    closing = (
        f"hvdlite-run also sets variables for its own processes; leave them alone: {internal}."
    )
    python = PYTHON_INTRODUCTION + "\n".join(rows)
    return "\n".join(lines) + "\n" + python + "\n\n" + closing + "\n"


def main() -> None:
    """Write the page to the path given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(knobs_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
