"""The program of one rank of `harness.run_world`: it calls a test's function and saves the result.

`python worker_main.py FOLDER` loads the function that FOLDER/task.pickle names, calls it, and saves
its result in FOLDER/value.RANK. On SIGUSR1 it prints the stacks of all its threads.

`python worker_main.py --fork SOCKET MODULE...` imports the modules, and then forks a rank for each
FOLDER that it receives through the socket (see `forkserver`, which sends them).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def load_function(module_name: str, path: str, name: str) -> Callable[..., Any]:
    """Import a test file under the name that pytest gave it, and find a function in it."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def fork_ranks(descriptor: int, modules: Sequence[str]) -> str:
    """Serve requests; in each forked rank, return the folder of its task.

    The serving process never returns: it exits when the other end of the socket is closed.
    """
    gc.disable()  # It would take a sixth of the time.
    for module in (*modules, "pytest"):  # which all test files import
        importlib.import_module(module)
    if "torch" in sys.modules:
        importlib.import_module("hvdlite.torch")
    gc.freeze()
    gc.enable()
    server = os.getpid()
    with socket.socket(fileno=descriptor) as asked:
        while True:
            message, outputs, _, _ = socket.recv_fds(asked, 1 << 20, 2)
            if not message:
                os._exit(0)  # Its ranks die with it.
            question = json.loads(message)
            if "folder" not in question:
                asked.send(json.dumps(look_at(question)).encode())
                continue
            pid = os.fork()
            if pid == 0:
                break
            asked.send(json.dumps({"pid": pid}).encode())
            for output in outputs:
                os.close(output)
    become_rank(server, question["environment"], outputs)
    return str(question["folder"])


def look_at(question: dict[str, int]) -> dict[str, int]:
    """Answer a request: return how a rank ended, or reap it."""
    if "reap" in question:
        os.waitpid(question["reap"], 0)
        return {}
    ending = os.waitid(os.P_PID, question["ending"], os.WEXITED | os.WNOWAIT)
    assert ending is not None
    by_signal = ending.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return {"status": ending.si_status, "by_signal": by_signal}


def become_rank(server: int, environment: dict[str, str], outputs: Sequence[int]) -> None:
    """Give a forked process the session, outputs and environment of a rank that was started."""
    os.setsid()
    for output, descriptor in zip(outputs, (1, 2), strict=True):
        os.dup2(output, descriptor)
        os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python reseeds its own generator after a fork.
    from hvdlite.launch.shim import die_with_parent
    from hvdlite.rendezvous.environment import take_live_pipe, take_token

    die_with_parent(server)
    for take in (take_token, take_live_pipe):  # as `import hvdlite` does
        take()


def leave(status: int = 0) -> None:
    """End a forked rank as Python ends a program, but for the last step.

    In that step Python takes apart all modules. A forked rank would copy the memory that it shares
    with its siblings to do so, which takes longer than most tests.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Run the task of this rank."""
    # Keras imports these if they are installed, which takes a third of the time of its import.
    sys.modules.update({"sklearn": None, "matplotlib": None})  # type: ignore[dict-item]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    forks = sys.argv[1] == "--fork"
    folder = Path(fork_ranks(int(sys.argv[2]), sys.argv[3:]) if forks else sys.argv[1])
    rank = os.environ["HVDLITE_RANK"]
    task = pickle.loads((folder / "task.pickle").read_bytes())
    if task["source"] is not None:
        exec(compile(task["source"], "<body>", "exec"), {"__name__": "__main__"})
        value = None
    else:
        value = load_function(*task["function"])(*pickle.loads(task["args"]))
    unfinished = folder / f"unfinished.{rank}"
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(folder / f"value.{rank}")
    if forks:
        leave()


if __name__ == "__main__":
    main()
