"""The command line of hvdlite-run. The launcher reads its environment here and nowhere else."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hvdlite
from hvdlite import timeline
from hvdlite.bootstrap.store import Store
from hvdlite.errors import ArgumentError
from hvdlite.launch.console import STDERR, STDOUT, Console
from hvdlite.launch.local import (
    Job,
    job_environment,
    output_files,
    start_worker,
    thread_caps,
)
from hvdlite.launch.placement import Slot, place, threads_per_rank
from hvdlite.launch.resources import available_cores
from hvdlite.launch.supervisor import SignalInbox, Started, Supervisor

_EXAMPLE = "hvdlite-run -np 2 python train.py"
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
_COLUMNS_OF_PREFIX = 6


@dataclass(frozen=True)
class KnobFlag:
    """A flag that sets one knob of the core for the workers."""

    flag: str
    variable: str
    convert: Callable[[str], object]
    metavar: str | None
    help: str
    choices: Sequence[str] | None = None


def _megabytes(text: str) -> int:
    value = float(text)
    if value < 0:
        raise ValueError(text)
    return int(value * (1 << 20))


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


# Argparse names the function in its message: "invalid number of MiB value: 'x'".
_megabytes.__name__ = "number of MiB"
_count.__name__ = "count"

KNOB_FLAGS = (
    KnobFlag(
        "--fusion-threshold-mb",
        "HVDLITE_FUSION_THRESHOLD",
        _megabytes,
        "MB",
        "largest batch of small tensors that travels as one all-reduce, in MiB",
    ),
    KnobFlag(
        "--cache-capacity",
        "HVDLITE_CACHE_CAPACITY",
        _count,
        "N",
        "tensors whose negotiation is remembered; 0 switches the cache off",
    ),
    KnobFlag(
        "--log-level",
        "HVDLITE_LOG_LEVEL",
        str,
        None,
        "least severe message of hvdlite that the ranks print",
        _LOG_LEVELS,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="hvdlite-run",
        usage="hvdlite-run -np N [options] command...",
        description="Start the ranks of a training job on this machine and end them together.",
        epilog=f"example: {_EXAMPLE}",
        allow_abbrev=False,
    )
    parser.add_argument("-np", "--num-proc", type=int, metavar="N", help="number of ranks")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.add_argument("--version", action="version", version=f"hvdlite {hvdlite.__version__}")
    parser.add_argument(
        "--doctor",
        "--check-build",
        action="store_true",
        help="say what works on this machine and why the rest does not, with measured speeds",
    )
    parser.add_argument("--verbose", action="store_true", help="say what is started")
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long hvd.init() waits for all ranks",
    )
    _add_output_flags(parser.add_argument_group("output"))
    _add_timeline_flags(parser.add_argument_group("timeline", "see docs/timeline.md"))
    knobs = parser.add_argument_group("knobs", "set for the ranks; docs/knobs.md lists all")
    for knob in KNOB_FLAGS:
        knobs.add_argument(
            knob.flag,
            dest=knob.variable,
            type=knob.convert,
            metavar=knob.metavar,
            choices=knob.choices,
            help=knob.help,
        )
    return parser


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-filename",
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    group.add_argument(
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the time before each line, too",
    )


def _add_timeline_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--timeline-filename",
        "--timeline",
        dest="timeline",
        type=Path,
        metavar="FILE",
        help="write where the time of every rank goes to one file, for ui.perfetto.dev",
    )
    group.add_argument(
        "--timeline-mark-cycles",
        action="store_true",
        help="also mark the rounds of the engine in it",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


_seconds.__name__ = "number of seconds"


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, path: str) -> None:
    """Refuse what cannot be run, with what to write instead."""
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.num_proc is None:
        parser.error(f"say how many ranks to start with -np, for example: {_EXAMPLE}")
    if options.num_proc < 1:
        parser.error(f"-np {options.num_proc}: at least one rank is needed")
    if options.timeline is not None and not options.timeline.absolute().parent.is_dir():
        parser.error(f"--timeline-filename {options.timeline}: there is no such folder")
    if not options.command:
        parser.error(f"say what to run, for example: {_EXAMPLE}")
    program = options.command[0]
    if shutil.which(program, path=path) is None:
        parser.error(
            f"cannot find the program {program!r}; this hvdlite-run belongs to {sys.prefix}: "
            "is that environment activated?"
        )


def worker_environment(
    options: argparse.Namespace, environment: Mapping[str, str], slot: Slot, job: Job, threads: int
) -> dict[str, str]:
    """Build the whole environment of one rank: the user's, ours, and the flags' knobs."""
    whole = {**environment, **thread_caps(environment, threads), **job_environment(slot, job)}
    for knob in KNOB_FLAGS:
        value = getattr(options, knob.variable)
        if value is not None:
            whole[knob.variable] = str(value)
    if options.start_timeout is not None:
        whole["HVDLITE_START_TIMEOUT"] = str(options.start_timeout)
    if options.timeline is not None:
        whole["HVDLITE_TIMELINE"] = str(options.timeline.absolute())
    if options.timeline_mark_cycles:
        whole["HVDLITE_TIMELINE_MARK_CYCLES"] = "1"
    whole["HVDLITE_TIMELINE_PARTS"] = str(timeline_parts(job.job_id))
    return whole


def timeline_parts(job_id: bytes) -> Path:
    """Say where the ranks leave the parts of their timelines; they make the folder."""
    return Path(tempfile.gettempdir()) / f"hvdlite-timeline-{job_id.hex()}"


def _merge_timelines(folder: Path, console: Console) -> None:
    """Merge the parts that the ranks could not merge themselves: one was killed, for example."""
    try:
        timeline.merge_leftovers(folder)
    except (OSError, ArgumentError) as error:
        console.say(f"no timeline: {error}; its parts are in {folder}")


def _terminal_width(environment: Mapping[str, str]) -> dict[str, str]:
    """Tell progress bars how wide the terminal is: a worker's own output is a pipe."""
    for fd in (STDERR, STDOUT):
        if "COLUMNS" not in environment and os.isatty(fd):
            width = os.get_terminal_size(fd).columns - _COLUMNS_OF_PREFIX
            return {"COLUMNS": str(width)} if width > 0 else {}
    return {}


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def run(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run one job; return the launcher's exit status."""
    console = Console()
    slots = place([options.num_proc])
    cores = available_cores()
    threads = threads_per_rank(cores, options.num_proc)
    environment = {**environment, **_terminal_width(environment)}
    if thread_caps(environment, threads):
        console.say(
            f"{_number(threads, 'thread')} per rank ({_number(cores, 'core')} / "
            f"{_number(options.num_proc, 'rank')}); set OMP_NUM_THREADS to choose"
        )
    token, job_id = secrets.token_bytes(32), secrets.token_bytes(16)
    with SignalInbox() as inbox, Store.start(options.num_proc, token, job_id, epoch=0) as store:
        job = Job(job_id, token, store.address)
        supervisor = Supervisor(console, inbox, job_id, options.prefix_output_with_timestamp)

        def starter(slot: Slot) -> Callable[[], Started]:
            def start() -> Started:
                whole = worker_environment(options, environment, slot, job, threads)
                folder = options.output_filename
                files = None if folder is None else output_files(folder, slot.rank)
                worker = start_worker(slot, options.command, whole)
                if options.verbose:
                    console.say(
                        f"rank {slot.rank}: pid {worker.pid}: {shlex.join(options.command)}"
                    )
                return worker, files

            return start

        try:
            return supervisor.run([starter(slot) for slot in slots])
        finally:
            _merge_timelines(timeline_parts(job_id), console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdlite-run with these arguments (the process's by default); return its exit status."""
    parser = build_parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    environment = dict(os.environ)
    try:
        if options.doctor:
            from hvdlite.launch.doctor import examine

            return examine(environment)
        check(parser, options, environment.get("PATH", os.defpath))
        return run(options, environment)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"hvdlite-run: {error}", file=sys.stderr)
        return 1
