"""The hosts that a script prints, and how changes of them reach the launcher's loop."""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdlite.launch.elastic.discovery import (
    Discovery,
    DiscoveryError,
    News,
    ScriptHosts,
    StaticHosts,
    parse_hosts,
)
from hvdlite.launch.hosts import read_hosts
from hvdlite.launch.process import processes_with
from launch.marked import process_state
from patience import HANG, wait_until


class Scripted:
    """A provider that gives one answer after the other, and then the last one again and again."""

    def __init__(self, *answers: Mapping[str, int] | Exception) -> None:
        self.answers = list(answers)

    def hosts(self) -> Mapping[str, int]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        pass


def news_of(provider: Scripted, count: int) -> list[News]:
    """Take so many news of a discovery, as the loop does, and end it."""
    found: list[News] = []
    with Discovery(provider, period=0.01) as discovery:
        while len(found) < count:
            assert select.select([discovery.fd], [], [], HANG)[0]
            found += discovery.take()
        time.sleep(0.05)
        assert discovery.take() == []
    return found


def test_lines_of_a_script() -> None:
    text = "a:2\n\n# none\nb  # comment\na:1\n[::1]:3\n"
    assert parse_hosts(text, 4, "x") == {"a": 3, "b": 4, "::1": 3}


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x", "a b", "a:0", "a:x", "a:-1", "a:99999999999", "a:2:3", "a:10000"]
)
def test_line_that_is_no_host_is_named(line: str) -> None:
    with pytest.raises(DiscoveryError, match="hosts.sh printed '.*' in line 2, which is not host"):
        parse_hosts(f"a:1\n{line}\n", 1, "hosts.sh")


def test_script_may_be_a_file_or_a_command(tmp_path: Path) -> None:
    script = tmp_path / "my hosts.sh"
    script.write_text("#!/bin/sh\necho node1\necho node2:3\n")
    script.chmod(0o755)
    assert ScriptHosts(str(script), 2).hosts() == {"node1": 2, "node2": 3}
    assert ScriptHosts("echo node1 | tr 1 2", 1).hosts() == {"node2": 1}
    script.chmod(0o644)
    with pytest.raises(DiscoveryError, match="cannot be run: Permission denied"):
        ScriptHosts(str(script), 2).hosts()


def test_lines_that_repeat_are_not_added_up_without_end() -> None:
    with pytest.raises(DiscoveryError, match="in line 10001, .*add up to more than 10000 slots"):
        parse_hosts("a\n" * 250_000, 1, "hosts.sh")


def test_script_that_prints_nothing_after_hosts_has_failed(tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    provider = ScriptHosts(f"cat {listed} 2>/dev/null | sort", 1)
    assert provider.hosts() == {}  # They may still be on their way.
    listed.write_text("b\na\n")
    assert provider.hosts() == {"a": 1, "b": 1}
    listed.unlink()
    for _ in range(2):
        with pytest.raises(DiscoveryError, match="printed no host; the last answer stays"):
            provider.hosts()
    listed.write_text("b\n")
    assert provider.hosts() == {"b": 1}


def test_fixed_hosts() -> None:
    assert StaticHosts(read_hosts("a:2,b")).hosts() == {"a": 2, "b": 1}


def test_changes_arrive_in_order_and_nothing_else() -> None:
    answers = [{"a": 1}, {"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1, "a": 1}]
    found = news_of(Scripted(*answers), 2)
    assert found == [News({"a": 1, "b": 1}), News({"b": 1, "a": 1})]
    assert list(found[1].hosts or ()) == ["b", "a"]


def test_failure_warns_once_and_the_last_answer_stays() -> None:
    down = DiscoveryError("no answer")
    provider = Scripted({"a": 1}, down, down, {"a": 1}, down, {"a": 2})
    assert news_of(provider, 3) == [
        News(None, "no answer"),
        News(None, "no answer"),
        News({"a": 2}),
    ]


def test_first_failure_is_raised() -> None:
    with pytest.raises(DiscoveryError, match="no answer"):
        Discovery(Scripted(DiscoveryError("no answer")))


def test_slow_provider_does_not_hold_the_end_up() -> None:
    asked, release, answered = threading.Event(), threading.Event(), threading.Event()
    later = iter([False])

    class Slow(Scripted):
        def hosts(self) -> Mapping[str, int]:
            if next(later, True):
                asked.set()
                release.wait(HANG)
                answered.set()
            return super().hosts()

    with Discovery(Slow({"a": 1}), period=0.01):
        assert asked.wait(HANG)
    assert not answered.is_set()
    release.set()


def test_signal_ends_the_wait_for_the_first_answer_and_the_script(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; sleep 600"
    signalled = os.eventfd(0)

    def interrupt() -> None:
        pid = tmp_path / "pid"
        wait_until(lambda: pid.exists() and pid.read_text(), "the start of the script")
        os.eventfd_write(signalled, 1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Discovery(ScriptHosts(script, 1), interrupt_fd=signalled)
    thread.join()
    os.close(signalled)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: process_state(pid) in ("", "Z"), "the end of the script")


def test_first_answer_takes_no_longer_than_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = secrets.token_hex(16)
    monkeypatch.setenv("TEST_MARK", mark)
    with pytest.raises(DiscoveryError, match=r"--start-timeout \(2 s\) is over, and the first qu"):
        Discovery(ScriptHosts("sleep 600", 1), start_timeout=2.0)
    wait_until(lambda: not processes_with(f"TEST_MARK={mark}"), "the end of the script")


def test_script_that_runs_at_the_end_is_killed(tmp_path: Path) -> None:
    script = f"echo $$ >> {tmp_path}/pids; [ $(wc -l < {tmp_path}/pids) = 1 ] || sleep 600; echo a"
    pids = tmp_path / "pids"
    with Discovery(ScriptHosts(script, 1), period=0.01):
        wait_until(lambda: len(pids.read_text().split()) == 2, "the second start of the script")
    second = int(pids.read_text().split()[1])
    wait_until(lambda: process_state(second) in ("", "Z"), "the end of the script")
