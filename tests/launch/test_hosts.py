"""Lists of hosts: valid ones are parsed, invalid ones refused, and no text of them is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.launch.channels import Ssh, ssh_command
from hvdlite.launch.hosts import Host, is_here, read_hostfile, read_hosts, spread


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:1,b:2", [Host("a", 1), Host("b", 2)]),
        ("a, b.example.org:4", [Host("a", 1), Host("b.example.org", 4)]),
        ("10.0.0.1:2,a:1,10.0.0.1:1", [Host("10.0.0.1", 3), Host("a", 1)]),
        ("[fe80::1]:2,[::1]", [Host("fe80::1", 2), Host("::1", 1)]),
        ("me@gpu-1:8", [Host("me@gpu-1", 8)]),
        ("fe80::1%eth0,[fe80::2%eth0]:4", [Host("fe80::1%eth0", 1), Host("fe80::2%eth0", 4)]),
    ],
)
def test_list_of_hosts(text: str, hosts: list[Host]) -> None:
    assert read_hosts(text) == hosts


def test_both_forms_of_a_hostfile() -> None:
    text = (
        "# a comment\n\na slots=2\nb:4 # another\nc\nd slots=1 max_slots=3\nd max-slots=3 slots=1\n"
    )
    hosts = [Host("a", 2), Host("b", 4), Host("c", 1), Host("d", 2)]
    assert read_hostfile(text, "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-H names no host"),
        ("a:0", "a has '0' slots"),
        ("a:x", "a has 'x' slots"),
        ("-oProxyCommand=id:1", "is not a name of a host"),
        ("a;id:1", "is not a name of a host"),
        ("$(id):1", "is not a name of a host"),
        ("a b:1", "is not a name of a host"),
        ("a:2:3", "'a:2:3' is not a name of a host"),
        ("a:10001", "a has '10001' slots; write a number from 1 to 10000"),
        ("a:" + "9" * 5000, "a has '99999999999999999999' slots"),
        ("a:9999,a:9999", "the lines of a add up to more than 10000 slots"),
    ],
)
def test_what_is_not_a_list_of_hosts(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_hosts(text)


def test_hostfile_of_an_editor_that_marks_the_byte_order() -> None:
    assert read_hostfile("\ufeffa slots=2\r\nb:4\r\n", "hosts") == [Host("a", 2), Host("b", 4)]


def test_mistake_in_a_hostfile_is_located() -> None:
    with pytest.raises(ArgumentError, match="hosts, line 2: a has 'many' slots"):
        read_hostfile("b\na slots=many\n", "hosts")


@pytest.mark.parametrize(
    "line",
    [
        "a lots=2",
        "a 2",
        "a Slots=2",
        "a cpu=2",
        "a slots = 2",
        "a slots=2 slots=4",
        "a max_slots=4",
        "a slots=2 max_slots=many",
        "a:2 slots=4",
        "a slots=2 b slots=2",
    ],
)
def test_line_of_a_hostfile_that_says_something_else_is_refused(line: str) -> None:
    form = re.escape(
        f"hosts, line 2: {line!r} is not a line of a hostfile; write `a slots=2`, or `a:2`"
    )
    with pytest.raises(ArgumentError, match=form):
        read_hostfile(f"b\n{line} # comment\n", "hosts")


def test_ranks_fill_hosts_in_order() -> None:
    hosts = read_hosts("a:2,b:1,c:2")
    assert spread(hosts, 4) == [0, 0, 1, 2]
    with pytest.raises(ArgumentError, match="6 ranks are more than the 5 slots of a:2, b:1, c:2"):
        spread(hosts, 6)


def test_this_machine_needs_no_ssh() -> None:
    assert is_here("localhost") and is_here("127.0.0.1") and is_here("::1")
    assert not is_here("192.0.2.77") and not is_here("nowhere.invalid")


def test_ssh_runs_one_program_with_fixed_words() -> None:
    key = Path("/my keys/one")
    ssh = Ssh(port=2222, identity_file=key, python="/opt/my env/bin/python")
    command = ssh_command("node1", ssh)
    assert command[-7:] == [
        "node1",
        "exec",
        "env",
        "PYTHONSAFEPATH=1",
        "'/opt/my env/bin/python'",
        "-m",
        "hvdlite.launch.agent",
    ]
    assert command[command.index("node1") - 1] == "--"
    assert "BatchMode=yes" in command and command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == str(key)


def test_what_ssh_says_last_is_what_is_shown() -> None:
    text = Ssh().explain("node1", "Warning: x\nssh: connect: Connection refused\n", 255)
    assert text.startswith("cannot start on host node1: ssh: connect: Connection refused; does an ")
    assert "ended with status 9 and said nothing" in Ssh().explain("a", "", 9)
