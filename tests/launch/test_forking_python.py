"""Programs of a `python` that forks see, say and end as those of Python do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import base_environment
from patience import HANG, wait_until
from pythons import python_with

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "X": "of the program", "PYTHONUNBUFFERED": "1"}
TELLS = """
import os, pickle, sys

class Own:
    pass

where = sys.modules["__main__"].__dict__.get("__file__"), os.getcwd(), sys.path[0]
print(__name__, sys.argv, *where, os.environ["X"], sys.stdin.read(), os.getsid(0) == os.getpid())
print(type(pickle.loads(pickle.dumps(Own()))) is Own, "HVDLITE_TOKEN" in os.environ)
print("warned", file=sys.stderr)
"""
HAS_WAVE = "import sys; print('wave' in sys.modules)"


def start(python: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**base_environment(), **ENVIRONMENT, **options.pop("env", {})}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([python, *arguments], env=environment, text=True, **streams, **options)


def run(python: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    with start(python, *arguments, **options) as process:
        out, err = process.communicate("asked", timeout=HANG)
    return process.returncode, out, err


def both(*arguments: str, **options: Any) -> list[tuple[int, str, str]]:
    options = {"start_new_session": True, **options}
    return [run(python, *arguments, **options) for python in (python_with("wave"), sys.executable)]


def test_a_program_sees_what_it_would_see(tmp_path: Path) -> None:
    script = tmp_path / "its folder" / "tells.py"
    script.parent.mkdir()
    script.write_text(TELLS)
    for arguments in ((str(script), "a b", "-c"), ("its folder/tells.py",), ("-c", TELLS, "a")):
        forked, expected = both(*arguments, cwd=tmp_path)
        assert forked == expected and forked[0] == 0, (forked, expected)


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(3)",
        "import sys; sys.exit('what went wrong')",
        "def f():\n    1 / 0\nf()",
        "this is not Python",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "import atexit; atexit.register(print, 'at exit'); raise SystemExit",
        "import threading; threading.Timer(0.1, print, ['thread']).start()",
    ],
)
def test_a_program_ends_as_it_would_end(text: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(text)
    forked, expected = both(str(script))
    assert forked == expected


def test_what_forks_has_the_modules_and_its_programs_differ() -> None:
    python = python_with("wave")
    assert run(python, "-c", HAS_WAVE)[1] == "True\n"
    texts = {run(python, "-c", "import random; print(random.random())")[1] for _ in range(2)}
    assert len(texts) == 2


def test_python_is_started_where_a_fork_would_differ() -> None:
    python = python_with("wave")
    assert run(python, "-c", HAS_WAVE, env={"OMP_NUM_THREADS": "2"})[1] == "False\n"
    assert run(python, "-u", "-c", HAS_WAVE)[1] == "False\n"
    assert run(python, "-m", "this")[1].startswith("The Zen")
    with start(python) as process:
        assert process.communicate(HAS_WAVE, timeout=HANG)[0] == "False\n"


def test_descriptors_keep_their_numbers() -> None:
    out, into = os.pipe()
    text = f"import os; os.write({into}, b'through')"
    assert run(python_with("wave"), "-c", text, pass_fds=[into]) == (0, "", "")
    os.close(into)
    with open(out, "rb") as pipe:
        assert pipe.read() == b"through"


CATCHES = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


def test_signals_are_passed_on() -> None:
    for number, status in ((signal.SIGTERM, 7), (signal.SIGHUP, -signal.SIGHUP)):
        with start(python_with("wave"), "-c", CATCHES) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(number)
            assert process.wait(HANG) == status


def test_a_program_dies_with_the_small_one() -> None:
    with start(python_with("wave"), "-c", CATCHES) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the fork")


def test_failing_import_is_told() -> None:
    status, _, said = run(python_with("no_such_module"), "-c", "")
    assert status == 1 and "No module named 'no_such_module'" in said
