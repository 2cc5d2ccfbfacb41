"""The command line of hvdlite-run: its flags, its messages, and the environment of the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite
from harness import base_environment
from hvdlite.launch.cli import main
from hvdlite.launch.flags import EXAMPLES
from hvdlite.launch.resources import available_cores
from launch.marked import python
from launcher import LauncherResult, run_launcher

SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def environments(*arguments: str, env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """Run ranks that print their environment; return the environments by rank."""
    result = run_launcher(*arguments, *python(SHOW_ENVIRONMENT), env=env)
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    return [json.loads(line.partition("] ")[2]) for line in lines]


def test_without_arguments_it_says_what_is_missing_and_shows_examples() -> None:
    result = run_launcher()
    assert (result.returncode, result.stdout) == (2, "")
    assert "error: say how many ranks to start with -np, and which program" in result.stderr
    assert EXAMPLES in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("python", "x.py"),
            "say how many ranks to start with -np, for example: hvdlite-run -np 2",
        ),
        (("-np", "0", "python"), "at least one rank"),
        (("-np", "100000", "python"), "-np 100000: at most 10000 ranks run on a host"),
        (("-np", "two", "python"), "invalid int value: 'two'"),
        (("-np", "2"), "say what to run, for example"),
        (("-np", "2", "no-such-program"), "cannot find the program 'no-such-program'"),
        (("-np", "2", "no-such.py"), "there is no file no-such.py in "),
        (("-np", "2", "--nproc-per-node", "2", "python"), "give one of them"),
        (("--nproc-per-node", "0", "python"), "--nproc-per-node 0: at least one"),
        (("-np", "2", "-m"), "say what to run, for example"),
        (("-np", "3", "-H", "localhost:2", "python"), "3 ranks are more than the 2 slots"),
        (("-np", "2", "--cache-capacity", "-1", "python"), "invalid count value: '-1'"),
        (("-np", "2", "--log-level", "loud", "python"), "invalid choice: 'loud'"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(arguments: tuple[str, ...], message: str) -> None:
    result = run_launcher(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_torch_has_to_find_hvdlite_to_replace_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.4.1+cpu")
    with pytest.raises(SystemExit):
        main(["-np", "2", "--replace-gloo", "true"])
    assert "needs torch 2.5 or newer, and here is torch 2.4.1+cpu" in capsys.readouterr().err
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(SystemExit):
        main(["-np", "2", "--replace-gloo", "true"])
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in capsys.readouterr().err


SHOW_PLACE = "import os, sys; print(os.environ['HVDLITE_SIZE'], *sys.argv[1:], sys.executable)"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--np", "2", "place.py"),
        ("--nproc-per-node", "2", "./place.py"),
        ("--nproc_per_node", "2", "-m", "place"),
        ("--nproc-per-node=2", "-H", "localhost", "--module", "place"),
        ("-np", "2", "-m", "--", "place"),
    ],
)
def test_habits_of_other_launchers(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(SHOW_PLACE)
    result = run_launcher(*arguments, "-m", "--np", "7", cwd=tmp_path)
    shown = [f"[{rank}] 2 -m --np 7 {sys.executable}" for rank in (0, 1)]
    assert sorted(result.stdout.splitlines()) == shown, result.stderr


def test_package_itself_is_the_launcher() -> None:
    command = [sys.executable, "-m", "hvdlite", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == f"hvdlite {hvdlite.__version__}\n"


def test_options_after_the_command_are_the_commands() -> None:
    show = "import sys; print(sys.argv[1:])"
    result = run_launcher("-np", "1", *python(show), "--verbose", "-np", "7", "--", "a b")
    assert result.stdout == "[0] ['--verbose', '-np', '7', '--', 'a b']\n"


def test_each_rank_knows_who_it_is() -> None:
    ranks = environments("-np", "3")
    assert [rank["HVDLITE_RANK"] for rank in ranks] == ["0", "1", "2"]
    for number, rank in enumerate(ranks):
        for family in ("HVDLITE", "HOROVOD"):
            assert rank[f"{family}_RANK"] == rank[f"{family}_LOCAL_RANK"] == str(number)
            assert rank[f"{family}_SIZE"] == rank[f"{family}_LOCAL_SIZE"] == "3"
            assert (rank[f"{family}_CROSS_RANK"], rank[f"{family}_CROSS_SIZE"]) == ("0", "1")
        assert rank["HVDLITE_EPOCH"] == "0"
        assert rank["PYTHONUNBUFFERED"] == "1"
        assert len(bytes.fromhex(rank["HVDLITE_JOB_ID"])) == 16
    assert len({rank["HVDLITE_JOB_ID"] for rank in ranks}) == 1


def test_two_jobs_share_no_secret() -> None:
    (first,), (second,) = environments("-np", "1"), environments("-np", "1")
    assert len(bytes.fromhex(first["HVDLITE_TOKEN"])) == 32
    assert first["HVDLITE_TOKEN"] != second["HVDLITE_TOKEN"]
    assert first["HVDLITE_JOB_ID"] != second["HVDLITE_JOB_ID"]


def test_a_job_inside_a_job_is_one_of_its_own() -> None:
    inner = [sys.executable, "-m", "hvdlite.launch", "-np", "2"]
    result = run_launcher(
        "-np", "1", *inner, *python("import os; print(os.environ['HVDLITE_SIZE'])")
    )
    assert sorted(result.stdout.splitlines()) == ["[0] [0] 2", "[0] [1] 2"]


def caps(result: LauncherResult) -> list[str]:
    return [line for line in result.stderr.splitlines() if "OMP_NUM_THREADS" in line]


def test_threads_are_capped_and_that_is_said_once() -> None:
    cores = available_cores()
    names = [f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS")]
    names += ["TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"]
    show = f"import os; print([os.environ[n] for n in {names}])"
    result = run_launcher("-np", "2", *python(show))
    threads = max(1, cores // 2)
    assert sorted(result.stdout.splitlines()) == [f"[{r}] {[str(threads)] * 5}" for r in (0, 1)]
    (line,) = caps(result)
    assert line.startswith(f"hvdlite-run: {threads} thread")
    assert "/ 2 ranks" in line


def test_threads_that_the_user_chose_stay() -> None:
    result = run_launcher(
        "-np",
        "2",
        *python("import os; print(os.environ.get('MKL_NUM_THREADS'))"),
        env={"OMP_NUM_THREADS": "3"},
    )
    assert sorted(result.stdout.splitlines()) == ["[0] None", "[1] None"]
    assert caps(result) == []


FAULTS = """
import resource
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (20 << 20) for _ in range(4)]
    del blocks
