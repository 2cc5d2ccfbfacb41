"""The flags of elastic jobs: what they mean, and which are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.launch import cli
from hvdlite.launch.cli import arguments_from, describe_elastic
from hvdlite.launch.description import Elastic
from hvdlite.launch.flags import build_parser
from launch.marked import python
from launcher import run_launcher

ALL_FLAGS = """
--min-np 2 --max-np 8 --host-discovery-script hosts.sh --slots-per-host 4 --elastic-timeout 9
--reset-limit 3 --blacklist-cooldown-range 5 50 --elastic-heartbeat 1.5 --drain-timeout 7
"""


def described(*arguments: str, **environment: str) -> tuple[Elastic | None, dict[str, str]]:
    options = build_parser().parse_args([*arguments, "train.py"])
    return describe_elastic(options, environment), options.needless


def test_every_flag_reaches_the_description() -> None:
    wanted = Elastic(2, 8, "hosts.sh", 4, 9.0, 3, (5.0, 50.0), 1.5, 7.0)
    assert described(*ALL_FLAGS.split()) == (wanted, {})


def test_horovods_spellings() -> None:
    assert described("--min-num-proc", "1", "--max-num-proc", "4")[0] == Elastic(1, 4)


@pytest.mark.parametrize(
    "flags", [["--min-np", "1"], ["--max-np", "4"], ["--host-discovery-script", "hosts.sh"]]
)
def test_each_of_three_flags_makes_a_job_elastic(flags: list[str]) -> None:
    assert described(*flags)[0] is not None


def test_settings_alone_change_nothing_and_that_is_said() -> None:
    elastic, needless = described("--reset-limit", "3", "--blacklist-cooldown-range", "1", "2")
    assert elastic is None
    assert list(needless) == ["--reset-limit", "--blacklist-cooldown-range"]
    assert "make a job elastic" in needless["--reset-limit"]
    assert list(described("--min-np", "1", "--slots-per-host", "2")[1]) == ["--slots-per-host"]


def test_horovods_variable_sets_the_timeout() -> None:
    elastic, _ = described("--min-np", "1", HOROVOD_ELASTIC_TIMEOUT="30")
    assert elastic is not None and elastic.elastic_timeout == 30


def test_file_of_flags() -> None:
    parser = build_parser()
    text = "min_np: 1\nblacklist-cooldown-range: [2, 20]\n"
    options = parser.parse_args(arguments_from(text, "x", parser))
    assert (options.min_np, options.blacklist_cooldown_range) == (1, [2.0, 20.0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-np 2 --min-np 3", "min-np 3 is more than np 2, with which the job starts"),
        ("-np 2 --min-np 0", "min-np 0: at least one rank is needed"),
        ("-np 2 --max-np 1", "max-np 1 is less than np 2, with which the job starts"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 9 8", "blacklist-cooldown-range 9 8: give"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 0.5 8", "blacklist-cooldown-range 0.5 8"),
        ("-np 2 --min-np 1 --elastic-heartbeat 0.1", "elastic-heartbeat 0.1: give at least"),
        ("-np 2 --min-np 1 --elastic-heartbeat nan", "invalid number value: 'nan'"),
        ("-np 2 --min-np 1 --reset-limit -1", "--reset-limit: "),
        ("--host-discovery-script hosts.sh", "say how many ranks to start with -np"),
        ("-np 2 --host-discovery-script hosts.sh -H a:2", "-H or --hostfile: give one of them"),
        ("-np 2 --min-np 1 -H localhost:1", "2 ranks are more than the 1 slots of localhost:1"),
        ("-np 1 --host-discovery-script true --slots-per-host 0", "slots-per-host 0: a host needs"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*flags.split(), *python("print('ran')")])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "ran" not in said.out


def test_script_that_cannot_be_used_is_refused_at_first() -> None:
    script = "echo no hosts today >&2; exit 3"
    result = run_launcher("-np", "1", "--host-discovery-script", script, *python("print('ran')"))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"script '{script}' failed with exit status 3: no hosts today" in result.stderr


def test_too_few_slots_end_the_job_after_the_timeout(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\n")
    flags = ("-np", "4", "--min-np", "2", "--host-discovery-script", f"cat {hosts}")
    result = run_launcher(*flags, "--elastic-timeout", "0.5", *python("print('ran')"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "for 0.5 s there have been fewer than 2 slots: 1 now (localhost:1)" in result.stderr
