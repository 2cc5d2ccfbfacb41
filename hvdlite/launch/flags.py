"""The flags of hvdlite-run: its own, those of the core's knobs, and those of horovodrun.

The flag of a knob, its help and its default come from the core's table of knobs. If horovodrun has
a flag for the same thing with another name or unit, that flag works, too.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.launch.channels import Ssh
from hvdlite.launch.description import DEFAULT_GRACE, INDEPENDENT, Elastic, Servers


def megabytes(text: str) -> int:
    """Read a number of MiB as bytes."""
    return int(amount(text) * (1 << 20))


def count(text: str) -> int:
    """Read a whole number from 0."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def amount(text: str) -> float:
    """Read a number from 0."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def port(text: str) -> int:
    value = int(text)
    if not 0 < value < 1 << 16:
        raise ValueError(text)
    return value


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# Argparse says, for example, "invalid number of MiB value: 'x'".
megabytes.__name__ = "number of MiB"
amount.__name__ = "number"


class _Print(argparse.Action):
    """Print the text that the function `const` makes of the flag's value, and exit."""

    def __call__(self, parser: Any, options: Any, values: Any, flag: Any = None) -> None:
        print(self.const(values).rstrip())
        parser.exit()


EXAMPLE = "hvdlite-run -np 2 python train.py"
EXAMPLES = """examples:
  hvdlite-run -np 4 python train.py               # four ranks on this machine
  hvdlite-run -H node1:2,node2:2 python train.py  # two hosts, two ranks on each
  hvdlite-run -np 4 --min-np 2 python train.py    # elastic: ranks come and go
  hvdlite-run -np 2 --replace-gloo python ddp.py  # a torch.distributed script
"""
USAGE = "hvdlite-run -np N [-H host:slots,...] [options] command..."
DESCRIPTION = "Start the ranks of a training job on one or more hosts, and end them together."
HELP = f"""usage: {USAGE}

{DESCRIPTION}

common options:
  -np N              number of ranks
  -H HOST:SLOTS,...  where to run, and how many ranks fit on each host
  --min-np N         elastic job: continue while at least N ranks are left
  --replace-gloo     let torch.distributed use hvdlite in place of gloo
  --compat           let `import horovod` find hvdlite
  --report OUT.HTML  write a page that says what limits the job

{EXAMPLES}
--help-all shows all options, and --doctor says what works on this machine.
"""
_COOLDOWN = Elastic.blacklist_cooldown_range
# A row has the names of a flag, what reads its value, what stands for the value in the help, and
# the help, which goes on in lines that are indented. A row that begins with = opens a group.
_TABLE = f"""
-h --help | print | | show the common options and examples, and exit
--help-all | print | | show all options, the knobs and horovodrun's other flags, and exit
--print-completion | str | | print a script that completes options in this shell, and exit
-np --num-proc --np | int | N | number of ranks
--nproc-per-node --nproc_per_node | int | N | number of ranks on each host, instead of -np and slots
-m --module | switch | | the command is a Python module and its arguments
-v --version | print | | show program's version number and exit
--doctor -cb --check-build | switch | | say what works here (and on the hosts of -H), and why the
    rest does not
--compat | switch | | let `import horovod` find hvdlite
--replace-gloo | switch | | let torch.distributed use hvdlite in place of gloo
--verbose | switch | | say what is started
--start-timeout | amount | SECONDS | how long hvd.init() waits for all ranks, and ssh for a host;
    0: without a limit
--grace | amount | SECONDS | how long after Ctrl-C or SIGTERM the ranks are killed (default:
    {DEFAULT_GRACE:g})
--config-file | Path | FILE | read options from this YAML file, by their long names
--independent | switch | | it is not an error if no rank calls hvd.init()
= several hosts
-H --hosts | str | HOST:SLOTS,... | where to run; -np fills them in order
-hostfile --hostfile | Path | FILE | the same from a file, with lines HOST:N or HOST slots=N
--via | str | | how to reach the hosts; with srun they are those of the Slurm allocation
-p --ssh-port | port | PORT | port of sshd on the other hosts
-i --ssh-identity-file | Path | FILE | private key for ssh
--ssh-config | Path | FILE | configuration file for ssh, instead of ~/.ssh/config
--remote-python | str | PATH | Python with hvdlite on the other hosts (default: this path)
--network-interfaces --network-interface | names | NAME,... | network interfaces for the traffic
    between hosts (default: by their routes)
--tcp | switch | | keep NCCL from using InfiniBand
= node mode | hvdlite-run is started once on each node; see docs/launch.md
--nodes | str | N | number of nodes; auto: that of Kubeflow Trainer's variables (PET_...) or of srun
--node-rank | int | R | number of this node, from 0
--meet | str | HOST:PORT | host of node 0 and a free port there, where it waits for the others
= elastic jobs | ranks may die and join; see docs/elastic.md
--min-np --min-num-proc | count | N | continue while at least N ranks are left (default: -np)
--max-np --max-num-proc | count | N | use at most N ranks (default: all slots)
--host-discovery-script | str | COMMAND | run every second; prints the available hosts, as lines of
    HOST[:SLOTS]
--slots-per-host | count | N | slots of a host for which the script prints none (default: 1)
--elastic-timeout | amount | SECONDS | how long to wait for --min-np ranks (default:
    {Elastic.elastic_timeout:g})
--reset-limit | count | N | end the job after more than N changes of its ranks (default: no limit)
--blacklist-cooldown-range | amount | MIN MAX | seconds without new ranks for a host whose ranks die
    again and again (default: {_COOLDOWN[0]:g} {_COOLDOWN[1]:g})
--elastic-heartbeat | amount | SECONDS | how long a host may be silent; a rank may for 20 times as
    long (default: {Elastic.elastic_heartbeat:g})
--drain-timeout | amount | SECONDS | how long ranks may take to leave a host, or to end after an
    exception (default: {Elastic.drain_timeout:g})
= parameter servers | asynchronous training; see docs/parameter_server.md
--servers | count | N | the first N ranks of -np are parameter servers, and the others workers
--min-workers | count | N | continue while at least N workers live (default: {Servers.min_workers})
--worker-restarts | count | N | start a worker that dies again, so many times in a row (default:
    {Servers.restarts})
= cluster software | see docs/slurm.md
--emit | str | | print the job for this cluster software instead of running it
--ntasks-per-node | int | N | largest number of ranks on a node (default: all ranks on one node)
--name | str | NAME | name of the job (default: train)
--image | str | IMAGE | container image of the ranks
= output | see docs/live.md, docs/timeline.md and docs/autotune.md
--output-filename | Path | DIR | also write output to DIR/rank.N/stdout and DIR/rank.N/stderr
--prefix-output-with-timestamp -prefix-timestamp --prefix-timestamp | switch | | put the time before
    each line
--live | switch | | below the output, show what each rank does, and which one delays the others
--report | Path | OUT.HTML | write a page that says what limits the job, and figures to OUT.json
--timeline-filename --timeline | Path | FILE | write a timeline of all ranks, for ui.perfetto.dev
--timeline-mark-cycles | either | | mark the engine's rounds in it, too
--autotune | either | | search for faster values of the knobs while training runs
--autotune-log-file --autotune-log | Path | FILE | write what autotune measures, as lines of JSON
"""
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "print": {"action": _Print, "nargs": 0, "default": argparse.SUPPRESS},
    "switch": {"action": "store_true"},
    "either": {"action": argparse.BooleanOptionalAction},
    "str": {},
    **{reader.__name__: {"type": reader} for reader in (int, Path, count, names, port)},
    "amount": {"type": amount},
}
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

