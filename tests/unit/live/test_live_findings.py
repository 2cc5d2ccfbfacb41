"""What the findings say of made-up jobs, at each threshold and just below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvdlite.live import findings as rules
from hvdlite.live.findings import Finding, Straggler, find, straggler
from hvdlite.live.run import Figures, RankFigures
from hvdlite.live.sample import Event, Stall

STEP = 0.1


def make_rank(rank: int, **fields: object) -> RankFigures:
    """A rank with steps of 100 ms, of which `between` takes what the other phases leave."""
    one = RankFigures(
        rank=rank,
        host="node1",
        backward=0.04,
        waiting=0.0,
        communicating=0.005,
        between=0.0,
        last=0.5,
        late_between=0.0,
        late_backward=0.0,
        held_up=0.0,
        cpu=0.98,
        rss=1 << 30,
        switches=5.0,
        core_wait=1.5,
        threads=6,
        cores=4,
        samples=0.0,
        values={},
        silent=0.0,
    )
    one = replace(one, **fields)  # type: ignore[arg-type]
    return replace(one, between=STEP - one.backward - one.waiting - one.communicating)


def make_figures(*ranks: RankFigures, **fields: object) -> Figures:
    figures = Figures(
        seconds=60.0,
        epoch=0,
        size=len(ranks),
        steps=600,
        step=STEP,
        samples=0.0,
        bytes_per_step=4e6,
        ranks=ranks,
        stalled=(),
        total_steps=600,
    )
    return replace(figures, **fields)  # type: ignore[arg-type]


def rule_names(figures: Figures) -> list[str]:
    return [finding.rule for finding in find(figures)]


def only(figures: Figures, rule: str) -> Finding:
    (finding,) = (one for one in find(figures) if one.rule == rule)
    return finding


def late_job(waiting: float = 0.02, last: float = 0.9, **late: object) -> Figures:
    """Three ranks, of which rank 2 is late."""
    return make_figures(
        make_rank(0, waiting=waiting, last=(1 - last) / 2),
        make_rank(1, waiting=waiting, last=(1 - last) / 2),
        make_rank(2, last=last, host="node2", held_up=waiting, **{"late_between": waiting, **late}),
    )


def test_what_if_says_what_a_rank_and_the_exchange_cost() -> None:
    three = "1.25 times as many steps a second, 0.83 times as many samples."
    nothing = "If communication cost no time: 1.05 times as many of both."
    assert rules.what_if(late_job()) == f"What if? Without rank 2: {three} {nothing}"
    slow = late_job()
    ranks = [replace(one, samples=100.0 * (3 - one.rank)) for one in slow.ranks]
    told = replace(slow, ranks=tuple(ranks), samples=600.0)
    assert "Without rank 2: 1.25 times as many steps a second, 1.04 times" in rules.what_if(told)
    two = make_figures(make_rank(0, waiting=0.02), make_rank(1, held_up=0.02))
    assert "Without rank 1: 1.33 times as many steps a second, 0.67 times" in rules.what_if(two)
    hidden = make_figures(make_rank(0), make_rank(1, held_up=0.099))
    assert rules.what_if(hidden) == "", "what is left of a step is no measurement"
    assert rules.what_if(replace(slow, size=4)) == rules.what_if(make_figures(make_rank(0))) == ""


def test_nothing_limits_a_job_whose_ranks_compute() -> None:
    (finding,) = find(make_figures(make_rank(0), make_rank(1)))
    assert finding.rule == "none"
    assert finding.says == "nothing limits scaling here; computing is 95 % of the step"


@pytest.mark.parametrize(
    ("late", "phase"),
    [
        ({"late_between": 0.009, "late_backward": 0.002}, "data or forward"),
        ({"late_between": 0.002, "late_backward": 0.009}, "backward"),
    ],
)
def test_a_straggler_is_named_with_its_phase(late: dict[str, float], phase: str) -> None:
    figures = late_job(**late)  # type: ignore[arg-type]
    assert straggler(figures) == Straggler("node2", 2, phase, 0.009, 0.9)
    finding = find(figures)[0]
    assert (finding.rule, finding.rank) == ("straggler", 2)
    assert finding.says == (
        "rank 2 on node2 holds the others up: it is the last in 90 % of the steps, 9.0 ms late in "
        f"{phase}; the others wait 20 % of the step"
    )
    assert ("num_workers=" in finding.remedy) == (phase == "data or forward")
    assert ("weight=" in finding.remedy) == (phase == "backward")


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ((304, 304, 910), "It has 3.0 times as many samples in each step as any other rank"),
        ((304, 304, 304), "See how it gets its batches"),
        ((304, 910, 910), "See how it gets its batches"),
        ((0, 0, 0), "See how it gets its batches"),
    ],
)
def test_a_straggler_with_larger_batches_is_told_of_them(
    samples: tuple[float, float, float], said: str
) -> None:
    late = late_job()
    ranks = [replace(rank, samples=of) for rank, of in zip(late.ranks, samples, strict=True)]
    finding = find(replace(late, ranks=tuple(ranks)))[0]
    assert finding.rule == "straggler"
    assert finding.remedy.startswith(said)


def test_who_is_mostly_last_and_waits_as_long_as_the_others_is_not_a_straggler() -> None:
    figures = make_figures(
        make_rank(0, waiting=0.02, last=0.38), make_rank(1, waiting=0.018, last=0.62)
    )
    assert straggler(figures) is None
    assert rule_names(figures) == ["noise"]


@pytest.mark.parametrize(("share", "found"), [(0.3, "slow host"), (0.29, "noise")])
def test_two_slow_ranks_of_one_host_are_a_slow_host(share: float, found: str) -> None:
    ranks = [make_rank(rank, waiting=0.02, last=0.5 - share) for rank in range(2)]
    ranks += [make_rank(rank, waiting=0.005, last=share, host="node2") for rank in (2, 3)]
    finding = find(make_figures(*ranks))[0]
    assert finding.rule == found
    assert ("node2" in finding.says) == (found == "slow host")


@pytest.mark.parametrize(
    ("last", "found"),
    [((0.6, 0.24), "slow host"), ((0.6, 0.23), "straggler"), ((0.8, 0.2), "straggler")],
)
def test_a_straggler_whose_host_is_last_in_the_other_steps_too(
    last: tuple[float, float], found: str
) -> None:
    rest = (1 - sum(last)) / 2
    ranks = [make_rank(rank, waiting=0.02, last=rest) for rank in range(2)]
    ranks += [
        make_rank(2, waiting=0.004, last=last[0], late_between=0.02, host="node2"),
        make_rank(3, waiting=0.006, last=last[1], host="node2"),
    ]
    assert find(make_figures(*ranks))[0].rule == found


def test_the_many_ranks_of_one_host_are_not_a_slow_host_by_chance() -> None:
    ranks = [make_rank(rank, waiting=0.02, last=0.25) for rank in range(3)]
    assert rule_names(make_figures(*ranks, make_rank(3, waiting=0.03, host="node2"))) == ["noise"]


def test_communicating_says_what_larger_batches_bring() -> None:
    ranks = [make_rank(rank, communicating=0.04) for rank in range(2)]
    finding = only(make_figures(*ranks), "communicating")
    assert "takes 40 % of the step, 40 ms" in finding.says
    assert finding.says.endswith("4.0 MB a step, 100.0 MB/s")
    # 60 ms of computing become 120 ms beside the same 40 ms.
    assert "twice the size it would be about 25 %" in finding.remedy
    assert "Compression.bf16" in finding.remedy


def test_too_many_threads_are_preempted_by_each_other() -> None:
    """4 ranks of 4 threads on 2 cores: that they wait for each other is the effect."""
    ranks = [
        make_rank(rank, cpu=0.49, switches=400 + rank, cores=2, waiting=0.01) for rank in range(4)
    ]
    first, second = find(make_figures(*ranks))
    assert (first.rule, second.rule) == ("preempted", "noise")
    assert first.says == (
        "4 ranks with 24 threads share 2 cores of node1: ranks 0, 1, 2 and 3 get as little as 49 % "
        "of a core, preempted up to 403 times a second"
    )
    assert first.remedy == "Set OMP_NUM_THREADS=1, and start at most 2 ranks on that host."


def test_a_rank_whose_cores_others_use_is_told_so() -> None:
    figures = make_figures(make_rank(0), make_rank(1, cpu=0.4, switches=300))
    finding = find(figures)[0]
    assert finding.rule == "preempted"
    assert finding.says.startswith("other programs use the cores of node1, too: rank 1 gets 40 %")
    assert finding.remedy.startswith("See with top")


def test_silence_and_stalls_come_first() -> None:
    ranks = (make_rank(0), make_rank(1, silent=12.3, communicating=0.03))
    stalls = (Stall("grads.0", 14.0, (0,), (1,)), Stall("x", 4.9, (0,), (1,)))
    silent, stalled = find(make_figures(*ranks, stalled=stalls))
    assert (silent.rule, silent.rank) == ("silent", 1)
    assert silent.says == "rank 1 on node1 has said nothing for 12 s"
    assert (stalled.rule, stalled.rank) == ("stalled", 1)
    assert stalled.says == "rank 0 is in 'grads.0'; rank 1 has not called it for 14 s"


@pytest.mark.parametrize("kind", ["diverged", "nonfinite"])
def test_wrong_numbers_are_the_first_finding(kind: str) -> None:
    events = (Event(3.0, kind, 1, "fc.weight", "rank 1: fc.weight"), Event(4.0, kind, 0, "b", "b"))
    finding = find(replace(late_job(), events=events))[0]
    assert (finding.rule, finding.rank) == (kind, 1)
    assert finding.says == "rank 1: fc.weight, and 1 more like it"
    assert finding.remedy


@pytest.mark.parametrize("steps", [0, 1, rules.FEWEST_STEPS - 1])
def test_a_job_with_too_few_steps_is_not_judged(steps: int) -> None:
    figures = replace(late_job(), steps=steps)
    assert straggler(figures) is None
    (finding,) = find(figures)
    assert finding.rule == "no steps"
    assert rule_names(replace(late_job(), steps=rules.FEWEST_STEPS)) == ["straggler"]


def two_ranks(**fields: object) -> Figures:
    """Two ranks of which both are so."""
    return make_figures(*(make_rank(rank, **fields) for rank in range(2)))


def late_by(last: float, share: float) -> Figures:
    """Three ranks of one host, of which one is the last in so many steps and costs so much."""
    late = late_job(waiting=share * STEP, last=last)
    return replace(late, ranks=tuple(replace(rank, host="node1") for rank in late.ranks))


def one_of_two(**fields: object) -> Figures:
    """Two ranks, of which one is so."""
    return make_figures(make_rank(0), make_rank(1, **fields))


def stalled_for(seconds: float, step: float) -> Figures:
    stall = Stall("x", seconds, (0, 2), (1,))
    return make_figures(*map(make_rank, range(3)), step=step, stalled=(stall,))


# For each rule: figures of a value, the value at its threshold, and one just below it.
THRESHOLDS: list[tuple[str, Callable[[float], Figures], float, float]] = [
    ("straggler", lambda share: late_by(share, 0.2), rules.STRAGGLER_SHARE, -0.01),
    ("straggler", lambda cost: late_by(0.9, cost), rules.STRAGGLER_COST + 1e-9, -0.001),
    # The last rank of each step does not wait, so the mean of two ranks is half of it.
    ("noise", lambda part: two_ranks(waiting=part / 2 * STEP), rules.NOISE_WAITING + 1e-9, -0.001),
    (
        "communicating",
        lambda part: two_ranks(communicating=part * STEP),
        rules.COMMUNICATING,
        -0.001,
    ),
    # Preemption needs both signs: a low use of a core, and long waits for a core.
    ("preempted", lambda cpu: one_of_two(cpu=cpu, switches=1e3), rules.LOW_CPU - 0.01, 0.01),
    (
        "preempted",
        lambda wait: one_of_two(cpu=0.5, switches=1e3, core_wait=wait),
        rules.LONG_CORE_WAIT,
        -0.01,
    ),
    # A stall is long, and many steps long.
    ("stalled", lambda seconds: stalled_for(seconds, 0.1), rules.STALLED_SECONDS, -0.1),
    ("stalled", lambda steps: stalled_for(10 * steps, 10.0), rules.STALLED_STEPS, -0.1),
]


@pytest.mark.parametrize(("rule", "make", "at", "further"), THRESHOLDS)
def test_a_rule_holds_from_its_threshold_on(
    rule: str, make: Callable[[float], Figures], at: float, further: float
) -> None:
    assert rule in rule_names(make(at))
    assert rule not in rule_names(make(at + further))
    assert (straggler(make(at)) is not None) == (rule == "straggler")


def crowded_job(last: float, ranks: int) -> Figures:
    """One core on the host of the late rank, for one rank or more."""
    figures = late_job(last=last)
    crowded = replace(figures.ranks[2], cpu=0.75, switches=300.0, cores=1)
    twins = [replace(crowded, rank=rank, last=0.0) for rank in range(3, 2 + ranks)]
    return make_figures(*figures.ranks[:2], crowded, *twins)


def all_ranks(figures: Figures, **fields: Any) -> Figures:
    return replace(figures, ranks=tuple(replace(rank, **fields) for rank in figures.ranks))


# Ranks that wait for a slow link work little, and others may use their cores meanwhile.
SLOW_LINK = {"cpu": 0.05, "switches": 60.0, "communicating": 0.6 * STEP, "backward": 0.01}


@pytest.mark.parametrize(
    ("figures", "rules_in_order"),
    [
        # Too many threads come before the delay that they cause.
        (crowded_job(rules.SAME_RANK - 0.01, 2), ["preempted", "straggler"]),
        (crowded_job(rules.SAME_RANK, 2), ["straggler", "preempted"]),
        (crowded_job(rules.SAME_RANK - 0.01, 1), ["straggler", "preempted"]),
        (two_ranks(core_wait=0.59, **SLOW_LINK), ["communicating", "preempted"]),
        (two_ranks(core_wait=0.6, **SLOW_LINK), ["preempted", "communicating"]),
        (all_ranks(late_job(), cpu=0.4, switches=300), ["straggler", "preempted", "preempted"]),
        (all_ranks(late_job(last=0.7), cpu=0.4), ["preempted", "preempted", "straggler"]),
        # The larger share comes first.
        (all_ranks(late_job(), communicating=0.21 * STEP), ["communicating", "straggler"]),
        (
            all_ranks(late_job(waiting=0.052), communicating=0.5 * STEP),
            ["straggler", "communicating"],
        ),
    ],
)
def test_what_costs_most_is_said_first(figures: Figures, rules_in_order: list[str]) -> None:
    assert rule_names(figures) == rules_in_order
