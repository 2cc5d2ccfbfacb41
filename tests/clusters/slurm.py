"""A Slurm cluster of two nodes, each a simulated host, with all files in one folder."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from multihost import bed
from patience import HANG

_PROGRAMS = ("srun", "sbatch", "slurmctld", "slurmd", "munged")
# A job that was queued again waits until the credentials of its first start have expired.
_CONFIG = """
ClusterName=test
SlurmctldHost={names[0]}({addresses[0]})
SlurmctldPort=17002
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
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
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=1000
MpiDefault=none
ReturnToService=2
KillWait=8
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={names[0]} NodeAddr={addresses[0]} CPUs=2 RealMemory=100
NodeName={names[1]} NodeAddr={addresses[1]} CPUs=2 RealMemory=100
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Return why Slurm cannot be started here; "" if it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tools/test_packages.sh installs them)"
    return bed.why_not()


class Slurm:
    """The running cluster; use it as a context manager.

    Attributes:
        hosts: its two nodes; the controller runs on the first one.
        folder: where its files are, for files of tests as well.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = bed.Bed(2)
        self._config = folder / "slurm.conf"

    def __enter__(self) -> Slurm:
        hosts = self.hosts
        for name in ("munge", "state", *(f"spool_{name}" for name in hosts.names)):
            (self.folder / name).mkdir(mode=0o700)
        text = _CONFIG.format(folder=self.folder, names=hosts.names, addresses=hosts.addresses)
        self._config.write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        hosts.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        munge = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        files |= {"log-file": "log", "seed-file": "seed"}
        self._daemon(0, "munged", "--force", *(f"--{n}={munge / f}" for n, f in files.items()))
        self._daemon(0, "slurmctld", "-f", str(self._config))
        for number, name in enumerate(self.hosts.names):
            self._daemon(number, "slurmd", "-f", str(self._config), "-N", name)
        deadline = time.monotonic() + 2 * HANG
        while self.run("srun", "-N2", "-n2", "--immediate=5", "true").returncode != 0:
            if time.monotonic() > deadline:
                logs = [path.read_text()[-3000:] for path in self.folder.glob("*.log")]
                raise AssertionError("Slurm did not start:\n" + "\n".join(logs))
            time.sleep(0.2)

    def _daemon(self, host: int, *command: str) -> None:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        subprocess.run(
            self.hosts.inside(host, *command),
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=HANG,
            check=True,
        )

    def start(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "/tmp",
        host: int = 0,
    ) -> subprocess.Popen[bytes]:
        """Start a client of the cluster on one of its nodes; the caller ends it."""
        return subprocess.Popen(
            self.hosts.inside(host, "env", "-C", str(cwd), *command),
            env={**(os.environ if env is None else env), "SLURM_CONF": str(self._config)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "/tmp",
        timeout: float = 2 * HANG,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client of the cluster to its end."""
        process = self.start(*command, env=env, cwd=cwd)
        try:
            status, stdout, stderr, _ = bed.finish(process, timeout)
        finally:
            bed.end(process)
        return subprocess.CompletedProcess(command, status, stdout, stderr)

    def submit(self, script: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script; return the number of its job."""
        done = self.run("sbatch", "--parsable", *options, str(script), env=env, cwd=script.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return what the controller knows of a job, such as its JobState and Restarts."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner").stdout
        return dict(field.partition("=")[::2] for field in shown.split())

    def wait_for_state(
        self, job: str, *states: str, restarts: int = 0, most: float = 2 * HANG
    ) -> None:
        """Wait until a job that was restarted so often is in one of these states."""
        deadline = time.monotonic() + most
        while True:
            known = self.state(job)
            if known.get("JobState") in states and int(known.get("Restarts", 0)) >= restarts:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is not {states} after {most} s: {known}")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()
