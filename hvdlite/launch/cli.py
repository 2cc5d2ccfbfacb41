"""The command hvdlite-run: it turns the command line into the description of a job, and runs it.

`main` reads the environment once and passes it on as a mapping. Besides it, `hvdlite.launch.api`
reads the environment for `hvdlite.run`, the agent reads that of its login, `call` reads the
descriptor for its result, `process` passes on that of a task of cluster software, and `node` reads
the secret and the address of a node.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch import flags
from hvdlite.launch.channels import RemoteLauncher, Srun, Ssh, allocated_hosts
from hvdlite.launch.console import Console
from hvdlite.launch.description import Description, Elastic, Servers, elastic_job
from hvdlite.launch.hosts import MOST_SLOTS, Host, read_hostfile, read_hosts
from hvdlite.launch.node import run_node, this_node
from hvdlite.launch.output import MakeViewer
from hvdlite.launch.process import STDERR, STDOUT, without_outer_job
from hvdlite.launch.run import run_job
from hvdlite.rendezvous.descriptors import explained

_COLUMNS_OF_PREFIX = 6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flags.build_parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments:
        parser.error(
            f"say how many ranks to start with -np, and which program to run\n\n{flags.EXAMPLES}\n"
            "--help shows the common options."
        )
    environment = dict(os.environ)
    try:
        options = parse(parser, arguments)
        refuse_contradictions(options)
        description = emitted(options, flags.variables(options))
        if description is not None:
            sys.stdout.write(description)
            return 0
        here = this_node(options, environment)
        hosts = choose_hosts(options, environment)
        if options.doctor:
            from hvdlite.launch.doctor import examine

            return examine(environment, reach(options, hosts), len(hosts))
        check(options, environment.get("PATH", os.defpath))
        what = describe_job(options, hosts, environment, here is None or here.node == 0)
        for flag, why in options.needless.items():
            print(f"hvdlite-run: {flag} changes nothing here: {why}", file=sys.stderr)
        return run_job(what).status if here is None else run_node(here, what)
    except KeyboardInterrupt:
        return 130
    except ArgumentError as error:
        parser.error(str(error))
    except (BootstrapError, OSError) as error:
        print(f"hvdlite-run: {explained(error)}", file=sys.stderr)
        return 1


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, preceded by the flags of its --config-file, if any."""
    options = parser.parse_args(arguments)
    if options.config_file is None:
        return options
    path = options.config_file
    from_file = arguments_from(_text_of("--config-file", path), str(path), parser)
    return parser.parse_args([*from_file, *arguments])


def _text_of(flag: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "this is not a text file")
        raise OSError(f"{flag} {path}: {why}") from None


def choose_hosts(options: argparse.Namespace, environment: Mapping[str, str]) -> list[Host]:
    """Read the hosts, and set the number of ranks if -np does not.

    Without -np, a rank runs in every slot of the hosts; with --nproc-per-node, that many ranks run
    on each host. With --host-discovery-script, an elastic job then starts with --min-np ranks.
    """
    hosts: list[Host] = []
    if options.hosts is not None and options.hostfile is not None:
        raise ArgumentError("-H and --hostfile: give one of them")
    if options.hosts is not None:
        hosts = read_hosts(options.hosts)
    elif options.hostfile is not None:
        text = _text_of("--hostfile", options.hostfile)
        hosts = read_hostfile(text, str(options.hostfile))
    elif options.via == "srun" and options.host_discovery_script is None:
        hosts = allocated_hosts(environment)
    if options.nproc_per_node is not None:
        if options.num_proc is not None:
            raise ArgumentError("-np and --nproc-per-node: give one of them")
        if options.nproc_per_node < 1:
            raise ArgumentError(
                f"--nproc-per-node {options.nproc_per_node}: at least one is needed"
            )
        hosts = [Host(host.name, options.nproc_per_node) for host in hosts]
        options.num_proc = max(1, len(hosts)) * options.nproc_per_node
    if options.host_discovery_script is not None and (hosts or options.hosts or options.hostfile):
        raise ArgumentError("--host-discovery-script and -H or --hostfile: give one of them")
    if options.num_proc is None and hosts:
        slots = sum(host.slots for host in hosts)
        options.num_proc = slots if options.max_np is None else min(slots, options.max_np)
    if options.num_proc is None and options.nodes is None:  # A node has ranks of its own.
        options.num_proc = options.min_np
    if options.num_proc is not None and options.num_proc > MOST_SLOTS * max(1, len(hosts)):
        raise ArgumentError(f"-np {options.num_proc}: at most {MOST_SLOTS} ranks run on a host")
    return hosts