print("many" if resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 5000 else "few")
"""


@pytest.mark.parametrize(
    ("own", "faults"), [({}, "few"), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "many")]
)
def test_memory_stays_with_a_rank_unless_the_user_set_up_the_allocator(
    own: dict[str, str], faults: str
) -> None:
    result = run_launcher("-np", "2", *python(FAULTS), env=own)
    assert sorted(result.stdout.splitlines()) == [f"[0] {faults}", f"[1] {faults}"]


def test_stdin_is_empty_for_all() -> None:
    result = run_launcher("-np", "2", *python("import sys; print(repr(sys.stdin.read()))"))
    assert sorted(result.stdout.splitlines()) == ["[0] ''", "[1] ''"]


def test_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train model.py").write_text("import nearby; print(nearby.VALUE)")
    (folder / "nearby.py").write_text("VALUE = 42")
    result = run_launcher(
        "-np", "2", "--output-filename", "out put", sys.executable, "train model.py", cwd=folder
    )
    assert sorted(result.stdout.splitlines()) == ["[0] 42", "[1] 42"]
    assert (folder / "out put" / "rank.1" / "stdout").read_text() == "42\n"


def test_container_that_refuses_pidfd_open_is_one_sentence() -> None:
    refused = """
import os, runpy, sys

def refuse(pid):
    raise PermissionError(1, "Operation not permitted")

os.pidfd_open = refuse
sys.argv = ["hvdlite-run", "-np", "2", "sleep", "1000"]
runpy.run_module("hvdlite.launch", run_name="__main__")
"""
    result = subprocess.run(
        [sys.executable, "-c", refused], capture_output=True, text=True, env=base_environment()
    )
    assert result.returncode == 1
    assert "pidfd_open: Operation not permitted; it needs Linux 5.3, and a" in result.stderr
    assert "Traceback" not in result.stderr


def test_container_that_refuses_memfd_create_still_runs_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int = 0) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    assert hvdlite.run(lambda: 7, np=1) == [7]