# By knob, the name of horovodrun's flag and the function that reads its value.
_HOROVODS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "fusion_threshold": ("--fusion-threshold-mb", megabytes),
    "stall_warning": ("--stall-check-warning-time-seconds", amount),
    "stall_shutdown": ("--stall-check-shutdown-time-seconds", amount),
    "collective_timeout": ("--gloo-timeout-seconds", amount),
    "autotune_trials": ("--autotune-bayes-opt-max-samples", count),
}
_TYPES: Mapping[str, Callable[[str], object]] = {"int": int, "float": amount, "str": str}
_READ_AS: Mapping[str, Callable[[str], object]] = {"cache_capacity": count, "log_level": str.lower}
# Knobs with flags of their own.
_OTHERWISE = ("timeline", "timeline_mark_cycles", "autotune", "autotune_log")
# Knobs that hardly any job sets, and that horovodrun has no flag for: variables, without a flag.
EXPERT = (
    *("shutdown_timeout", "spin_us", "shm_chunk", "shm_small", "shm_gradients", "tcp_chunk"),
    *("tensorflow_gpu", "lateness_interval"),
)


def core_knobs() -> list[dict[str, str]]:
    """Return the core's table of knobs; empty if the core does not load, as --doctor explains."""
    try:
        from hvdlite import _core
    except ImportError:
        return []
    return _core.knobs()


