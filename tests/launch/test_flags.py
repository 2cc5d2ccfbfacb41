"""Flags and --config-file: the knobs, horovodrun's names, and which source wins."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite import _core
from hvdlite.errors import ArgumentError
from hvdlite.launch.cli import arguments_from, main
from hvdlite.launch.flags import EXPERT, build_parser, variables
from launch.marked import python
from launch.test_cli import environments
from launcher import run_launcher

OF_THEIR_OWN = ("timeline", "timeline_mark_cycles", "autotune", "autotune_log")
KNOBS = [knob for knob in _core.knobs() if knob["name"] not in (*OF_THEIR_OWN, *EXPERT)]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob["name"])
def test_every_knob_but_the_expert_ones_has_a_flag(knob: dict[str, str]) -> None:
    flag = "--" + knob["name"].replace("_", "-")
    parser = build_parser()
    options = parser.parse_args([flag, knob["default"]])
    assert list(variables(options)) == [knob["environment"]]
    value = variables(options)[knob["environment"]]
    assert value == knob["default"] or float(value) == float(knob["default"])
    assert knob["help"][:20] in build_parser(shows_all=True).format_help()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fusion-threshold-mb", "1.5"], {"HVDLITE_FUSION_THRESHOLD": str(3 << 19)}),
        (["--stall-check-warning-time-seconds", "5"], {"HVDLITE_STALL_WARNING": "5.0"}),
        (["--no-stall-check"], {"HVDLITE_STALL_WARNING": "0"}),
        (["--timeline", "/tmp/Out.json"], {"HVDLITE_TIMELINE": "/tmp/Out.json"}),
        (["--timeline-filename", "/x"], {"HVDLITE_TIMELINE": "/x"}),
        (["--timeline-mark-cycles"], {"HVDLITE_TIMELINE_MARK_CYCLES": "1"}),
        (["--no-timeline-mark-cycles"], {"HVDLITE_TIMELINE_MARK_CYCLES": "0"}),
        (["--autotune"], {"HVDLITE_AUTOTUNE": "1"}),
        (["--no-autotune"], {"HVDLITE_AUTOTUNE": "0"}),
        (["--autotune-log-file", "/tmp/Log"], {"HVDLITE_AUTOTUNE_LOG": "/tmp/Log"}),
        (["--autotune-warmup-samples", "4"], {"HVDLITE_AUTOTUNE_WARMUP_SAMPLES": "4"}),
        (["--autotune-steps-per-sample", "5"], {"HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": "5"}),
        (["--autotune-bayes-opt-max-samples", "6"], {"HVDLITE_AUTOTUNE_TRIALS": "6"}),
        (["--nccl-library", "/opt/NCCL/lib.so"], {"HVDLITE_NCCL_LIBRARY": "/opt/NCCL/lib.so"}),
        (["--gloo-timeout-seconds", "9"], {"HVDLITE_COLLECTIVE_TIMEOUT": "9.0"}),
        (["--log-level", "WARNING"], {"HVDLITE_LOG_LEVEL": "warning"}),
        (["--tcp"], {"NCCL_IB_DISABLE": "1"}),
        (["--check-replicas", "5", "--check-replicas", "7"], {"HVDLITE_CHECK_REPLICAS": "7"}),
    ],
)
def test_flags_set_variables(arguments: list[str], expected: dict[str, str]) -> None:
    assert variables(build_parser().parse_args(arguments)) == expected


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(arguments)
    return "".join(capsys.readouterr())


def test_help_is_one_screen_of_flags_and_examples_that_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser, text = build_parser(), printed(capsys, "--help")
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 80
    common = re.findall(r"^  (-\S+)", text, re.MULTILINE)
    assert len(common) == 6 and all(flag in parser._option_string_actions for flag in common)
    examples = re.findall(r"^  hvdlite-run (.*)", text, re.MULTILINE)
    parsed = [parser.parse_args(shlex.split(one, comments=True)) for one in examples]
    assert [one.command[0] for one in parsed] == ["python"] * 4


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("--repl", "--replace-gloo"),
        ("--via s", "ssh srun"),
        ("--fusion-", "--fusion-threshold --fusion-threshold-mb"),
        ("-np 2 python tr", "train.py"),
    ],
)
def test_bash_completes_flags_and_files(
    typed: str, offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="pip install shtab")
    (tmp_path / "train.py").touch()
    script = f"""{printed(capsys, "--print-completion", "bash")}
        COMP_WORDS=(hvdlite-run {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _shtab_hvdlite_run hvdlite-run "${{COMP_WORDS[COMP_CWORD]}}"; echo "${{COMPREPLY[*]}}"
    """
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{offered}\n", "")
    assert "hvdlite-run" in printed(capsys, "--print-completion", "zsh").splitlines()[0]


def test_completion_without_shtab_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install shtab" in printed(capsys, "--print-completion", "zsh")


def test_help_shows_knobs_with_real_defaults_and_horovods_names_only_where_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short, full = printed(capsys, "--help"), printed(capsys, "--help-all")
    words = " ".join(full.split())
    assert "(default: path)" not in full and "(default: 67108864 bytes)" in words
    assert "(default: 1 second)" in words and "--no-check-finite --check-finite 0 " in words
    horovods = ("--fusion-threshold-mb", "--no-stall-check", "--cycle-time-ms", "--mpi-args")
    for flag in ("--fusion-threshold", "--check-finite", "--log-level", *horovods):
        assert f"{flag} " not in short
        assert flag in full


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("autotune:\n  enabled: true\n", "job.yaml: autotune is not a flag of hvdlite-run"),
        ("colour: red\n", "job.yaml: colour is not a flag"),
        ("- a\n- b\n", "job.yaml must have lines of `flag: value`"),
        ("a: [1\n", "job.yaml is not YAML"),
    ],
)
def test_mistake_in_the_file_is_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        arguments_from(text, "job.yaml", build_parser())


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--check-finite"], "1"),
        (["--no-check-finite"], "0"),
        (["--check-finite", "0"], "0"),
        (["--check-finite", "1", "-np", "2"], "1"),
        (["--check-finite=0"], "0"),
        (["--check-finite", "2"], "2"),
        (["--check-finite=2"], "2"),
        (["--check-finite", "--require-nccl", "0"], "1"),
        (["--no-check-finite", "--check-finite"], "1"),
    ],
)
def test_switch_takes_a_value_or_none(arguments: list[str], value: str) -> None:
    command = ["python", "x.py", "--check-finite", "1"]
    for rest in (command, ["-np", "2", *command]):
        options = build_parser().parse_args([*arguments, *rest])
        assert variables(options)["HVDLITE_CHECK_FINITE"] == value
        assert options.command == command


def test_switch_that_says_no_takes_no_value() -> None:
    for flag in ("--no-check-finite", "--no-stall-check"):
        assert build_parser().parse_args([flag, "1"]).command == ["1"]


@pytest.mark.parametrize(
    ("text", "value"), [("true", "1"), ("false", "0"), ("0", "0"), ("'0'", "0")]
)
def test_switch_of_the_file(text: str, value: str) -> None:
    parser = build_parser()
    arguments = arguments_from(f"check_finite: {text}\n", "x", parser)
    assert variables(parser.parse_args(arguments)) == {"HVDLITE_CHECK_FINITE": value}


def test_switches_and_lists_of_the_file() -> None:
    text = "verbose: false\nprefix_output_with_timestamp: true\nnetwork-interfaces: [a, b]\n"
    parser = build_parser()
    options = parser.parse_args(arguments_from(text, "x", parser))
    assert not options.verbose and options.prefix_output_with_timestamp
    assert options.network_interfaces == ["a", "b"]


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my job.yaml"
    file.write_text("num_proc: 2\ncache_capacity: 5\ncheck_replicas: 4096\n")
    ranks = environments("--config-file", str(file), "--cache-capacity", "7")
    assert len(ranks) == 2
    assert {rank["HVDLITE_CACHE_CAPACITY"] for rank in ranks} == {"7"}
    assert {rank["HVDLITE_CHECK_REPLICAS"] for rank in ranks} == {"4096"}


def test_what_changes_nothing_is_accepted_and_said() -> None:
    result = run_launcher("-np", "1", "--gloo", "--cycle-time-ms", "5", *python("print('ran')"))
    assert (result.returncode, result.stdout) == (0, "[0] ran\n")
    assert "--gloo changes nothing here: there is one data plane" in result.stderr
    assert "--cycle-time-ms changes nothing here: there are no cycles" in result.stderr


@pytest.mark.parametrize("flag", ["--config-file", "--hostfile"])
@pytest.mark.parametrize("file", ["no-such.yaml", sys.executable])
def test_file_that_cannot_be_read_is_named(flag: str, file: str) -> None:
    result = run_launcher("-np", "1", flag, file, *python("print('ran')"))
    assert result.returncode == 1
    why = "No such file or directory" if file == "no-such.yaml" else "this is not a text file"
    assert f"hvdlite-run: {flag} {file}: {why}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-np", "2", "--verbos", "true"], "unrecognized arguments: --verbos; did you mean --verb"),
        (["--hostfil=x", "-np", "2", "true"], "did you mean --hostfile"),
        (["--spin-us", "5", "-np", "2", "true"], "--spin-us; set HVDLITE_SPIN_US instead"),
        (["-np", "2", "--zzzzzz", "true"], "unrecognized arguments: --zzzzzz\n"),
    ],
)
def test_mistyped_flag_is_answered_with_the_nearest_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in printed(capsys, *arguments)
