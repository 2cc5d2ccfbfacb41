"""`hvdlite.run` returns results in rank order, and raises exceptions with their traceback."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pytest

import hvdlite
from harness import base_environment, package_path
from hvdlite.errors import ArgumentError, RankFailedError
from patience import HANG, wait_until

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the path on which the ranks find the modules of the tests, and hvdlite."""
    folders = [str(Path(__file__).parents[1]), *package_path()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def numbers(factor: int, plus: int = 0) -> tuple[int, int, float]:
    """Sum all ranks; return this rank times `factor` plus `plus`, the size, and the sum."""
    import numpy as np

    from faults.arrays import reduce_array
    from hvdlite import basics

    basics.init()
    array = np.full(10, float(basics.rank()), dtype="float32")
    reduce_array(array, "x")
    return basics.rank() * factor + plus, basics.size(), float(array[0])


def test_results_come_in_rank_order() -> None:
    results = hvdlite.run(numbers, (10,), {"plus": 1}, np=3)
    assert results == [(1, 3, 3.0), (11, 3, 3.0), (21, 3, 3.0)]


class OddError(Exception):
    """An error that cannot be unpickled, because it takes two arguments and stores one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail(kind: str) -> Any:
    from hvdlite import basics

    basics.init()
    if basics.rank() == 1:
        raise_here(kind)
    basics.engine().barrier("never").wait()
    return None


def raise_here(kind: str) -> NoReturn:
    if kind == "exit":
        os._exit(3)
    if kind == "odd":
        raise OddError("very ", "odd")
    raise ValueError("boom")


def test_exception_of_a_rank_is_raised_with_its_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="^boom$") as raised:
        hvdlite.run(fail, ("value",), np=3)
    shown = "".join(traceback.format_exception(raised.value))
    assert "rank 1:" in shown
    assert "in raise_here" in shown and "test_run.py" in shown
    # There is no report besides the exception.
    assert "failed first" not in capfd.readouterr().err


def test_exception_that_cannot_be_pickled_is_told() -> None:
    with pytest.raises(RankFailedError, match="very odd") as raised:
        hvdlite.run(fail, ("odd",), np=2)
    assert raised.value.failed_rank == 1


def test_rank_that_just_ends_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 \(pid \d+\) failed first: exit status 3"):
        hvdlite.run(fail, ("exit",), np=2)


def die_while_writing_the_result(status: int) -> None:
    """Rank 1 ends while it writes its result, as if it were killed there."""
    from hvdlite.launch import call

    if os.environ["HVDLITE_RANK"] != "1":
        return

    def give_half(fd: int, returned: call.Returned) -> None:
        data = pickle.dumps((bytes(1 << 16), returned.error, returned.text))
        os.write(fd, data[: len(data) // 2])
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)

    call._give = give_half
    sys.modules["__main__"].__dict__["_give"] = give_half  # `python -m` runs the one in __main__.


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, r"rank 1 \(pid \d+\) failed first: killed by SIGKILL"),
        (0, r"ended with status 0; ranks without a result: \[1\]"),
    ],
)
def test_rank_that_ends_while_it_writes_its_result_is_named(status: int, said: str) -> None:
    with pytest.raises(RankFailedError, match=said):
        hvdlite.run(die_while_writing_the_result, (status,), np=2)


class OnlyThereError(Exception):
    """An error that can be unpickled only in the rank that raised it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return find_only_there, (os.getpid(),)


def find_only_there(pid: int) -> OnlyThereError:
    if pid != os.getpid():
        raise ModuleNotFoundError("no module of that name here")
    return OnlyThereError("said there")


def raise_what_only_ranks_know() -> NoReturn:
    raise OnlyThereError("said there")


def test_exception_whose_class_is_not_known_here_is_told() -> None:
    with pytest.raises(RankFailedError, match="said there") as raised:
        hvdlite.run(raise_what_only_ranks_know, np=2)
    assert "in raise_what_only_ranks_know" in str(raised.value.__cause__)


def test_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises((TypeError, RankFailedError), match="lock"):
        hvdlite.run(threading.Lock, np=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, "np=0: at least one rank"),
        ({"hosts": "a;b:2"}, "is not a name of a host"),
        ({"np": 3, "hosts": "localhost:2"}, "3 ranks are more than the 2 slots"),
        ({"hosts": "a", "hostfile": "b"}, "give one of them"),
        ({"hostfile": sys.executable}, "hostfile .*: this is not a text file"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hvdlite.run(os.getpid, **options)


def test_called_from_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(hvdlite.run(os.getpid, np=2)))
    thread.start()
    thread.join(HANG)
    assert len(results[0]) == 2


def test_many_calls_leave_neither_descriptors_nor_threads() -> None:
    hvdlite.run(os.getpid)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        hvdlite.run(os.getpid, np=2)

    def fewer() -> bool:
        return (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before

    wait_until(fewer, f"{before[0]} descriptors and {before[1]} threads, as before")


CELLS = """
import asyncio, signal, hvdlite
def train(rate):
    import hvdlite.basics as hvd
    hvd.init()
    return hvd.rank(), rate
async def cell():  # A notebook's cells run inside of a loop that listens to signals itself.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "handled", )
    print(hvdlite.run(train, (0.5,), np=2))
    signal.raise_signal(signal.SIGUSR1)
    await asyncio.sleep(0.2)
asyncio.run(cell())
"""


def test_function_of_a_notebook() -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=CELLS,
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.stdout == "[(0, 0.5), (1, 0.5)]\nhandled\n", done.stderr


@pytest.mark.long
def test_notebook_of_the_examples_trains_and_shows_its_loss(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    shown: list[dict[str, Any]] = []  # what the cells print and draw
    kernels, kernel = start_new_kernel(cwd=str(tmp_path))
    try:
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                reply = kernel.execute_interactive(
                    "".join(cell["source"]),
                    timeout=HANG,
                    output_hook=lambda message: shown.append(message["content"]),
                )
                assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        kernel.stop_channels()
        kernels.shutdown_kernel(now=True)
    assert any("image/png" in one.get("data", {}) for one in shown)
    printed = "".join(one.get("text", "") for one in shown)
    [(loss, right)] = re.findall(r"^loss (\d\.\d+), (\d+)% of new images", printed, re.MULTILINE)
    assert float(loss) < 0.5 and int(right) > 85, printed


def test_ctrl_c_ends_the_ranks() -> None:
    code = (
        "import hvdlite, time\ndef wait():\n"
        "    print('ready', flush=True)\n    while True: time.sleep(0.05)\n"
        "try: hvdlite.run(wait, np=2)\nexcept KeyboardInterrupt: print('interrupted')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=base_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(2)
    stdout, stderr = process.communicate(timeout=HANG)
    assert stdout == "interrupted\n", stderr


SEARCH = """
import os, signal, sys, time, hvdlite

def trial():
    os.kill(os.getppid(), signal.{name})
    time.sleep(600)

for number in range(2):
    try:
        hvdlite.run(trial, np=1)
    except Exception as error:
        print("a trial failed", type(error).__name__)
print("still here")
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_to_the_caller_ends_it_although_it_catches_exceptions(
    name: str, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "search.py"
    script.write_text(SEARCH.replace("{name}", name))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "trial" not in done.stdout and "still here" not in done.stdout