class _Parser(argparse.ArgumentParser):
    """A parser that lets 0, 1 or 2 follow a switch."""

    # In `--check-finite 1` argparse takes the 1 for the program to run. No program has such a name.

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        while options.switch and options.command[:1] in (["0"], ["1"], ["2"]):
            value, *rest = options.command
            options.knobs = {**options.knobs, options.switch: value}
            options.switch = ""
            options = super().parse_args(rest, options)
        return options

    def error(self, message: str) -> NoReturn:
        """Exit with a message; where a flag is mistyped, name the nearest one."""
        unknown = re.match(r"unrecognized arguments: (--?[\w-]+)", message)
        knob = unknown[1].removeprefix("--").replace("-", "_") if unknown else ""
        if knob == "jsrun":
            super().error("--jsrun: there is no jsrun here; use -H, --hostfile, srun or mpirun")
        if knob in EXPERT:
            super().error(f"{message}; set HVDLITE_{knob.upper()} instead")
        near = difflib.get_close_matches(unknown[1], self._option_string_actions) if unknown else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def build_parser(shows_all: bool = False) -> argparse.ArgumentParser:
    """Build the parser; with `shows_all` its help also shows the knobs and horovodrun's flags."""
    parser = _Parser(
        prog="hvdlite-run",
        usage=USAGE,
        description=DESCRIPTION,
        add_help=False,  # The table has --help.
        allow_abbrev=False,
    )
    parser.set_defaults(knobs={}, needless={}, switch="")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the program and its arguments; a file train.py is run with this Python",
    )
    _add_own_flags(parser)
    _add_knob_flags(parser.add_argument_group("knobs", "0 s: never; see docs/knobs.md"), shows_all)
    _add_horovods_flags(parser, shows_all)
    return parser


def _completion(shell: str) -> str:
    try:
        import shtab
    except ImportError:
        raise ArgumentError("--print-completion needs shtab: pip install shtab") from None
    parser: Any = build_parser(shows_all=True)
    for one in parser._actions:
        if one.type is Path or one.dest == "command":
            one.complete = shtab.FILE
    return shtab.complete(parser, shell)


def _rows_of(table: str) -> Iterator[list[str]]:
    for row in table.strip().replace("\n    ", " ").splitlines():
        yield [cell.strip() for cell in row.split("|")]


# What a row cannot say, by the first name of its flag.
_MORE: Mapping[str, Mapping[str, Any]] = {
    "-h": {"const": lambda _: HELP},
    "--help-all": {"const": lambda _: build_parser(shows_all=True).format_help()},
    "--print-completion": {"action": _Print, "choices": ("bash", "zsh"), "const": _completion},
    # The version is read from the metadata of the package only when it is asked for.
    "-v": {"const": lambda _: f"hvdlite {hvdlite.__version__}"},
    "--grace": {"default": DEFAULT_GRACE},
    "--via": {"choices": ("ssh", "srun"), "default": "ssh"},
    "--remote-python": {"default": Ssh.python},
    "--network-interfaces": {"action": "extend", "default": []},
    "--emit": {"choices": ("slurm", "job", "jobset", "trainjob")},
}


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group: argparse._ArgumentGroup | argparse.ArgumentParser = parser
    for flags, *cells in _rows_of(_TABLE):
        if flags.startswith("= "):
            group = parser.add_argument_group(flags[2:], *cells)
            continue
        kind, metavar, text = cells
        settings: dict[str, Any] = {"help": text, **_KINDS[kind]}
        several = tuple(metavar.split())
        if several:
            settings["metavar"] = metavar if len(several) == 1 else several
        if len(several) > 1:
            settings["nargs"] = len(several)
        first, *others = flags.split()
        group.add_argument(first, *others, **settings, **_MORE.get(first, {}))


class _SetKnob(argparse.Action):
    def __call__(self, parser: Any, options: Any, values: Any, flag: Any = None) -> None:
        value = self.const if self.nargs == 0 else values
        options.knobs = {**options.knobs, self.dest: str(value)}
        takes_value = f"{flag}=0" in parser._option_string_actions
        options.switch = self.dest if takes_value else ""


def _described(row: Mapping[str, str]) -> str:
    unit = row["unit"].removesuffix("s") if row["default"] == "1" else row["unit"]
    default = f"{row['default']} {unit}".rstrip() if row["default"] else ""
    text = row["help"] + (f" (default: {default})" if default else "")
    # In a help text argparse interprets %, which the table of knobs does not escape.
    return text.replace("%", "%%")


