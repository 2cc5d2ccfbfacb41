"""Simulated hosts on one machine: namespaces whose networks are connected by a bridge.

Each host has its own network, sshd, hostname, /dev/shm and process ids. `Bed(3)` makes node1, node2
and node3. Its methods disturb the links between them: they limit the rate (tc tbf), lose packets
(nft) and take links down.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import base_environment
from launcher import end_launcher
from patience import HANG, Stopwatch, wait_until

PORT = 2222
MARK = "HVDLITE_RANK"  # Every rank, and no other process, has this in its environment.
_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_SSHD = """
Port {port}
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PidFile none
"""
_SSH = """
Host *
  Port {port}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# The first process of a host sets its name, mounts its own shared memory and the file with the
# names of all hosts, and becomes sshd.
_INIT = (
    "hostname {name} && mount -t tmpfs -o size=1g tmpfs /dev/shm && "
    "mount --bind {folder}/hosts /etc/hosts && mkdir -p /run/sshd && "
    "exec {sshd} -D -e -f {folder}/{name}.sshd"
)


def why_not() -> str:
    """Return why hosts cannot be made here; "" if they can."""
    if os.getuid() != 0:
        return "network namespaces and sshd need root"
    missing = {package for name, package in _PROGRAMS.items() if _which(name) is None}
    if missing:
        return f"not installed: {', '.join(sorted(missing))} (tools/test_packages.sh installs them)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "this kernel or container forbids network namespaces"


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


