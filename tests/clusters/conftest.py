"""Fixtures that start cluster systems for a test file, or skip its tests with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clusters.slurm import Slurm, why_not
from multihost import bed as hosts


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm cluster of two nodes with two processors each."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[hosts.Bed]:
    """Three hosts that know each other's names."""
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    with hosts.Bed(3) as made:
        yield made


@pytest.fixture
def bed(three_hosts: hosts.Bed) -> Iterator[hosts.Bed]:
    """Give three undisturbed hosts; fail the test if its job leaves something there."""
    yield three_hosts
    three_hosts.mend()
    assert three_hosts.seconds_until_gone() < 10.0, "processes were left"
    for host in range(3):
        assert three_hosts.shared_memory(host) == []
