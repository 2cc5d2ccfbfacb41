"""Fixtures that start cluster systems for a test file, or skip its tests with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clusters.slurm import Slurm, why_not
from multihost.conftest import two_hosts

__all__ = ["slurm", "two_hosts"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm cluster of two nodes with two processors each."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running
