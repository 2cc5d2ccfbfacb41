"""The flags of hvdlite-run: its own, those of the core's knobs, and those of horovodrun.

The flag of a knob, its help and its default come from the core's table of knobs. If horovodrun has
a flag for the same thing with another name or unit, that flag works, too.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hvdlite.launch.command.horovod_flags import add_horovods_flags
from hvdlite.launch.command.table import add_flags
from hvdlite.launch.command.values import amount, count, megabytes
from hvdlite.launch.description import INDEPENDENT

EXAMPLE = "hvdlite-run -np 2 python train.py"
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

# It has, by knob, the name of horovodrun's flag and the function that reads its value.
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
        """Parse the command line."""
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
        if knob in EXPERT:
            super().error(f"{message}; set HVDLITE_{knob.upper()} instead")
        near = difflib.get_close_matches(unknown[1], self._option_string_actions) if unknown else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


class _HelpAll(argparse.Action):
    """Show the help with all flags, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        build_parser(shows_all=True).print_help()
        parser.exit()


def build_parser(shows_all: bool = False) -> argparse.ArgumentParser:
    """Build the parser; with `shows_all` its help also shows the knobs and horovodrun's flags."""
    parser = _Parser(
        prog="hvdlite-run",
        usage="hvdlite-run -np N [-H host:slots,...] [options] command...",
        description="Start the ranks of a training job on one or several hosts, and end them "
        "together.",
        epilog=f"example: {EXAMPLE}",
        allow_abbrev=False,
    )
    parser.set_defaults(knobs={}, needless={}, switch="")
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        help="also show the knobs and horovodrun's other flags, and exit",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the program and its arguments; a file train.py is run with this Python",
    )
    add_flags(parser)
    _add_knob_flags(
        parser.add_argument_group(
            "knobs", "each is a flag; --help-all lists them, docs/knobs.md explains them"
        ),
        shows_all,
    )
    add_horovods_flags(parser, shows_all)
    return parser


class _SetKnob(argparse.Action):
    """Store the value of a variable that the ranks get."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
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
        if row["type"] == "int" and row["default"] in ("0", "1") and not unit:
            _add_switch(group, own, row, shows_all)
            continue
        levels = _LOG_LEVELS if name == "log_level" else None
        group.add_argument(
            own,
            action=_SetKnob,
            dest=row["environment"],
            type=_READ_AS.get(name, _TYPES[row["type"]]),
            metavar=None if levels else (unit.upper() or "VALUE"),
            choices=levels,
            default=argparse.SUPPRESS,
            help=_described(row) if shows_all else argparse.SUPPRESS,
        )
        if name in _HOROVODS:
            flag, read = _HOROVODS[name]
            unit = "MB" if flag.endswith("-mb") else unit.upper()
            group.add_argument(
                flag,
                action=_SetKnob,
                dest=row["environment"],
                type=read,
                metavar=unit,
                default=argparse.SUPPRESS,
                help=f"{own} as horovodrun has it" if shows_all else argparse.SUPPRESS,
            )
        if name == "stall_warning":
            group.add_argument(
                "--no-stall-check",
                action=_SetKnob,
                dest=row["environment"],
                nargs=0,
                const=0,
                default=argparse.SUPPRESS,
                help=f"{own} 0 as horovodrun has it" if shows_all else argparse.SUPPRESS,
            )


def _add_switch(
    group: argparse._ArgumentGroup, own: str, row: Mapping[str, str], shows_all: bool
) -> None:
    """Add --name and --no-name for a knob whose least value is 0."""
    most = int(row["range"].rpartition(" ")[2])
    spellings = (
        (own, 1, _described(row)),
        (f"--no-{own[2:]}", 0, f"{own} 0"),
        *((f"{own}={value}", value, "") for value in range(most + 1)),
    )
    for flag, value, text in spellings:
        group.add_argument(
            flag,
            action=_SetKnob,
            dest=row["environment"],
            nargs=0,
            const=value,
            default=argparse.SUPPRESS,
            help=text if text and shows_all else argparse.SUPPRESS,
        )


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the flags set for every rank."""
    found = dict(options.knobs)
    if options.independent:
        found[INDEPENDENT] = "1"
    if options.start_timeout is not None:
        found["HVDLITE_START_TIMEOUT"] = str(options.start_timeout)
    if options.timeline_filename is not None:
        found["HVDLITE_TIMELINE"] = str(options.timeline_filename.absolute())
    if options.timeline_mark_cycles is not None:
        found["HVDLITE_TIMELINE_MARK_CYCLES"] = str(int(options.timeline_mark_cycles))
    if options.autotune is not None:
        found["HVDLITE_AUTOTUNE"] = str(int(options.autotune))
    if options.autotune_log_file is not None:
        found["HVDLITE_AUTOTUNE_LOG"] = str(options.autotune_log_file.absolute())
    if options.tcp:
        found["NCCL_IB_DISABLE"] = "1"
    return found