class Bed:
    """The hosts; use it as a context manager."""

    def __init__(self, count: int) -> None:
        number = secrets.randbelow(250)
        self.names = [f"node{i + 1}" for i in range(count)]
        self.addresses = [f"10.77.{number}.{i + 1}" for i in range(count)]
        self._mark = f"hv{secrets.token_hex(3)}"
        self._folder = Path(tempfile.mkdtemp(prefix="hvdlite-hosts-"))
        self.ssh_config = self._folder / "ssh"
        self._hosts_file = self._folder / "hosts"
        self._inits: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []

    def space(self, host: int) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._mark}{host}"

    def __enter__(self) -> Bed:
        try:
            self._make_network()
            self._make_keys()
            for host in range(len(self.names)):
                self._boot(host)
            self._wait_for_sshd()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make_network(self) -> None:
        bridge = f"{self._mark}b"
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for host, address in enumerate(self.addresses):
            space = self.space(host)
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            peer = ["peer", "name", f"v{host}", "netns", bridge]
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", *peer)
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", bridge, "link", "set", f"v{host}", "master", "br0", "up")

    def name_host(self, name: str, address: str) -> None:
        """Let all hosts resolve a name, as a record in DNS would."""
        with self._hosts_file.open("a") as file:
            file.write(f"{address} {name}\n")

    def _make_keys(self) -> None:
        for name in ("host", "user"):
            key = str(self._folder / name)
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        text = _SSH.format(port=PORT, folder=self._folder)
        for name, address in zip(self.names, self.addresses, strict=True):
            text += f"Host {name}\n  HostName {address}\n"
        self.ssh_config.write_text(text)
        self._hosts_file.write_text("127.0.0.1 localhost\n")
        for name, address in zip(self.names, self.addresses, strict=True):
            self.name_host(name, address)

    def _boot(self, host: int) -> None:
        name = self.names[host]
        config = _SSHD.format(port=PORT, address=self.addresses[host], folder=self._folder)
        (self._folder / f"{name}.sshd").write_text(config)
        init = _INIT.format(name=name, sshd=_which("sshd"), folder=self._folder)
        spaces = ["--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self._folder / f"{name}.log", "wb") as log:
            init_process = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self.space(host)}", "unshare", *spaces),
                    *("--propagation", "private", "sh", "-c", init),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._inits.append(init_process)
        self._pids.append(_only_child(init_process.pid))

    def _wait_for_sshd(self) -> None:
        logs = [self._folder / f"{name}.log" for name in self.names]
        wait_until(
            lambda: all("Server listening" in log.read_text() for log in logs),
            f"sshd on all hosts; their logs are in {self._folder}",
        )
        for host, name in enumerate(self.names):
            assert self.run(host, "hostname").stdout.strip() == name

    def inside(self, host: int, *command: str) -> list[str]:
        """Build the command that runs another one on a host."""
        return ["nsenter", "-t", str(self._pids[host]), "-a", *command]

    def command_of_ranks(self) -> list[str]:
        """Build the prefix of a command by which a rank has the network of the host of its number.

        Its other namespaces are those of the test.
        """
        return ["sh", "-c", f'exec ip netns exec {self._mark}$HVDLITE_RANK "$@"', "sh"]

    def run(self, host: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(
            self.inside(host, *command), capture_output=True, text=True, timeout=HANG, check=False
        )

    def start_launcher(
        self,
        *arguments: str,
        host: int = 0,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "/tmp",
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Start hvdlite-run on a host; the caller ends it (see `end`)."""
        command = [sys.executable, "-m", "hvdlite.launch", "--ssh-config", str(self.ssh_config)]
        return subprocess.Popen(
            self.inside(host, "env", "-C", str(cwd), *command, *arguments),
            env={**base_environment(), "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )

    def processes(self, host: int, text: str) -> list[int]:
        """List a host's processes with `text` in their command or environment.

        The process ids are those of this machine, not those of the host.
        """
        found = []
        own = Path(f"/proc/{self._pids[host]}/ns/pid").stat().st_ino
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if Path(f"/proc/{name}/ns/pid").stat().st_ino != own:
                    continue
                there = Path(f"/proc/{name}/environ").read_bytes()
                there += Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue  # It has ended.
            if text.encode() in there:
                found.append(int(name))
        return found

    def seconds_until_gone(self) -> float:
        """Wait until no rank and no agent is left on the hosts; return the seconds it took.

        The seconds are those of a `Stopwatch`.
        """
        watch = Stopwatch()
        wait_until(
            lambda: (
                not any(
                    self.processes(host, text)
                    for host in range(len(self.names))
                    for text in (MARK, "hvdlite.launch")
                )
            ),
            "the end of all ranks and agents",
        )
        return watch.seconds()

    def shared_memory(self, host: int) -> list[str]:
        """List the files in a host's /dev/shm."""
        return self.run(host, "ls", "-A", "/dev/shm").stdout.split()

    def set_link(self, host: int, up: bool) -> None:
        """Take a host's network interface up or down."""
        _run("ip", "-n", self.space(host), "link", "set", "eth0", "up" if up else "down")

    def limit_rate(self, host: int, rate: str) -> None:
        """Limit the rate at which a host sends, in tc's notation, such as "50mbit"."""
        limit = ["tbf", "rate", rate, "burst", "64k", "latency", "50ms"]
        _run("tc", "-n", self.space(host), "qdisc", "replace", "dev", "eth0", "root", *limit)

    def drop(self, host: int, *ways: str, peer: int | None = None, but_ssh: bool = False) -> None:
        """Drop all that a host receives ("input"), sends ("output"), or both.

        Args:
            host: the host that drops.
            ways: of the packets that are dropped.
            peer: the other host; None for all other hosts.
            but_ssh: whether what its sshd receives and sends passes.
        """
        for way in ways:
            name, end = ("iifname", "saddr") if way == "input" else ("oifname", "daddr")
            whose = f"{name} eth0" if peer is None else f"ip {end} {self.addresses[peer]}"
            if but_ssh:
                whose += f" tcp {'dport' if way == 'input' else 'sport'} != {PORT}"
            self._filter(host, way, f"{whose} drop")

    def _filter(self, host: int, way: str, rule: str) -> None:
        rules = (
            f"table ip {way}_rules {{ chain packets {{ type filter hook {way} priority 0; "
            f"{rule}\n }}\n }}\n"
        )
        file = self._folder / "rules"
        file.write_text(rules)
        _run("ip", "netns", "exec", self.space(host), "nft", "-f", str(file))

    def mend(self) -> None:
        """Undo every disturbance."""
        for host in range(len(self.names)):
            self.set_link(host, up=True)
            space = self.space(host)
            for command in (
                ["tc", "-n", space, "qdisc", "del", "dev", "eth0", "root"],
                ["ip", "netns", "exec", space, "nft", "flush", "ruleset"],
            ):
                subprocess.run(command, capture_output=True, timeout=HANG, check=False)

    def __exit__(self, *_: object) -> None:
        for init in self._inits:
            init.send_signal(signal.SIGKILL)  # The kernel then kills all processes of the host.
            init.wait()
        for space in [*map(self.space, range(len(self.names))), f"{self._mark}b"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(self._folder)


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(children.read_text, "the first process of a host")
    return int(children.read_text().split()[0])


def finish(
    launcher: subprocess.Popen[bytes], timeout: float = 2 * HANG
) -> tuple[int, str, str, float]:
    """Wait for a launcher; return its exit status, stdout, stderr, and a `Stopwatch`'s seconds."""
    watch = Stopwatch()
    try:
        stdout, stderr = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        stdout, stderr = launcher.communicate()
        raise AssertionError(
            f"hvdlite-run took more than {timeout} s\n{stdout.decode()}\n{stderr.decode()}"
        ) from None
    return launcher.returncode, stdout.decode(), stderr.decode(), watch.seconds()


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher together with the nsenter that started it."""
    try:
        os.killpg(launcher.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    end_launcher(launcher)


def python(code: str, *arguments: Any) -> Sequence[str]:
    """Build the command of a small script."""
    return [sys.executable, "-c", code, *map(str, arguments)]
