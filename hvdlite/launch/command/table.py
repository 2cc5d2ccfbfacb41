"""The table of hvdlite-run's own flags, and the parser's arguments that come from it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hvdlite
from hvdlite.launch.channels import Ssh
from hvdlite.launch.command.values import amount, count, names, port
from hvdlite.launch.description import DEFAULT_GRACE, Elastic, Servers
from hvdlite.launch.emit import KINDS

_ELASTIC, _SERVERS = Elastic(), Servers(1)
# A row has the names of a flag, what reads its value, what stands for the value in the help, and
# the help, which goes on in lines that are indented. A row that begins with = opens a group.
_TABLE = f"""
-np --num-proc --np | int | N | number of ranks
--nproc-per-node --nproc_per_node | int | N | number of ranks on each host, instead of -np and slots
-m --module | switch | | the command is a module and its arguments: run `python -m` with this Python
-v --version | str | | show program's version number and exit
--doctor -cb --check-build | switch | | say what works on this machine (and those of -H), and why
    the rest does not
--compat | switch | | let `import horovod` find hvdlite, for scripts written for Horovod
--verbose | switch | | say what is started
--start-timeout | amount | SECONDS | how long hvd.init() waits for all ranks, and ssh for a host;
    0: without a limit
--grace | amount | SECONDS | how long the ranks have to save something after Ctrl-C or SIGTERM
    before they are killed; 0: at once (default: {DEFAULT_GRACE:g})
--config-file | Path | FILE | read options from this YAML file; those of horovodrun work, too
--independent | switch | | the ranks need nothing from each other: it is not an error if none
    of them calls hvd.init()
= several hosts
-H --hosts | str | HOST:SLOTS,... | where to run; -np fills them in order
-hostfile --hostfile | Path | FILE | the same from a file, with lines such as HOST:N or
    HOST slots=N
--via | str | | how to reach the hosts; with srun they are those of the Slurm allocation
-p --ssh-port | port | PORT | port of sshd on the other hosts
-i --ssh-identity-file | Path | FILE | private key for ssh
--ssh-config | Path | FILE | configuration file for ssh, instead of ~/.ssh/config
--remote-python | str | PATH | Python with hvdlite on the other hosts, if its path differs from this
    host's
--network-interfaces --network-interface | names | NAME,... | network interfaces for the traffic
    between hosts (default: those of the routes between them)
--tcp | switch | | keep NCCL from using InfiniBand
= node mode | hvdlite-run is started once on each node; see docs/launch.md
--nodes | str | N | number of nodes; auto: read it from Kubeflow Trainer's variables (PET_...), or
    from a step of srun with one task on each node
--node-rank | int | R | number of this node, from 0
--meet | str | HOST:PORT | host of node 0 and a free port there, where it waits for the others
= elastic jobs | ranks may die and join; see docs/elastic.md
--min-np --min-num-proc | count | N | continue while at least this many ranks are left (default: the
    number of -np)
--max-np --max-num-proc | count | N | use at most this many ranks (default: as many as the hosts
    have slots)
--host-discovery-script | str | COMMAND | run this command every second; it prints the available
    hosts, as lines of HOST[:SLOTS]
--slots-per-host | count | N | slots of a host for which the script prints none (default: 1)
--elastic-timeout | amount | SECONDS | how long to wait while there are fewer than --min-np ranks or
    slots (default: {_ELASTIC.timeout:g})
--reset-limit | count | N | end the job when its ranks have changed more than this many times
    (default: no limit)
--blacklist-cooldown-range | amount | MIN MAX | seconds without new ranks for a host whose ranks die
    again and again (default: {_ELASTIC.cooldown[0]:g} {_ELASTIC.cooldown[1]:g})
--elastic-heartbeat | amount | SECONDS | how long a host may be silent before it counts as dead; a
    rank may for 20 times as long (default: {_ELASTIC.heartbeat:g})
--drain-timeout | amount | SECONDS | how long ranks may take to leave a host that is taken away, or
    to end after an exception (default: {_ELASTIC.drain_timeout:g})
= parameter servers | asynchronous training; see docs/parameter_server.md
--servers | count | N | the first N ranks of -np are parameter servers, and the others workers
--min-workers | count | N | continue while at least this many workers live (default:
    {_SERVERS.min_workers})
--worker-restarts | count | N | how many times in a row a worker that dies is started again
    (default: {_SERVERS.restarts})
= cluster software | see docs/slurm.md
--emit | str | | print a description of the job for this cluster software instead of running it
--ntasks-per-node | int | N | largest number of ranks on a node (default: all ranks on one node)
--name | str | NAME | name of the job (default: train)
--image | str | IMAGE | container image of the ranks
= output
--output-filename | Path | DIR | also write each rank's output to DIR/rank.N/stdout and
    DIR/rank.N/stderr
--prefix-output-with-timestamp -prefix-timestamp --prefix-timestamp | switch | | put the time before
    each line, too
= live view | see docs/live.md
--live | switch | | below the output, show what each rank does, and which one delays the others
--report | Path | OUT.HTML | write a report of what limits the job, with charts: anew every few
    seconds, and at its end with the figures beside it in OUT.json
--baseline | Path | ONE.JSON | the OUT.json of the same training on fewer ranks: --report then says
    where the missing speed-up went
= timeline | see docs/timeline.md
--timeline-filename --timeline | Path | FILE | write a timeline of all ranks to one file, for
    ui.perfetto.dev
--timeline-mark-cycles | either | | mark the engine's rounds in it, too
= autotune | see docs/autotune.md
--autotune | either | | search for faster values of the knobs while training runs
--autotune-log-file --autotune-log | Path | FILE | write what autotune measures, as lines of JSON
"""
_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "Path": Path,
    "count": count,
    "amount": amount,
    "names": names,
    "port": port,
}


class _Version(argparse.Action):
    """Print the version, which is read from the metadata of the package only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"hvdlite {hvdlite.__version__}")
        parser.exit()


_ACTIONS = {"switch": "store_true", "either": argparse.BooleanOptionalAction}
# What a row cannot say, by the first name of its flag.
_MORE: Mapping[str, Mapping[str, Any]] = {
    "-v": {"action": _Version, "nargs": 0, "default": argparse.SUPPRESS},
    "--grace": {"default": DEFAULT_GRACE},
    "--via": {"choices": ("ssh", "srun"), "default": "ssh"},
    "--remote-python": {"default": Ssh.python},
    "--network-interfaces": {"action": "extend", "default": []},
    "--emit": {"choices": tuple(KINDS)},
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table to a parser, and their groups."""
    group: argparse._ArgumentGroup | argparse.ArgumentParser = parser
    for row in _TABLE.strip().replace("\n    ", " ").splitlines():
        if row.startswith("= "):
            title, _, about = row[2:].partition(" | ")
            group = parser.add_argument_group(title, about or None)
            continue
        flags, kind, metavar, text = (cell.strip() for cell in row.split("|", 3))
        settings: dict[str, Any] = {"help": text}
        if kind in _ACTIONS:
            settings["action"] = _ACTIONS[kind]
        elif kind in _READERS:
            settings["type"] = _READERS[kind]
        several = tuple(metavar.split())
        if several:
            settings["metavar"] = metavar if len(several) == 1 else several
        if len(several) > 1:
            settings["nargs"] = len(several)
        first, *others = flags.split()
        group.add_argument(first, *others, **settings, **_MORE.get(first, {}))