def check(options: argparse.Namespace, path: str) -> None:
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.num_proc is None:
        raise ArgumentError(f"say how many ranks to start with -np, for example: {flags.EXAMPLE}")
    if options.num_proc < 1:
        raise ArgumentError(f"-np {options.num_proc}: at least one rank is needed")
    timeline = options.timeline_filename
    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise ArgumentError(f"--timeline-filename {timeline}: there is no such folder")
    if not options.command:
        raise ArgumentError(f"say what to run, for example: {flags.EXAMPLE}")
    options.command = with_python(options.command, options.module, path)
    program = options.command[0]
    if shutil.which(program, path=path) is None:
        if program.endswith(".py"):
            raise ArgumentError(f"there is no file {program} in {Path.cwd()}")
        raise ArgumentError(
            f"cannot find the program {program!r}; this hvdlite-run belongs to {sys.prefix}: "
            "is that environment activated?"
        )


def with_python(command: list[str], is_module: bool, path: str) -> list[str]:
    """Put this Python before a module, and before a script that is not executable itself."""
    if is_module:
        return [sys.executable, "-m", *command]
    script = command[0].endswith(".py") and Path(command[0]).is_file()
    if script and shutil.which(command[0], path=path) is None:
        return [sys.executable, *command]
    return command


def terminal_width(environment: Mapping[str, str]) -> dict[str, str]:
    """Set COLUMNS to the terminal's width, for progress bars: the output of a rank is a pipe."""
    for fd in (STDERR, STDOUT):
        if "COLUMNS" not in environment and os.isatty(fd):
            width = os.get_terminal_size(fd).columns - _COLUMNS_OF_PREFIX
            return {"COLUMNS": str(width)} if width > 0 else {}
    return {}


def remote_launcher_of(options: argparse.Namespace) -> RemoteLauncher:
    seconds = Ssh.connect_seconds if options.start_timeout is None else options.start_timeout
    python = options.remote_python
    if options.via == "srun":
        return Srun(python, seconds)
    return Ssh(python, seconds, options.ssh_port, options.ssh_identity_file, options.ssh_config)


def _check_replace_gloo(environment: Mapping[str, str], other: Elastic | Servers | None) -> None:
    """Raise where --replace-gloo would have no effect."""
    if other:
        raise ArgumentError(
            "--replace-gloo: a job that is elastic, or has parameter servers, has no process groups"
        )
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise ArgumentError(
            "--replace-gloo needs torch to load backends: unset TORCH_DEVICE_BACKEND_AUTOLOAD"
        )
    try:
        release = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # The program says it.
    if [int(one) for one in re.findall(r"\d+", release)[:2]] < [2, 5]:
        raise ArgumentError(
            f"--replace-gloo needs torch 2.5 or newer, and here is torch {release}, which loads "
            "hvdlite only where a script has `import hvdlite.torch`; add that line, and set "
            "HVDLITE_REPLACE_GLOO=1 instead of the flag"
        )


