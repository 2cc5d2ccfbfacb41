"""Fixtures that make simulated hosts on first use, and remove them after the test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multihost.bed import Bed, why_not


def _make(count: int) -> Iterator[Bed]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Bed(count) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Bed]:
    """Two hosts with ssh between them."""
    yield from _make(2)


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Bed]:
    """Three hosts with ssh between them."""
    yield from _make(3)


@pytest.fixture
def bed(three_hosts: Bed) -> Iterator[Bed]:
    """Give three undisturbed hosts; fail the test if its job leaves something there."""
    yield three_hosts
    three_hosts.mend()
    assert three_hosts.seconds_until_gone() < 5.0, "processes were left"
    for host in range(3):
        assert three_hosts.shared_memory(host) == []
