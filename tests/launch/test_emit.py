"""--emit: the flags, and the batch script for Slurm as text."""

from __future__ import annotations

import subprocess

import pytest

from hvdlite.launch.emit import EmitRequest, emit
from launcher import run_launcher

FOUR = ("--emit", "slurm", "-np", "4")


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "SBATCH --" in line]
    return dict(line.partition("=")[::2] for line in lines)


def test_directives() -> None:
    text = emit("slurm", EmitRequest(["python", "train.py"], 7, 3, name="mine"))
    assert directives(text) == {
        "job-name": "mine",
        "nodes": "3",
        "ntasks": "7",
        "ntasks-per-node": "3",
        "signal": "USR1@120",
        "requeue": "",
        "open-mode": "append",
    }


def test_ranks_have_at_least_their_grace_before_the_time_limit() -> None:
    text = emit("slurm", EmitRequest(["x"], 1, 1, grace=300.5))
    assert directives(text)["signal"] == "USR1@301"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("--", "python", "train.py", "--name", "a b"), "python train.py --name 'a b'"),
        (("train.py", "-np", "3"), "python train.py -np 3"),
        (("-m", "package.train", "$HOME"), "python -m package.train '$HOME'"),
    ],
)
def test_command_is_the_users(command: tuple[str, ...], line: str) -> None:
    done = run_launcher(*FOUR, "--ntasks-per-node", "2", *command)
    assert done.returncode == 0, done.stderr
    assert f"srun --kill-on-bad-exit=0 --wait=0 {line}\n" in done.stdout
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


def test_words_and_values_arrive_as_they_were_given() -> None:
    words = ["$(date)", "a$$b", "`x`", "a 'b' \"c\"", "{0}", "%s", "a\nb", "*", "\\", ""]
    variables = {f"V{index}": word for index, word in enumerate(words)}
    text = emit("slurm", EmitRequest(["env", *words], 2, 2, variables=variables))
    fakes = 'srun() { shift 2; printf \'%s\\0\' "$@" "${!V@}" "$V0" "$V6"; }\n'
    done = subprocess.run(["bash"], input=fakes + text, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == ["env", *words, *variables, words[0], words[6]]


def test_flags_for_the_ranks_become_variables() -> None:
    done = run_launcher(*FOUR, "--log-level", "debug", "--tcp", "python", "train.py")
    assert "export HVDLITE_LOG_LEVEL=debug\n" in done.stdout
    assert "export NCCL_IB_DISABLE=1\n" in done.stdout
    assert directives(done.stdout)["nodes"] == "1"


def test_every_script_draws_its_secret_itself() -> None:
    done = run_launcher(*FOUR, "python", "train.py")
    (line,) = [line for line in done.stdout.splitlines() if "HVDLITE_TOKEN" in line]
    shown = subprocess.run(
        ["bash", "-c", f"{line}; printenv HVDLITE_TOKEN"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(bytes.fromhex(shown.stdout)) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--emit", "slurm", "python", "x"), "--emit: say how many ranks the job has with -np"),
        (("--emit", "slurm", "-np", "0", "python"), "-np 0: at least one rank is needed"),
        ((*FOUR,), "--emit: say what the ranks run, after all flags"),
        ((*FOUR, "--ntasks-per-node", "0", "x"), "--ntasks-per-node 0: at least one rank per node"),
        ((*FOUR, "-H", "a", "x"), "-H (the cluster chooses the hosts) and --emit: "),
        ((*FOUR, "--nodes", "2", "x"), "--nodes (write --ntasks-per-node, "),
        ((*FOUR, "--grace", "inf", "x"), "--grace inf and --emit: give a number of seconds"),
        ((*FOUR, "--image", "y", "x"), "--image: the ranks of a Slurm job run without"),
        (("--name", "y", "-np", "2", "x"), "--name belongs to --emit, which is not given"),
        (("--emit", "pbs", "x"), "invalid choice: 'pbs'"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    done = run_launcher(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
