"""A Slurm cluster of two nodes, in a network namespace of its own, with all files in one folder."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_ADDRESS = "10.79.0.1"
_PROGRAMS = ("srun", "slurmctld", "slurmd", "munged", "ip", "nsenter")
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost({address})
SlurmctldPort=17002
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname=localhost NodeAddr={address} Port=17011 CPUs=2 RealMemory=100
NodeName=n2 NodeHostname=localhost NodeAddr={address} Port=17012 CPUs=2 RealMemory=100
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Return why Slurm cannot be started here; "" if it can."""
    if os.getuid() != 0:
        return "Slurm's daemons and network namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tools/test_packages.sh installs them)"
    return ""


class Slurm:
    """The running cluster; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._namespace = f"hvdslurm{secrets.token_hex(2)}"
        self._config = folder / "slurm.conf"
        self.address = _ADDRESS

    def __enter__(self) -> Slurm:
        for name in ("munge", "state", "spool_n1", "spool_n2"):
            (self._folder / name).mkdir(mode=0o700)
        self._config.write_text(_CONFIG.format(folder=self._folder, address=_ADDRESS))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self._folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        space, munge = self._namespace, self._folder / "munge"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", space, "addr", "add", f"{_ADDRESS}/24", "dev", "br0")
        _run("ip", "-n", space, "link", "set", "br0", "up")
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        files |= {"log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={munge / file}" for name, file in files.items()]
        self._inside("munged", "--force", *options)
        self._inside("slurmctld", "-f", str(self._config))
        for node in ("n1", "n2"):
            self._inside("slurmd", "-f", str(self._config), "-N", node)
        deadline = time.monotonic() + 30
        while self.run("srun", "-N2", "-n2", "--immediate=5", "true").returncode != 0:
            if time.monotonic() > deadline:
                logs = [path.read_text()[-3000:] for path in self._folder.glob("*.log")]
                raise AssertionError("Slurm did not start:\n" + "\n".join(logs))
            time.sleep(0.2)

    def _inside(self, *command: str) -> None:
        # `ip netns exec` would hide the cgroups that slurmd looks for.
        _run("nsenter", f"--net=/run/netns/{self._namespace}", *command)

    def run(
        self, *command: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a client of the cluster to its end."""
        return subprocess.run(
            ["nsenter", f"--net=/run/netns/{self._namespace}", *command],
            env={**(os.environ if env is None else env), "SLURM_CONF": str(self._config)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __exit__(self, *_: object) -> None:
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace], capture_output=True, text=True, check=False
        )
        for pid in map(int, listed.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _run("ip", "netns", "del", self._namespace)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