def _add_knob_flags(group: argparse._ArgumentGroup, shows_all: bool) -> None:
    for row in core_knobs():
        name, unit = row["name"], row["unit"]
        if name in _OTHERWISE or name in EXPERT:
            continue
        own = "--" + name.replace("_", "-")
        add = partial(_add_knob_flag, group, row["environment"], shows_all)
        if row["type"] == "int" and row["default"] in ("0", "1") and not unit:  # a switch
            add(own, _described(row), nargs=0, const=1)
            add(f"--no-{own[2:]}", f"{own} 0", nargs=0, const=0)
            for value in range(int(row["range"].rpartition(" ")[2]) + 1):
                add(f"{own}={value}", "", nargs=0, const=value)
            continue
        levels = _LOG_LEVELS if name == "log_level" else None
        reader = _READ_AS.get(name, _TYPES[row["type"]])
        metavar = None if levels else (unit.upper() or "VALUE")
        add(own, _described(row), type=reader, metavar=metavar, choices=levels)
        if name in _HOROVODS:
            flag, reader = _HOROVODS[name]
            metavar = "MB" if flag.endswith("-mb") else unit.upper()
            add(flag, f"{own} as horovodrun has it", type=reader, metavar=metavar)
        if name == "stall_warning":
            add("--no-stall-check", f"{own} 0 as horovodrun has it", nargs=0, const=0)


def _add_knob_flag(
    group: argparse._ArgumentGroup,
    variable: str,
    shows_all: bool,
    flag: str,
    text: str,
    **settings: Any,
) -> None:
    shown = text if text and shows_all else argparse.SUPPRESS
    group.add_argument(
        flag, action=_SetKnob, dest=variable, default=argparse.SUPPRESS, help=shown, **settings
    )


# Flags of horovodrun that are accepted and change nothing, what stands for a value, and why.
_NEEDLESS = """
--gloo --mpi | | there is one data plane for CPUs, and it needs no MPI
--disable-cache | | nothing about hosts is remembered
--cycle-time-ms | VALUE | there are no cycles: a request is negotiated at once
--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
    --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce
    | | the levels of an all-reduce follow from the hosts
--autotune-gaussian-process-noise | VALUE | the search compares settings pair by pair, without a
    model of the noise
--mpi-threads-disable --no-mpi-threads-disable | | there is no MPI
--mpi-args --binding-args | VALUE | there is no MPI
--thread-affinity --num-nccl-streams | VALUE | the engine chooses by itself
--log-with-timestamp --log-without-timestamp --log-hide-timestamp
    | | use --prefix-output-with-timestamp
"""


class _NoteNeedless(argparse.Action):
    """Store a flag that changes nothing, and the reason, so that main() can print it."""

    def __call__(self, parser: Any, options: Any, values: Any, flag: Any = None) -> None:
        options.needless = {**options.needless, flag: self.const}


def _add_horovods_flags(parser: argparse.ArgumentParser, shown: bool) -> None:
    """Add the flags that only horovodrun has, so that its users' commands run unchanged."""
    group = parser.add_argument_group("flags of horovodrun that change nothing here")
    for flags, metavar, why in _rows_of(_NEEDLESS):
        for flag in flags.split():
            group.add_argument(
                flag,
                action=_NoteNeedless,
                nargs=None if metavar else 0,
                const=why,
                dest="needless",
                default=argparse.SUPPRESS,
                metavar=metavar,
                help=why if shown else argparse.SUPPRESS,
            )
    # This flag turns on what is on by default.
    parser.add_argument("--stall-check", action="store_true", help=argparse.SUPPRESS)


def variables(options: argparse.Namespace) -> dict[str, str]:
    timeline, log = options.timeline_filename, options.autotune_log_file
    chosen = {
        INDEPENDENT: options.independent or None,
        "HVDLITE_REPLACE_GLOO": options.replace_gloo or None,
        "HVDLITE_START_TIMEOUT": options.start_timeout,
        "HVDLITE_TIMELINE": timeline and timeline.absolute(),
        "HVDLITE_TIMELINE_MARK_CYCLES": options.timeline_mark_cycles,
        "HVDLITE_AUTOTUNE": options.autotune,
        "HVDLITE_AUTOTUNE_LOG": log and log.absolute(),
        "NCCL_IB_DISABLE": options.tcp or None,
    }
    given = {name: one for name, one in chosen.items() if one is not None}
    texts = {name: str(int(one) if isinstance(one, bool) else one) for name, one in given.items()}
    return {**options.knobs, **texts}
