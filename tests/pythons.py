"""Pythons that have imported a framework, for what starts many processes; see `forking_python`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import forking_python
from harness import base_environment
from hvdlite.launch import shim
from patience import wait_until

_KEPT = 2  # how many are kept; one with TensorFlow takes half a gigabyte


class _Server:
    """A process that has imported some modules, and the program that asks it to fork."""

    def __init__(self, modules: tuple[str, ...], variables: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hvdlite python ")
        path = Path(self._folder.name)
        tied = shim.tied([sys.executable])
        socket = path / "socket"
        with open(f"{socket}.errors", "wb") as errors:
            self._process = subprocess.Popen(
                [*tied, forking_python.__file__, "--serve", str(socket), *modules],
                env={**base_environment(), "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        wait_until(socket.exists, "the process that forks programs")
        self.program = path / "python"
        command = [sys.executable, "-I", "-S", forking_python.__file__, str(socket), sys.executable]
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        self.program.chmod(0o755)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_servers: OrderedDict[tuple[object, ...], _Server] = OrderedDict()


def python_with(*modules: str, **variables: str) -> str:
    """Return the path of a `python` whose programs begin with these modules imported.

    They have been imported under OMP_NUM_THREADS=1 and the given variables.
    """
    key = (modules, tuple(sorted(variables.items())))
    if key not in _servers:
        while len(_servers) >= _KEPT:
            _servers.popitem(last=False)[1].close()
        _servers[key] = _Server(modules, variables)
    _servers.move_to_end(key)
    return str(_servers[key].program)


def forking_torchrun(python: str, ranks: int) -> list[str]:
    """Return a torchrun whose agent and ranks are programs of such a `python`."""
    agent = [python, "-c", "from torch.distributed.run import main; main()"]
    return [*agent, "--standalone", "--nproc-per-node", str(ranks), "--no-python", python]


def close_pythons() -> None:
    """End the processes that fork programs, with the programs."""
    while _servers:
        _servers.popitem()[1].close()
