"""Fixtures for tests of several scenarios in one world; see `parallel.scenarios`."""

from __future__ import annotations

import pytest

from harness import RankResult


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    """Run a world that `make_tests` describes, once for all its scenarios."""
    ranks: list[RankResult] = request.param()
    return ranks
