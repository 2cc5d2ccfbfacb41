"""A slow link is not taken for a rank or a host that is late by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdlite.live.findings import find
from hvdlite.live.run import Figures
from unit.live.test_live_findings import late_job, make_figures, make_rank


def with_exchange(figures: Figures, *seconds: float) -> Figures:
    ranks = [replace(one, exchange=of) for one, of in zip(figures.ranks, seconds, strict=True)]
    return replace(figures, ranks=tuple(ranks))


@pytest.mark.parametrize(("exchange", "rule"), [(0.045, "straggler"), (0.055, "slow link")])
def test_a_rank_that_gets_its_gradients_late_is_behind_a_slow_link(
    exchange: float, rule: str
) -> None:
    finding = find(with_exchange(late_job(samples=900.0), 0.04, 0.05, exchange))[0]
    assert (finding.rule, finding.rank) == (rule, 2)
    assert ("late in the exchange; the others" in finding.says) == (rule == "slow link")
    assert ("in both directions, with iperf3" in finding.remedy) == (rule == "slow link")


@pytest.mark.parametrize(("exchange", "rule"), [(0.045, "slow host"), (0.06, "slow link")])
def test_a_host_whose_gradients_come_late_is_behind_a_slow_link(exchange: float, rule: str) -> None:
    late = {"last": 0.45, "late_between": 0.02}
    ranks = [make_rank(rank, waiting=0.02, last=0.05) for rank in (0, 1)]
    ranks += [make_rank(rank, host="node2", **late) for rank in (2, 3)]
    figures = with_exchange(make_figures(*ranks), 0.04, 0.04, exchange, exchange)
    finding = find(figures)[0]
    assert (finding.rule, finding.rank) == (rule, None)


def test_one_host_has_no_link_and_a_rank_without_a_core_is_not_behind_one() -> None:
    late = with_exchange(late_job(samples=900.0), 0.04, 0.05, 0.06)
    assert find(late)[0].rule == "slow link"
    together = [replace(one, host="node1") for one in late.ranks]
    waiting = [replace(one, core_wait=0.5, cpu=0.3) for one in late.ranks]
    for ranks in (together, waiting):
        findings = find(replace(late, ranks=tuple(ranks)))
        assert all(one.rule != "slow link" for one in findings), findings


@pytest.mark.parametrize(("last", "rule"), [(0.73, "slow host"), (0.9, "straggler")])
def test_data_is_not_blamed_where_a_rank_without_a_core_exchanges_longer(
    last: float, rule: str
) -> None:
    late = with_exchange(late_job(last=last), 0.04, 0.05, 0.06)
    ranks = (*late.ranks[:2], replace(late.ranks[2], core_wait=0.16, cpu=0.02))
    rules = [one.rule for one in find(replace(late, ranks=ranks))]
    assert rule in rules and len({"slow host", "slow link", "straggler"}.intersection(rules)) == 1
