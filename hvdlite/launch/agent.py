"""Agent: starts and ends processes of a job on this host; the launcher starts it by ssh or srun.

The launcher runs `ssh host exec python -m hvdlite.launch.agent`. The agent reads commands from
stdin (`messages`): the launcher has it start, signal and finish one process at a time. It writes
the output of the processes, and how each ended, to stdout. Both say four times in a heartbeat that
they are there; if stdin ends, or brings nothing for long, the agent ends its processes and itself.
ssh shows the launcher what the agent writes to stderr. In node mode
(`node`) the agent is an hvdlite-run that has connected to the launcher.

Other software may start the agent on its host, as Ray does: it calls `serve`, which connects to the
launcher, and starts the same program with that channel as stdin and stdout. Such an agent has
folder, command, environment and secret itself: they do not travel on the channel, which everybody
on the network can read.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import hvdlite
from hvdlite.compat import on_path
from hvdlite.errors import BootstrapError
from hvdlite.launch import shim
from hvdlite.launch.agents import Pulse
from hvdlite.launch.channels import SAFE_PATH
from hvdlite.launch.loop import PASSED_ON, AnyRank, JobLoop, SignalInbox, Stop
from hvdlite.launch.messages import (
    GREETING,
    Frame,
    FrameChannel,
    FrameReader,
    Kind,
    data_frame,
    frame,
)
from hvdlite.launch.output import Stream, StreamReader
from hvdlite.launch.process import LIVE, RESULT, STDERR, STDOUT, Ending, start_worker
from hvdlite.launch.resources import available_cores
from hvdlite.rendezvous.client import reach
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.descriptors import explained, room_for_processes
from hvdlite.rendezvous.handshake import Job, Role

SILENCE = 30.0  # seconds without a message from the launcher until it counts as gone
_TICK_SECONDS = 1.0
_CAPACITY = 4 << 20  # bytes that wait for ssh; while there are more, no output is read
# srun passes on whole lines alone, so this ends each message with one.
_NEW_LINE = frame(Kind.ALIVE, body=b"\n")
_KINDS = {STDOUT: Kind.OUT, STDERR: Kind.ERR, RESULT: Kind.RESULT, LIVE: Kind.LIVE}
# An agent may end while others go on, maybe on the same machine under another name. So it ends its
# own processes alone, which have this variable.
_MARK = "HVDLITE_AGENT_ID"
_CANNOT_START = 126  # status of a process that could not be started, as a shell's
_GONE = 1  # status of a stop because the launcher is gone; no program reads it
_CHECK_SECONDS = 10.0  # how long the agent tries to reach the launcher's store
_DIAL_SECONDS = 10.0  # how long `serve` tries to reach the launcher
# The secret of an agent that `serve` has started: an import of hvdlite takes HVDLITE_TOKEN away.
_TOKEN = "HVDLITE_AGENT_TOKEN"
# Variables that belong to a host or a login, and not to the job.
_OWN_TO_HOST = (
    *("HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TMPDIR", "USER"),
    "_",
)
_OWN_TO_LOGIN = ("DBUS_", "DISPLAY", "SSH_", "XDG_")
# Slurm chooses other GPUs on each host; srun has passed the user's choice on, if there is one.
_OWN_TO_STEP = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def attend(
    channel: LauncherChannel,
    environment: Callable[[dict[str, Any]], dict[str, str]],
    patient: bool = False,
    afterwards: Callable[[SignalInbox], None] = lambda inbox: None,
) -> bool:
    """Run this host's ranks, from the launcher's first message to the last one about them.

    Args:
        channel: the connection to the launcher.
        environment: builds the variables that all ranks here share from this host's part of the
            job, which it may complete.
        patient: whether the launcher may first wait for other hosts without a word; the channel
            then tells whether it is still there.
        afterwards: called when the ranks here have ended, with the inbox that was open while they
            ran, so that no signal is lost in between.

    Returns:
        Whether the ranks ran to their end; otherwise the launcher is gone, or has learned why not.
    """
    channel.send(hello())
    part = _receive_part(channel, patient)
    if part is None:
        return False
    shared = environment(part)
    if part["compat"]:
        shared = on_path(shared)
    with SignalInbox(passes_on=True) as inbox:
        try:
            _check(part, shared)
            agent = Agent(channel, part, shared, inbox)
            channel.send(frame(Kind.READY))
            agent.run(())
            channel.send(frame(Kind.DONE))
            well = True
        except OSError as error:
            channel.send(frame(Kind.REFUSED, body=str(error).encode()))
            well = False
        # The rest may have to wait for a slow console, but not for a dead channel.
        while channel.waiting and not channel.lost:
            channel.wait(1.0)
            channel.receive()
        afterwards(inbox)
    return well


def _receive_part(channel: LauncherChannel, patient: bool) -> dict[str, Any] | None:
    """Wait for this host's part of the job; return None if the launcher goes away instead."""
    stdin: bytes | None = None
    while True:
        for command in channel.receive():  # Also where it has ended: it may say why.
            if command.kind == Kind.STDIN:
                stdin = command.body
            elif command.kind == Kind.PART:
                return {**command.data(), "stdin": stdin}
        if channel.gone or channel.outcome is not None or (channel.lost and not patient):
            return None
        channel.wait(1.0)


