"""A `python` whose programs are forked from a process that has imported a framework.

`pythons.python_with("torch")` is the path of a program that takes a script or `-c` as Python does,
so that hvdlite-run, and what it starts, need not know. This program is small: it hands its
arguments, folder, environment and descriptors to a server, which imported the framework long ago
and forks. It passes signals on and ends as the fork ends; if it is killed, so is the fork's group.

A fork differs from a process that was started as `forkserver` says, and it has the server's
namespaces. If a variable that frameworks read when they are imported (`READ_AT_IMPORT`) is not the
server's, or there are other options, the program execs Python.

    python -I -S forking_python.py SOCKET PYTHON ARGUMENT...   # the small program
    python forking_python.py --serve SOCKET MODULE...          # the server
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

READ_AT_IMPORT = (
    "OMP_NUM_THREADS",
    "KERAS_BACKEND",
    "TF_CPP_MIN_LOG_LEVEL",
    "CUDA_VISIBLE_DEVICES",
)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_HIGHEST = 500  # where descriptors wait until all of them can get their own numbers


def be_program(path: str, python: str, arguments: Sequence[str]) -> int:
    """Have the server fork, and pass on signals until the fork ends; return its exit status."""
    if not forks(arguments):
        os.execv(python, [python, *arguments])
    # A signal that comes before the fork is known waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    numbers = open_descriptors()
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    question: dict[str, Any] = {"arguments": arguments, "folder": os.getcwd()}  # noqa: PTH109 (pathlib takes longer than all of this)
    question |= {"environment": dict(os.environ), "numbers": numbers}
    answer = b""
    with contextlib.suppress(ConnectionError):
        asked.connect(path)
        socket.send_fds(asked, [json.dumps(question).encode()], numbers)
        answer = asked.recv(32)
    if not answer:  # An import has failed.
        with open(f"{path}.errors", encoding="utf-8") as errors:
            sys.exit(errors.read())
    pid = int(answer)
    if not pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os.execv(python, [python, *arguments])

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for one in _PASSED_ON:
        signal.signal(one, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    # Python passes on a signal that comes just before a wait only after it.
    while not select.select([asked], [], [], 0.05)[0]:
        pass
    status = int(asked.recv(32) or 1)
    if status < 0:
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def forks(arguments: Sequence[str]) -> bool:
    """Return whether the arguments are a script or `-c`, with no option of Python's."""
    first = [*arguments, "-"][0]
    return first == "-c" or not first.startswith("-")


def open_descriptors() -> list[int]:
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # That of the list is closed.
            os.fstat(number)
            found.append(number)
    return found


def serve(path: str, modules: Sequence[str]) -> Mapping[str, Any]:
    """Fork for each connection a process that watches its program; return in the programs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)  # Who connects waits for the imports.
        Path(f"{path}.new").rename(path)  # Who finds it can connect.
        gc.disable()  # It would take a sixth of the time.
        try:
            for module in modules:
                importlib.import_module(module)
        except BaseException:
            traceback.print_exc()  # before the listener is closed: then programs read it
            sys.stderr.flush()
            raise SystemExit(1) from None
        gc.freeze()
        gc.enable()
        server = os.getpid()
        signal.signal(signal.SIGCHLD, reap)
        while True:
            asked, _ = listener.accept()
            if os.fork() == 0:
                break
            asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, received, _, _ = socket.recv_fds(asked, 1 << 20, 64)
    question: dict[str, Any] = json.loads(message)
    theirs = question["environment"]
    if any(theirs.get(name) != os.environ.get(name) for name in READ_AT_IMPORT):
        asked.send(b"0")
        os._exit(0)
    from hvdlite.launch.shim import die_with_parent
    from hvdlite.rendezvous.environment import take_live_pipe, take_token

    os.environ.clear()
    os.environ.update(theirs)
    die_with_parent(server)
    watcher = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in received:
            os.close(descriptor)
        asked.send(str(pid).encode())
        watch(asked, pid)
    asked.close()
    os.setsid()
    die_with_parent(watcher)
    take_descriptors(received, question["numbers"])
    for take in (take_token, take_live_pipe):  # as `import hvdlite` does
        take()
    return question


def reap(*_: object) -> None:
    """Reap the watchers that have ended, so that the server's time includes that of the forks."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def watch(asked: socket.socket, pid: int) -> None:
    """Say how the program ended, or end it if nobody is asking any more; never return."""
    pidfd = os.pidfd_open(pid)
    ready, _, _ = select.select([asked, pidfd], [], [])
    if pidfd not in ready:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asked.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def take_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the process that has passed them."""
    waiting = [_HIGHEST + i for i in range(len(received))]
    for descriptor, high in zip(received, waiting, strict=True):
        os.dup2(descriptor, high)
        os.close(descriptor)
    for high, number in zip(waiting, numbers, strict=True):
        os.dup2(high, number)
        os.close(high)


def become(question: Mapping[str, Any]) -> None:
    """Run the program in this fork as Python would; never return."""
    first, *others = question["arguments"]
    os.chdir(question["folder"])
    sys.path[0] = "" if first == "-c" else str(Path(first).resolve().parent)
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in more if folder and folder not in sys.path]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # type: ignore[type-var]
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)  # type: ignore[type-var]
    status = 0
    try:
        run(first, others)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        status = 1
    leave(status)


def run(first: str, others: list[str]) -> None:
    """Run a text or a script as `__main__`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        name, source = "<string>", others.pop(0)
    else:
        name, main.__file__ = first, str(Path(first).absolute())
        source = Path(first).read_text(encoding="utf-8")
    sys.argv = [first, *others]
    exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        import gc
        import importlib
        import io
        import random
        import traceback
        import types
        from pathlib import Path

        from worker_main import leave

        become(serve(sys.argv[2], sys.argv[3:]))
    sys.exit(be_program(sys.argv[1], sys.argv[2], sys.argv[3:]))
