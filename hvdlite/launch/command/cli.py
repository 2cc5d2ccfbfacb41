"""The command hvdlite-run: it turns the command line into the description of a job, and runs it.

`main` reads the environment once and passes it on as a mapping. Besides it, `hvdlite.launch.api`
reads the environment for `hvdlite.run`, the agent reads that of its login, `call` reads the
descriptor for its result, and `process.local` passes on that of a task of cluster software. No
other module of the launcher reads environment variables.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch.channels import RemoteLauncher, Srun, Ssh, allocated_hosts
from hvdlite.launch.command import flags
from hvdlite.launch.command.config_file import ConfigError, arguments_from
from hvdlite.launch.command.elastic_flags import describe_elastic
from hvdlite.launch.command.emit_flags import emit_request
from hvdlite.launch.command.live_flags import viewers
from hvdlite.launch.command.node_flags import this_node
from hvdlite.launch.command.server_flags import describe_servers, refuse_contradictions
from hvdlite.launch.description import Description
from hvdlite.launch.emit import emit
from hvdlite.launch.hosts import MOST_SLOTS, Host, HostsError, read_hostfile, read_hosts
from hvdlite.launch.process import STDERR, STDOUT, without_outer_job
from hvdlite.launch.run import run_job
from hvdlite.rendezvous.descriptors import explained

_COLUMNS_OF_PREFIX = 6


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, preceded by the flags of its --config-file, if any."""
    options = parser.parse_args(arguments)
    if options.config_file is None:
        return options
    path = options.config_file
    from_file = arguments_from(_text_of("--config-file", path), str(path), parser)
    return parser.parse_args([*from_file, *arguments])


def _text_of(flag: str, path: Path) -> str:
    """Read a file that a flag names; an OSError names the flag."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "this is not a text file")
        raise OSError(f"{flag} {path}: {why}") from None


def choose_hosts(
    parser: argparse.ArgumentParser, options: argparse.Namespace, environment: Mapping[str, str]
) -> list[Host]:
    """Read the hosts, and set the number of ranks if -np does not."""
    # Without -np, a rank runs in every slot of the hosts; with --nproc-per-node, that many ranks
    # run on each host. With --host-discovery-script, an elastic job then starts with --min-np
    # ranks.
    hosts: list[Host] = []
    if options.hosts is not None and options.hostfile is not None:
        parser.error("-H and --hostfile: give one of them")
    if options.hosts is not None:
        hosts = read_hosts(options.hosts)
    elif options.hostfile is not None:
        text = _text_of("--hostfile", options.hostfile)
        hosts = read_hostfile(text, str(options.hostfile))
    elif options.via == "srun" and options.host_discovery_script is None:
        hosts = allocated_hosts(environment)
    if options.nproc_per_node is not None:
        if options.num_proc is not None:
            parser.error("-np and --nproc-per-node: give one of them")
        if options.nproc_per_node < 1:
            parser.error(f"--nproc-per-node {options.nproc_per_node}: at least one is needed")
        hosts = [Host(host.name, options.nproc_per_node) for host in hosts]
        options.num_proc = max(1, len(hosts)) * options.nproc_per_node
    if options.host_discovery_script is not None and (hosts or options.hosts or options.hostfile):
        parser.error("--host-discovery-script and -H or --hostfile: give one of them")
    if options.num_proc is None and hosts:
        slots = sum(host.slots for host in hosts)
        options.num_proc = slots if options.max_np is None else min(slots, options.max_np)
    if options.num_proc is None and options.nodes is None:  # A node has ranks of its own.
        options.num_proc = options.min_np
    if options.num_proc is not None and options.num_proc > MOST_SLOTS * max(1, len(hosts)):
        parser.error(f"-np {options.num_proc}: at most {MOST_SLOTS} ranks run on a host")
    return hosts


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, path: str) -> None:
    """Check that the command can run; otherwise exit with a message that says what to write."""
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.num_proc is None:
        parser.error(f"say how many ranks to start with -np, for example: {flags.EXAMPLE}")
    if options.num_proc < 1:
        parser.error(f"-np {options.num_proc}: at least one rank is needed")
    timeline = options.timeline_filename
    if timeline is not None and not timeline.absolute().parent.is_dir():
        parser.error(f"--timeline-filename {timeline}: there is no such folder")
    if not options.command:
        parser.error(f"say what to run, for example: {flags.EXAMPLE}")
    options.command = with_python(options.command, options.module, path)
    program = options.command[0]
    if shutil.which(program, path=path) is None:
        if program.endswith(".py"):
            parser.error(f"there is no file {program} in {Path.cwd()}")
        parser.error(
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
    """Return how the other hosts are reached."""
    seconds = Ssh.connect_seconds if options.start_timeout is None else options.start_timeout
    if options.via == "srun":
        return Srun(options.remote_python, seconds)
    return Ssh(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        config=options.ssh_config,
        python=options.remote_python,
        connect_seconds=seconds,
    )


def describe_job(
    options: argparse.Namespace,
    hosts: Sequence[Host],
    environment: Mapping[str, str],
    launches: bool,
) -> Description:
    """Turn the parsed command line into the description of a job."""
    # `launches` says whether this process launches the job, and does not just bring a node to it.
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
        elastic=describe_elastic(options, environment),
        servers=describe_servers(options),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdlite-run with these arguments (the process's by default); return its exit status."""
    parser = flags.build_parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments:
        parser.print_help()
        return 0
    environment = dict(os.environ)
    try:
        options = parse(parser, arguments)
        refuse_contradictions(options)
        request = emit_request(options, flags.variables(options))
        if request is not None:
            sys.stdout.write(emit(options.emit, request))
            return 0
        here = this_node(options, environment)
        hosts = choose_hosts(parser, options, environment)
        if options.doctor:
            from hvdlite.launch.command.doctor import examine

            return examine(environment, reach(options, hosts), len(hosts))
        check(parser, options, environment.get("PATH", os.defpath))
        what = describe_job(options, hosts, environment, here is None or here.node == 0)
        for flag, why in options.needless.items():
            print(f"hvdlite-run: {flag} changes nothing here: {why}", file=sys.stderr)
        if here is None:
            return run_job(what).status
        from hvdlite.launch.nodes import run_node

        return run_node(here, what)
    except KeyboardInterrupt:
        return 130
    except (ArgumentError, ConfigError, HostsError) as error:
        parser.error(str(error))
    except (BootstrapError, OSError) as error:
        print(f"hvdlite-run: {explained(error)}", file=sys.stderr)
        return 1