def describe_job(
    options: argparse.Namespace,
    hosts: Sequence[Host],
    environment: Mapping[str, str],
    launches: bool,
) -> Description:
    """Describe the job; `launches` is False where this process only brings a node to it."""
    elastic, servers = describe_elastic(options, environment), describe_servers(options)
    if options.replace_gloo:
        _check_replace_gloo(environment, elastic or servers)
    return Description(
        command=options.command,
        ranks=options.num_proc,
        environment={
            **without_outer_job(environment),
            **terminal_width(environment),
            **flags.variables(options),
        },
        hosts=hosts,
        remote_launcher=remote_launcher_of(options),
        interfaces=options.network_interfaces,
        output_folder=options.output_filename,
        timestamps=options.prefix_output_with_timestamp,
        verbose=options.verbose,
        compat=options.compat,
        grace=options.grace,
        elastic=elastic,
        servers=servers,
        viewers=viewers(options, environment) if launches else (),
    )


def reach(options: argparse.Namespace, hosts: Sequence[Host]) -> list[str]:
    """Return the flags by which hvdlite-run reaches these hosts, for a job of one rank on each."""
    flags_of = {
        "-H": ",".join(host.name for host in hosts) or None,
        "--via": options.via,
        "--ssh-port": options.ssh_port,
        "--ssh-identity-file": options.ssh_identity_file and options.ssh_identity_file.absolute(),
        "--ssh-config": options.ssh_config and options.ssh_config.absolute(),
        "--remote-python": options.remote_python,
        "--network-interfaces": ",".join(options.network_interfaces or ()) or None,
        "--start-timeout": options.start_timeout,
    }
    given = {flag: str(value) for flag, value in flags_of.items() if value is not None}
    return [word for pair in given.items() for word in pair]


