"""If a job cannot run on a host, the message names the host and the reason, and says what to do."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from multihost.bed import Bed, finish, python

NOTHING = python("print('ran')")
PYTHON = shlex.quote(sys.executable)


def refused(two_hosts: Bed, *arguments: str, **options: object) -> str:
    """Run a job that cannot start; return the line with its reason."""
    status, stdout, stderr, seconds = finish(two_hosts.start_launcher(*arguments, **options))
    assert status == 1, stderr
    assert "ran" not in stdout
    assert "Traceback" not in stderr
    assert seconds <= 20
    (line,) = [line for line in stderr.splitlines() if line.startswith("hvdlite-run: ")][-1:]
    return line


# What hvdlite-run is told, and parts of what it says of it.
MISTAKES = {
    "no sshd": (
        ("-H", "node1,node2", "--ssh-port", "2223"),
        "cannot start on host node2: ssh: connect to host ",
        "Connection refused; does an ssh server run there, on this port? --ssh-port",
    ),
    "unknown host": (
        ("-H", "node1,nowhere.invalid"),
        "cannot start on host nowhere.invalid: ssh: Could not resolve hostname",
        "`ssh nowhere.invalid` has to work by itself",
    ),
    "no Python there": (
        ("-H", "node2", "--remote-python", "/no such/python"),
        "cannot start on host node2: ",
        "hvdlite's Python is expected at /no such/python there; see --remote-python",
    ),
    "no hvdlite there": (
        ("-H", "node2", "--remote-python", "/usr/bin/python3"),
        "No module named 'hvdlite'); install hvdlite there",
    ),
    "an interface that no host has": (
        ("-H", "node1,node2", "--network-interfaces", "ib0"),
        "no network interface of node1 is called ib0",
        "it has lo (127.0.0.1), eth0 (10.77.",
    ),
    "an interface that the other host cannot reach": (
        ("-H", "node1,node2", "--network-interfaces", "lo"),
        "cannot start on host node2: it cannot reach the launcher at 127.0.0.1:",
        "--network-interfaces names it",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_host_that_cannot_be_used_is_named_with_the_reason(two_hosts: Bed, mistake: str) -> None:
    flags, *parts = MISTAKES[mistake]
    line = refused(two_hosts, *flags, *NOTHING)
    assert [part for part in parts if part not in line] == [], line


def test_key_that_is_not_accepted(two_hosts: Bed, tmp_path: Path) -> None:
    key = tmp_path / "other key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    config = tmp_path / "config"
    text = two_hosts.ssh_config.read_text()
    config.write_text("\n".join(x for x in text.splitlines() if "IdentityFile" not in x))
    line = refused(
        two_hosts,
        "-H",
        "node2",
        "--ssh-config",
        str(config),
        "--ssh-identity-file",
        str(key),
        *NOTHING,
    )
    assert "Permission denied" in line and "--ssh-identity-file" in line


def test_another_version_there(two_hosts: Bed, tmp_path: Path) -> None:
    """The Python on that host has an hvdlite that reports another version."""
    fake = tmp_path / "python"
    fake.write_text(
        f"#!/bin/sh\nexec {PYTHON} -c \"import hvdlite; hvdlite.__version__ = '0.0.9'\n"
        'from hvdlite.launch.agent import main; main()"\n'
    )
    fake.chmod(0o755)
    line = refused(two_hosts, "-H", "node2", "--remote-python", str(fake), *NOTHING)
    assert "host node2 has hvdlite 0.0.9, this launcher is " in line
    assert "install the same version on every host" in line


def test_interface_by_name(two_hosts: Bed) -> None:
    show = python("import os; print(os.environ['NCCL_SOCKET_IFNAME'])")
    status, stdout, stderr, _ = finish(
        two_hosts.start_launcher("-H", "node2", "--network-interfaces", "ib0,eth0", *show)
    )
    assert (status, stdout) == (0, "[0] ib0,eth0\n"), stderr


def test_folder_that_is_missing_there(two_hosts: Bed) -> None:
    two_hosts.run(0, "mkdir", "-p", "/dev/shm/only here")
    line = refused(two_hosts, "-H", "node2", *NOTHING, cwd="/dev/shm/only here")
    assert "cannot start on host node2: the folder /dev/shm/only here is missing" in line


def test_program_that_is_missing_there(two_hosts: Bed) -> None:
    two_hosts.run(0, "sh", "-c", "printf '#!/bin/sh\\n' > /dev/shm/tool; chmod +x /dev/shm/tool")
    line = refused(two_hosts, "-H", "node2", "/dev/shm/tool")
    assert "cannot start on host node2: the program '/dev/shm/tool' is not found" in line


def test_doctor_says_why_a_host_cannot_be_used(two_hosts: Bed) -> None:
    launcher = two_hosts.start_launcher("--doctor", "-H", "node1,node2", "--ssh-port", "2223")
    status, stdout, _, _ = finish(launcher)
    assert status == 1
    last = stdout.splitlines()[-1]
    assert (
        "no   a rank on each host" in last
        and "cannot start on host node2: ssh: connect to host" in last
    )
