"""`hvdlite.run`: call a function on many ranks, from Python or a notebook."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, RankFailedError
from hvdlite.launch.call import Returned, pack, unpack_error, unpack_result
from hvdlite.launch.channels import Ssh
from hvdlite.launch.description import DEFAULT_GRACE, Description, Outcome, elastic_job
from hvdlite.launch.hosts import Host, read_hostfile, read_hosts
from hvdlite.launch.process import without_outer_job
from hvdlite.launch.report import Failure, last_lines, verdict
from hvdlite.launch.run import run_job
from hvdlite.rendezvous.environment import EXIT_STOPPED

_INTERRUPTED = 130
_ENDED_BY_SIGNAL = (128 + signal.SIGTERM, 128 + signal.SIGHUP)


class RemoteTraceback(Exception):
    """The traceback of a rank, as text; it is the cause of the exception that `run` raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    hostfile: str | Path | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | Path | None = None,
    ssh_config: str | Path | None = None,
    network_interfaces: Sequence[str] = (),
    output_filename: str | Path | None = None,
    prefix_output_with_timestamp: bool = False,
    verbose: bool = False,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    grace: float = DEFAULT_GRACE,
    **elastic: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `np` ranks and return their results in rank order.

    Every rank is a new process, in which the function calls `hvd.init()` as a script would.
    Function, arguments and results are pickled (functions of a notebook by value).

    Args:
        fn: the function; import frameworks inside it, or at the top of its module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: the number of ranks; by default one for each slot of the hosts, or 1.
        hosts: the hosts and their slots, as for `-H`: "host1:2,host2:2"; by default this machine.
        hostfile: a file that lists them instead.
        start_timeout: seconds that hosts and ranks have to find each other; 0 for no limit.
        ssh_port: the port of sshd on the other hosts.
        ssh_identity_file: a private key for ssh.
        ssh_config: the configuration file that ssh reads instead of the user's.
        network_interfaces: names of the network interfaces by which the hosts reach each other.
        output_filename: a folder for copies of the ranks' output.
        prefix_output_with_timestamp: whether the time stands before each line of output.
        verbose: whether to print the process and command of each rank.
        env: the environment of the ranks; by default that of this process.
        executable: the Python to run, here and on other hosts; by default this one.
        grace: seconds from Ctrl-C (or a notebook's "stop") or SIGTERM until ranks are killed.
        **elastic: `min_np`, `max_np` and the other settings of an elastic job; see `elastic_job`.

    Returns:
        The result of each rank; in an elastic job, of each rank of its last epoch.

    Raises:
        ArgumentError: the number of ranks, the hosts, a timeout or the grace cannot be used.
        RankFailedError: a rank failed without an exception, or with one that cannot be pickled.
        Exception: that of the first failing rank, with its traceback as the cause.
        SystemExit: SIGTERM or SIGHUP to this process ended the ranks; Ctrl-C: KeyboardInterrupt.

    Example:
        >>> import hvdlite
        >>> def number():
        ...     import hvdlite.torch as hvd; hvd.init()
        ...     return hvd.rank() * 10
        >>> hvdlite.run(number, np=2)
        [0, 10]
    """
    chosen, python = _hosts(hosts, hostfile), executable or sys.executable
    seconds = Ssh.connect_seconds if start_timeout is None else start_timeout
    what = Description(
        command=[python, "-m", "hvdlite.launch.call"],
        ranks=_ranks(np, chosen, elastic),
        environment=_environment(env, start_timeout),
        hosts=chosen,
        remote_launcher=Ssh(python, seconds, ssh_port, ssh_identity_file, ssh_config),
        interfaces=network_interfaces,
        output_folder=output_filename,
        timestamps=prefix_output_with_timestamp,
        verbose=verbose,
        stdin=pack(fn, args, kwargs or {}),
        grace=grace,
        elastic=elastic_job(**elastic),
    )
    return results_of(_outcome_of(what))


def _outcome_of(what: Description) -> Outcome:
    if what.ranks < 1:
        raise ArgumentError(f"np={what.ranks}: at least one rank is needed")
    if not what.grace >= 0:
        raise ArgumentError(f"grace={what.grace}: give a number of seconds, 0 or more")
    return run_job(what)


def _ranks(np: int | None, hosts: Sequence[Host], elastic: Mapping[str, Any]) -> int:
    if np is not None:
        return np
    slots = sum(host.slots for host in hosts)
    most = elastic.get("max_np")
    return (slots if most is None else min(slots, most)) or elastic.get("min_np") or 1


def _environment(env: Mapping[str, str] | None, start_timeout: float | None) -> dict[str, str]:
    environment = without_outer_job(os.environ if env is None else env)
    if start_timeout is not None:
        if not start_timeout >= 0:
            raise ArgumentError(
                f"start_timeout={start_timeout}: give a number of seconds, or 0 for no limit"
            )
        environment["HVDLITE_START_TIMEOUT"] = str(start_timeout)
    return environment


def _hosts(hosts: str | None, hostfile: str | Path | None) -> list[Host]:
    if hosts is not None and hostfile is not None:
        raise ArgumentError("hosts and hostfile: give one of them")
    try:
        if hosts is not None:
            return read_hosts(hosts)
        if hostfile is not None:
            return read_hostfile(Path(hostfile).read_text(), str(hostfile))
    except UnicodeDecodeError:
        raise ArgumentError(f"hostfile {hostfile}: this is not a text file") from None
    return []


def results_of(outcome: Outcome) -> list[Any]:
    """Unpickle the ranks' results, or raise the exception of the first failing rank."""
    if outcome.status == _INTERRUPTED and outcome.root is None:
        raise KeyboardInterrupt
    if outcome.status in _ENDED_BY_SIGNAL and outcome.root is None:
        raise SystemExit(outcome.status)  # `except Exception` must not make the program go on.
    unpacked = {rank: unpack_result(data) for rank, data in outcome.results.items()}
    returned = {rank: one for rank, one in unpacked.items() if one is not None}
    if outcome.root is not None:
        _raise(outcome.root, returned.get(outcome.root.rank, Returned()))
    missing = [rank for rank in outcome.order if rank not in returned]
    if outcome.status != 0 or missing:
        ended = f"the job ended with status {outcome.status}"
        if outcome.status == EXIT_STOPPED:
            ended = f"the job stopped by request (exit status {EXIT_STOPPED}); run it again"
        raise RankFailedError(f"{ended}; ranks without a result: {missing}")
    return [pickle.loads(returned[rank].value or b"") for rank in outcome.order]


def _raise(root: Failure, returned: Returned) -> None:
    cause = RemoteTraceback(f"rank {root.rank}:\n{returned.text}") if returned.text else None
    error = unpack_error(returned)
    if error is not None:
        raise error from cause
    said = "\n".join(f"    {line}" for line in last_lines(root.stderr))
    text = f"rank {root.rank} (pid {root.pid}) {verdict(root)}"
    failure = RankFailedError(f"{text}\n{said}" if said else text)
    failure.failed_rank = root.rank
    raise failure from cause