def arguments_from(text: str, path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Turn the text of a --config-file into arguments, to be put before those of the command line.

    Every flag may stand there by its long name, with underscores or hyphens. Anything else is a
    ArgumentError.
    """
    import yaml  # Other command lines do not wait for it.

    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ArgumentError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ArgumentError(f"{path} must have lines of `flag: value`")
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    arguments: list[str] = []
    for key, value in content.items():
        flag = _flag(key)
        if flag not in known or isinstance(value, dict):
            raise ArgumentError(f"{path}: {key} is not a flag of hvdlite-run")
        if f"{flag}=0" in known and value in (0, 1, "0", "1"):  # True and False, too
            arguments.append(f"{flag}={int(value)}")
        else:
            arguments += _argument(flag, value, known[flag].nargs)
    return arguments


def _flag(name: object) -> str:
    return f"--{str(name).replace('_', '-')}"


def _argument(flag: str, value: Any, nargs: int | str | None) -> list[str]:
    may_stand_alone = nargs in (0, "?")
    if value is None or (may_stand_alone and value is False):
        return []
    if nargs == 0 or (may_stand_alone and value is True):
        return [flag]
    if isinstance(value, list) and isinstance(nargs, int):
        return [flag, *map(str, value)]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return [flag, str(value)]


def describe_elastic(options: argparse.Namespace, environment: Mapping[str, str]) -> Elastic | None:
    """Turn the flags into the description of an elastic job; None for any other job.

    Flags that change nothing are added to `options.needless`, each with the reason.
    """
    given = {field.name: getattr(options, field.name) for field in fields(Elastic)}
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    elastic = elastic_job(**given)
    if elastic is None:
        why = "--min-np, --max-np or --host-discovery-script make a job elastic"
        needless = dict.fromkeys(map(_flag, given), why)
        options.needless = {**options.needless, **needless}
        return None
    if elastic.host_discovery_script is None and elastic.slots_per_host is not None:
        why = "it belongs to --host-discovery-script; -H has the slots of its hosts"
        options.needless = {**options.needless, "--slots-per-host": why}
        elastic = replace(elastic, slots_per_host=None)
    try:
        timeout = float(environment.get("HOROVOD_ELASTIC_TIMEOUT") or elastic.elastic_timeout)
    except ValueError:
        timeout = elastic.elastic_timeout
    return elastic if "elastic_timeout" in given else replace(elastic, elastic_timeout=timeout)


# What a described job cannot have, by the name in the options.
_NOT_WITH_EMIT = {
    "hosts": "-H (the cluster chooses the hosts)",
    "hostfile": "--hostfile (the cluster chooses the hosts)",
    "nproc_per_node": "--nproc-per-node (write --ntasks-per-node)",
    "compat": "--compat",
    "min_np": "--min-np",
    "max_np": "--max-np",
    "host_discovery_script": "--host-discovery-script",
    "nodes": "--nodes (write --ntasks-per-node, from which the number of nodes follows)",
    "output_filename": "--output-filename",
    "prefix_output_with_timestamp": "--prefix-output-with-timestamp",
}
_NOT_WITH_SERVERS = {
    "min_np": "--min-np (write --min-workers)",
    "max_np": "--max-np",
    "host_discovery_script": "--host-discovery-script",
    "emit": "--emit",
}


def _refuse_without(needed: str, options: argparse.Namespace, names: Iterable[str]) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ArgumentError(f"{_flag(name)} belongs to {needed}, which is not given")


def emitted(options: argparse.Namespace, variables: Mapping[str, str]) -> str | None:
    """Return the job as a description for cluster software; None without --emit."""
    if options.emit is None:
        _refuse_without("--emit", options, ("ntasks_per_node", "name", "image"))
        return None
    for dest, flag in _NOT_WITH_EMIT.items():
        if getattr(options, dest):
            raise ArgumentError(
                f"{flag} and --emit: a job that is described for a cluster cannot have both"
            )
    if options.num_proc is None:
        raise ArgumentError("--emit: say how many ranks the job has with -np")
    if not math.isfinite(options.grace):
        raise ArgumentError(f"--grace {options.grace:g} and --emit: give a number of seconds")
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if options.module and command:
        command = ["python", "-m", *command]
    elif command and command[0].endswith(".py"):
        command = ["python", *command]
    per_node = options.ntasks_per_node
    from hvdlite.launch.emit import EmitRequest, emit  # Other command lines do not wait for it.

    request = EmitRequest(
        command=command,
        ranks=options.num_proc,
        ranks_per_node=options.num_proc if per_node is None else per_node,
        name="train" if options.name is None else options.name,
        image=options.image,
        grace=options.grace,
        variables=variables,
    )
    return emit(options.emit, request)


def refuse_contradictions(options: argparse.Namespace) -> None:
    if options.servers is None:
        _refuse_without("--servers", options, ("min_workers", "worker_restarts"))
        return
    for dest, flag in _NOT_WITH_SERVERS.items():
        if getattr(options, dest) is not None:
            raise ArgumentError(f"--servers and {flag}: a job has one of them")


def describe_servers(options: argparse.Namespace) -> Servers | None:
    if options.servers is None:
        return None
    least, restarts = options.min_workers, options.worker_restarts
    return Servers(
        options.servers,
        Servers.min_workers if least is None else least,
        Servers.restarts if restarts is None else restarts,
    )


_LONGEST_END = 1.0  # seconds that the launcher waits for a slow terminal


def viewers(options: argparse.Namespace, environment: Mapping[str, str]) -> list[MakeViewer]:
    found: list[MakeViewer] = []  # Ordinary jobs have none, and do not wait for these imports.
    if options.live:
        from hvdlite.live.screen import Screen

        rows = environment.get("TERM", "dumb") != "dumb"
        colour = not environment.get("NO_COLOR")
        found.append(lambda console: Screen(console, rows, colour))
    if options.report is not None:
        from hvdlite.live.report import Report, check_path

        check_path(options.report)
        found.append(lambda console: Report(options.report, partial(_say_last, console)))
    return found


def _say_last(console: Console, text: str) -> None:
    console.say(text)
    console.drained(_LONGEST_END)
