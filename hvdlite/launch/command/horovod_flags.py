"""Flags that only horovodrun has: hvdlite-run accepts those that need no effect, else refuses."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Needless:
    """Flags of horovodrun that are accepted and change nothing, and the reason."""

    flags: Sequence[str]
    why: str
    takes_value: bool = False


_NEEDLESS = (
    _Needless(("--gloo", "--mpi"), "there is one data plane for CPUs, and it needs no MPI"),
    _Needless(("--disable-cache",), "nothing about hosts is remembered"),
    _Needless(("--cycle-time-ms",), "there are no cycles: a request is negotiated at once", True),
    _Needless(
        (
            *("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
            *("--hierarchical-allgather", "--no-hierarchical-allgather"),
            *("--torus-allreduce", "--no-torus-allreduce"),
        ),
        "the levels of an all-reduce follow from the hosts",
    ),
    _Needless(
        ("--autotune-gaussian-process-noise",),
        "the search compares settings pair by pair, without a model of the noise",
        True,
    ),
    _Needless(("--mpi-threads-disable", "--no-mpi-threads-disable"), "there is no MPI"),
    _Needless(("--mpi-args", "--binding-args"), "there is no MPI", True),
    _Needless(("--thread-affinity", "--num-nccl-streams"), "the engine chooses by itself", True),
    _Needless(
        ("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp"),
        "use --prefix-output-with-timestamp",
    ),
)

# Flags of horovodrun that need an effect, which hvdlite does not have; the key says what to do.
_REFUSED: Mapping[str, Sequence[str]] = {
    "there is no jsrun here; use -H, --hostfile, or srun or mpirun instead of hvdlite-run": (
        "--jsrun",
    ),
}


class _NoteNeedless(argparse.Action):
    """Store a flag that changes nothing, and the reason, so that main() can print it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        options.needless = {**options.needless, flag: self.const}


class _Refuse(argparse.Action):
    """Exit with the reason why there is no such flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        parser.error(f"{flag}: {self.const}")


def add_horovods_flags(parser: argparse.ArgumentParser, shown: bool) -> None:
    """Add the flags that only horovodrun has, so that its users' commands run unchanged."""
    group = parser.add_argument_group("flags of horovodrun that change nothing here")
    for row in _NEEDLESS:
        for flag in row.flags:
            group.add_argument(
                flag,
                action=_NoteNeedless,
                nargs=None if row.takes_value else 0,
                const=row.why,
                dest="needless",
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=row.why if shown else argparse.SUPPRESS,
            )
    for why, refused in _REFUSED.items():
        parser.add_argument(
            *refused,
            action=_Refuse,
            nargs=0,
            const=why,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    # This flag turns on what is on by default.
    parser.add_argument("--stall-check", action="store_true", help=argparse.SUPPRESS)