def _check(part: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Check that the job can run here, as the ranks would fail less clearly; raise an OSError."""
    try:
        os.chdir(part["folder"])
    except OSError as error:
        raise OSError(f"the folder {part['folder']} is missing: {error.strerror}") from None
    program = part["command"][0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        raise OSError(f"the program {program!r} is not found")
    own = {**part["rendezvous"], **part.get("own", {})}
    epoch = int(own["HVDLITE_EPOCH"])  # Cluster software may have started the job again.
    job = Job(bytes.fromhex(own["HVDLITE_TOKEN"]), bytes.fromhex(part["job_id"]), epoch)
    address = own["HVDLITE_RENDEZVOUS"]
    try:  # In an elastic job this reaches the registrar, to which a client of the store is nobody.
        reach("the launcher", address, job, 0, Role.STORE, Deadline(_CHECK_SECONDS))[0].close()
    except BootstrapError as error:
        raise OSError(
            f"it cannot reach the launcher at {address} ({error}); does a firewall forbid it, or "
            "do the hosts share another network interface? --network-interfaces names it"
        ) from None


def hello() -> bytes:
    return data_frame(
        Kind.HELLO,
        0,
        {
            "version": hvdlite.__version__,
            "hostname": socket.gethostname(),
            "cores": available_cores(),
            "ssh": os.environ.get("SSH_CONNECTION", ""),
        },
    )


def environment_here(own: Mapping[str, str], sent: Mapping[str, str]) -> dict[str, str]:
    """Combine this login's environment with the user's, which the launcher sent."""
    # The user's variables win, except those that belong to a host, a login, or a step of Slurm.
    kept = [name for name in _OWN_TO_STEP if "SLURM_STEP_ID" in own and name in own]
    taken = {
        name: value
        for name, value in sent.items()
        if name not in _OWN_TO_HOST and name not in kept and not name.startswith(_OWN_TO_LOGIN)
    }
    return {**own, **taken}


def serve(
    address: str,
    job: Job,
    number: int,
    variables: Mapping[str, str],
    without: Iterable[str],
    threads: int,
) -> int:
    """Connect to the launcher, run the agent of this host until it ends; return its status.

    The agent dies with the thread that calls this. Each rank gets `variables`, and not those in
    `without`. A BootstrapError says that the launcher cannot be reached, or refuses.
    """
    # Agents that ssh starts are there sooner without these imports.
    from hvdlite.launch.description import Description
    from hvdlite.launch.sealed import dial

    inner, outer = socket.socketpair()
    deadline = Deadline(_DIAL_SECONDS)
    channel = dial("the launcher", address, job, number, deadline, pair=(inner, outer))
    own = {name: value for name, value in os.environ.items() if name not in set(without)}
    shared = Description((), 1, {**own, **variables}).shared_environment(threads)
    agent = [sys.executable, "-m", "hvdlite.launch.agent"]
    with outer:
        process = subprocess.Popen(
            shim.tied(agent),
            stdin=outer.fileno(),
            stdout=outer.fileno(),
            start_new_session=True,
            env={**shared, _TOKEN: job.token.hex()},
        )
    try:
        return process.wait()
    finally:
        channel.end()


def _environment(part: dict[str, Any]) -> dict[str, str]:
    if _TOKEN not in os.environ:
        os.environ.pop(SAFE_PATH, None)  # It was set for this process; ranks get the user's value.
        return environment_here(os.environ, part["environment"])
    part["folder"] = str(Path.cwd())
    part["command"] = [sys.executable, "-m", "hvdlite.launch.call"]
    part["own"] = {"HVDLITE_TOKEN": os.environ.pop(_TOKEN)}
    return dict(os.environ)


class Agent(JobLoop):
    """The loop over one host's processes of a job. Used by one thread."""

    def __init__(
        self,
        channel: LauncherChannel,
        part: Mapping[str, Any],
        environment: Mapping[str, str],
        inbox: SignalInbox,
    ) -> None:
        own = secrets.token_hex(16)
        super().__init__(bytes.fromhex(part["job_id"]), f"{_MARK}={own}")
        self._pulse = Pulse(**part["pulse"])
        self._silence = SILENCE  # until the first ALIVE: before it the launcher waits for others
        self._alive_at = 0.0
        self._channel = channel
        self._part = part
        self._environment = {**environment, _MARK: own}
        self.streams = _Forwarder(self, channel)
        self._listens = True
        self._closing = False  # the launcher starts nothing here any more
        self._asked = False  # the launcher has asked processes to end, and will say when to kill
        self.on(inbox.fd, lambda: tell_signals(channel, inbox))

    def goes_on(self) -> bool:
        return super().goes_on() or not (self._closing or self._stop is not None)

    def ended(self, worker: AnyRank, ending: Ending) -> None:
        body = [ending.status, ending.by_signal, ending.oom_killed]
        self._channel.send(data_frame(Kind.ENDED, worker.number, body))

    def say(self, text: str) -> None:
        print(f"hvdlite-run: {text}", file=sys.stderr)

    def tick(self, now: float) -> float | None:
        silent = now - self._channel.heard_at > self._silence
        if (self._channel.gone or silent) and self._listens:
            self._channel.gone = True
            self._listens = False
            self.stop_now(_GONE, grace=self._pulse.grace)
        if now >= self._alive_at:
            self._alive_at = now + self._pulse.heartbeat / 4
            self._channel.send(frame(Kind.ALIVE))
        self._channel.watch(self.selector, self._listens, self._obey)
        return min(now + _TICK_SECONDS, self._alive_at)

    def _obey(self) -> None:
        self._channel.flush()
        for command in self._channel.receive():
            workers = [one for one in self.workers if one.number == command.number]
            if command.kind == Kind.ALIVE:
                self._silence = self._pulse.launcher_silence
            elif command.kind == Kind.START:
                self._start(command)
            elif command.kind == Kind.SIGNAL:
                number = int(command.data())
                for worker in workers:
                    worker.send_signal(number)
                self._asked |= number not in (signal.SIGKILL, PASSED_ON)
                if number == signal.SIGKILL and self._closing:  # It is for all there.
                    self.stop_now(0, signal.SIGKILL, grace=0.0)
            elif command.kind == Kind.FINISH:
                for worker in workers:
                    if worker.ending is not None:
                        self.retire(worker, well=False)
            elif command.kind == Kind.CLOSE:
                self._closing = True

    def _start(self, command: Frame) -> None:
        part = self._part
        room_for_processes(len(self.workers) + 1)
        try:
            worker = start_worker(
                command.number,
                part["command"],
                {**self._environment, **command.data(), **part.get("own", {})},
                stdin=part["stdin"],
                live=part["live"],
            )
        except OSError as error:
            text = f"hvdlite-run: cannot start here: {explained(error)}\n"
            self._channel.send(frame(Kind.ERR, command.number, text.encode()))
            body = [_CANNOT_START, False, False]
            self._channel.send(data_frame(Kind.ENDED, command.number, body))
            return
        self.watch(worker)
        for sink, pipe in worker.take_pipes().items():
            self.streams.open(worker.number, pipe, sink)
        self._channel.send(data_frame(Kind.STARTED, worker.number, worker.pid))

    def _clear_leftovers(self) -> None:
        if self._stop is None and self._asked and self.workers:
            # The launcher has asked all of them to end, and kills what is left after its grace.
            self._stop = Stop(time.monotonic(), math.inf)
        super()._clear_leftovers()


class _Forwarder(StreamReader):
    def __init__(self, agent: Agent, channel: LauncherChannel) -> None:
        super().__init__(agent.selector)
        self._channel = channel

    def took(self, stream: Stream, block: bytes) -> None:
        self._channel.send(frame(_KINDS[stream.sink], stream.rank, block))

    @property
    def full(self) -> bool:
        return self._channel.waiting > _CAPACITY and not self._channel.gone


def tell_signals(channel: LauncherChannel, inbox: SignalInbox) -> None:
    for number in inbox.take():
        channel.send(data_frame(Kind.CAUGHT, 0, number))


class LauncherChannel(FrameChannel):
    """The connection to the launcher, usually over stdin and stdout."""

    def __init__(self, read_fd: int = 0, write_fd: int = 1) -> None:
        super().__init__(read_fd, write_fd, FrameReader(), GREETING)
        # The status of the job, and why it did not start; None while it is not over.
        self.outcome: tuple[int, str] | None = None

    @property
    def lost(self) -> bool:
        return self.gone or time.monotonic() - self.heard_at > SILENCE

    def send(self, data: bytes) -> None:
        super().send(data + _NEW_LINE)

    def wait(self, seconds: float) -> None:
        if not self.gone:
            select.select([self.read_fd], [self.write_fd] if self.waiting else [], [], seconds)
        self.flush()

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived but for the outcome; set `gone` at the end."""
        frames = []
        for one in super().receive():
            if one.kind == Kind.OUTCOME:
                status, why = one.data()
                self.outcome = int(status), str(why)
            else:
                frames.append(one)
        return frames


def main() -> int:
    return 0 if attend(LauncherChannel(), _environment) else 1


if __name__ == "__main__":
    sys.exit(main())
