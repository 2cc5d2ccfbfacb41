"""What limits a job, in words, each with its remedy: pure rules over `Figures`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdlite.live.run import Figures, RankFigures
from hvdlite.live.sample import Stall

# The first steps compile and fill caches. A mean over fewer steps than these describes nothing.
FEWEST_STEPS = 5
# A delay of 10 % of a step is 9 % of the longer step, and noise hides some of it.
STRAGGLER_COST = 0.05
# By chance one of two ranks is the last in half of the steps. Over the 50 steps and more of a
# window, 60 % does not come by chance in most windows.
STRAGGLER_SHARE = 0.6
# Ranks that take the cores from each other are the last in turn; above this share it is one rank.
SAME_RANK = 0.8
# Some waiting is in every job; below this share, nothing is gained by looking for its cause.
NOISE_WAITING = 0.1
# Halving the bytes saves at most half of this share: 10 % of a step.
COMMUNICATING = 0.2
# A rank that trains keeps a core busy, except while it waits in collectives.
LOW_CPU = 0.8
# How many threads of a rank were ready and waited for a core, as a mean. On two cores it was 0.03
# for two ranks, 0.3 to 0.6 beside four other programs, and 1.1 for four ranks of four threads.
LONG_CORE_WAIT = 0.15
# Above this share of their host's cores, it is the ranks that need them, and not other programs.
FULL_HOST = 0.8
# A rank whose exchange is longer than that of the others by this share of its delay is late by it.
BY_EXCHANGE = 0.5
# So many times the samples of the other ranks are why a rank is late, wherever its time goes.
LARGER_BATCH = 1.2
# Without so much of a step, what is left of it is the error of the measurement.
NOTHING_LEFT = 0.02
# Exchanges of fewer bytes a step take as long as one of no bytes.
FEW_BYTES = 64 << 10
# A collective that takes so long, and so many steps, waits for a rank that may never come.
STALLED_SECONDS = 5.0
STALLED_STEPS = 10


@dataclass(frozen=True)
class Finding:
    rule: str  # the name of the rule that found it, such as "straggler"
    says: str
    remedy: str  # what to do, in one sentence or more; may be empty
    rank: int | None = None  # None if it does not concern one rank alone


def find(figures: Figures) -> list[Finding]:
    """Say what limits a job: at least one finding, the most important one first."""
    found = [*_faults(figures)]
    if figures.steps < FEWEST_STEPS:
        return found or [_too_short(figures)]
    return [*found, *_limits(figures)] or [_nothing(figures)]


def _faults(figures: Figures) -> Iterator[Finding]:
    """What is wrong, rather than slow."""
    for kind, remedy in _EVENTS.items():
        first = next((event for event in figures.events if event.kind == kind), None)
        if first is not None:
            count = sum(event.kind == kind for event in figures.events)
            more = f", and {count - 1} more like it" if count > 1 else ""
            who = first.rank if first.rank >= 0 else None
            yield Finding(kind, f"{first.text}{more}", remedy, who)
    for rank in sorted(figures.ranks, key=lambda rank: rank.silent, reverse=True):
        if rank.silent:
            yield Finding(
                "silent",
                f"rank {rank.rank} on {rank.host} has said nothing for {rank.silent:.0f} s",
                "Its process may be stopped, or its host may swap memory or be cut off: see there "
                "what it does, for example with py-spy dump.",
                rank.rank,
            )
    for stall in figures.stalled:
        if stall.seconds >= max(STALLED_SECONDS, STALLED_STEPS * figures.step):
            yield Finding(
                "stalled",
                f"{not_called(stall)} for {stall.seconds:.0f} s",
                "All ranks have to call the same collectives in each step: see what "
                f"{names(stall.missing)} does instead, for example with py-spy dump.",
                stall.missing[0] if len(stall.missing) == 1 else None,
            )


_EVENTS = {
    "diverged": "The ranks do not train one model any more. Broadcast parameters and optimizer "
    "state from one rank before the first step, and see which part of the model the others do not "
    "share. If nothing explains it, suspect the memory of that host.",
    "nonfinite": "Clip the gradients, lower the learning rate or the loss scale, and look at the "
    "data of that step.",
}


def _too_short(figures: Figures) -> Finding:
    if figures.steps:
        says = f"there were {figures.steps} steps only, which is too few to say what limits the job"
    else:
        says = "no step was completed"
    return Finding(
        "no steps",
        says,
        "A step is counted when the gradients of all ranks are reduced again under the same names.",
    )


def _limits(figures: Figures) -> list[Finding]:
    """Why ranks do not compute all the time: causes before effects, the larger share first."""
    late = straggler(figures)
    waiting, communicating = list(_late(figures, late)), list(_communicating(figures))
    # With a slow link one rank gets its gradients later than the others, and is late after that.
    exchanging = _mean(figures, lambda rank: rank.communicating)
    by_share = _waiting(figures) > exchanging
    shares = waiting + communicating if by_share else communicating + waiting
    preempted = list(_preempted(figures))
    # Preemption takes no more from a rank than the time for which its threads wait for a core.
    taken = max((rank.core_wait for rank in figures.ranks if _is_preempted(rank)), default=0.0)
    comes_first = taken * figures.step >= exchanging and _is_by_preemption(figures, late)
    return preempted + shares if comes_first else shares + preempted


def _is_by_preemption(figures: Figures, late: Straggler | None) -> bool:
    # A rank that sleeps or reads uses little of a core, too. Other programs delay now one rank and
    # now another. Why one rank or host is mostly the last, only too many threads of the job's own
    # explain, or programs that take the cores from all ranks.
    if late is None:
        return True
    ranks = _of_host(figures, late.host)
    everywhere = _is_crowded(figures, late.host) or all(map(_is_preempted, figures.ranks))
    if (late.rank is not None and late.share >= SAME_RANK) or not everywhere:
        return False
    return any(_is_preempted(rank) for rank in ranks if late.rank in (None, rank.rank))


def _late(figures: Figures, late: Straggler | None) -> Iterator[Finding]:
    """Say for whom ranks wait."""
    waiting = _waiting(figures)
    if late is None:
        if waiting >= NOISE_WAITING * figures.step:
            yield Finding(
                "noise",
                f"ranks wait {percent(waiting / figures.step)} of the step for the last one, and "
                "it is not always the same one",
                "Other programs take the cores now from one rank and now from another, or the "
                "batches differ in work: leave a core free on each host, or sort batches by their "
                "length.",
            )
        return
    share = f"{percent(late.share)} of the steps"
    if late.rank is None:
        rule = "slow host"
        says = f"the ranks on {late.host} hold the others up: one of them is the last in {share}"
        remedy = (
            f"See what else runs on {late.host}, and what it reads its data from. If it is a "
            "slower machine, give its ranks smaller batches and weight= to the optimizer."
        )
    else:
        rule = "straggler"
        says = (
            f"rank {late.rank} on {late.host} holds the others up: it is the last in {share}, "
            f"{time_text(late.seconds)} late in {late.phase}"
        )
        remedy = _larger_batch(figures, late.rank) or _REMEDY_OF_PHASE.get(late.phase, "")
    if late.phase == "the exchange":
        rule, remedy = "slow link", _REMEDY_OF_LINK
    says += f"; the others wait {percent(waiting / figures.step)} of the step"
    yield Finding(rule, says, remedy, late.rank)


def _larger_batch(figures: Figures, late: int) -> str:
    """Return the remedy for a rank that has more samples in each step than any other one."""
    samples = {rank.rank: rank.samples for rank in figures.ranks}
    its = samples.pop(late)
    most = max(samples.values())
    if not most or its < LARGER_BATCH * most:
        return ""
    return (
        f"It has {its / most:.1f} times as many samples in each step as any other rank: "
        "give all ranks batches of one size, or, if its machine is faster, a smaller one than now "
        "and weight= to the optimizer."
    )


_REMEDY_OF_PHASE = {
    "data or forward": "See how it gets its batches: more workers of the data loader "
    "(num_workers=), or data on a local disk; and what it alone does between steps, such as "
    "writing checkpoints.",
    "backward": "See what else runs on its host. If the machine itself is slower, or its batches "
    "have more work, give it smaller ones, and weight= to the optimizer.",
}
_REMEDY_OF_LINK = (
    "It computes as fast as the others, and gets its gradients later: the way into its host is "
    "slow, or the way out of the host before it. Measure the links in both directions, with "
    "iperf3; --network-interfaces chooses a faster one."
)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, or the host whose ranks are the last in turn."""

    host: str
    rank: int | None  # None for a host
    # Where most of the delay comes from: "data or forward", "backward" or "the exchange"; empty for
    # a host. In the exchange the ranks get their gradients later than the others, and so begin the
    # next step later: the link behind them is slow.
    phase: str
    seconds: float  # by which the phase made a rank late, as a mean over the steps in `share`
    share: float  # of the steps in which it was the last, from 0 to 1


def straggler(figures: Figures) -> Straggler | None:
    """Return who holds the others up; None if it is not always the same rank or host."""
    if figures.steps < FEWEST_STEPS or len(figures.ranks) < 2:
        return None
    one = max(figures.ranks, key=lambda rank: rank.last)
    late = _late_rank(figures, one) if _is_late(figures, [one]) else None
    for host in _hosts(figures):
        here = _of_host(figures, host)
        if len(here) > len(figures.ranks) / 2 or not _is_late(figures, here):
            continue  # By chance, too, one of many ranks is the last in most steps.
        share = sum(rank.last for rank in here)
        # Its other ranks may be the last in most of the steps in which the straggler is not.
        others = STRAGGLER_SHARE * (1 - one.last)
        if late is None or (one.last < SAME_RANK and share - one.last >= others):
            phase = "the exchange" if _is_behind_a_link(figures, here) else ""
            return Straggler(host, None, phase, 0.0, share)
    return late


def _is_late(figures: Figures, ranks: list[RankFigures]) -> bool:
    """Return whether one of these ranks is the last in most steps, and the others wait for it."""
    others = [rank.waiting for rank in figures.ranks if rank not in ranks]
    gain = sum(others) / len(others) - sum(rank.waiting for rank in ranks) / len(ranks)
    share = sum(rank.last for rank in ranks)
    return share >= STRAGGLER_SHARE and gain >= STRAGGLER_COST * figures.step


def _late_rank(figures: Figures, one: RankFigures) -> Straggler | None:
    phase, seconds = "data or forward", one.late_between
    if one.late_between < one.late_backward:
        phase, seconds = "backward", one.late_backward
    elif _is_behind_a_link(figures, [one]):
        phase = "the exchange"
    # Its data is not why it is late, if its exchange is: other programs have taken its core.
    elif one.last < SAME_RANK and _is_preempted(one) and _gets_late(figures, [one]):
        return None
    return Straggler(one.host, one.rank, phase, seconds, one.last)


def _is_behind_a_link(figures: Figures, suspects: list[RankFigures]) -> bool:
    # On one host there is no link, and an exchange whose thread waits for a core takes long, too.
    possible = len(_hosts(figures)) > 1 and not any(_is_preempted(rank) for rank in suspects)
    return possible and _gets_late(figures, suspects)


def _gets_late(figures: Figures, suspects: list[RankFigures]) -> bool:
    """Return whether ranks are late because their gradients come later than those of the others."""
    others = [rank.exchange for rank in figures.ranks if rank not in suspects]
    late = max(suspects, key=lambda rank: rank.last)
    longer = min(rank.exchange for rank in suspects) - statistics.median(others)
    return late.late_between >= late.late_backward and longer >= BY_EXCHANGE * late.late_between > 0


def note(one: RankFigures, late: Straggler | None) -> str:
    """Say what is the matter with a rank, which may be the straggler `late`; "" if nothing is."""
    if one.silent:
        return f"silent for {one.silent:.0f} s"
    if late is not None and late.rank == one.rank:
        share = f"{percent(late.share)} of steps"
        return f"straggler: {time_text(late.seconds)} late in {late.phase}, {share}"
    if _is_preempted(one):
        return f"preempted {one.switches:.0f}/s: gets {percent(one.cpu)} of a core"
    return ""


def _preempted(figures: Figures) -> Iterator[Finding]:
    for host in _hosts(figures):
        here = _of_host(figures, host)
        hit = [rank for rank in here if _is_preempted(rank)]
        if not hit:
            continue
        worst = max(hit, key=lambda rank: rank.switches)
        cores = worst.cores
        get = "gets" if len(hit) == 1 else "get as little as"
        says = (
            f"{names([rank.rank for rank in hit])} {get} {percent(min(rank.cpu for rank in hit))} "
            f"of a core, preempted up to {worst.switches:.0f} times a second"
        )
        if _is_crowded(figures, host):
            threads = count_text(sum(rank.threads for rank in here), "thread")
            ranks = count_text(len(here), "rank")
            says = f"{ranks} with {threads} share {count_text(cores, 'core')} of {host}: {says}"
            remedy = f"Set OMP_NUM_THREADS={max(1, cores // len(here))}" + (
                f", and start at most {count_text(cores, 'rank')} on that host."
                if len(here) > cores
                else "."
            )
        else:
            says = f"other programs use the cores of {host}, too: {says}"
            remedy = "See with top what runs there, and move it; or leave cores free for it."
        yield Finding("preempted", says, remedy, worst.rank)


def _is_preempted(rank: RankFigures) -> bool:
    """Return whether a rank works little because its threads wait for a core."""
    return rank.cpu < LOW_CPU and rank.core_wait >= LONG_CORE_WAIT


def _is_crowded(figures: Figures, host: str) -> bool:
    """Return whether it is the ranks that need more cores than a host has."""
    here = _of_host(figures, host)
    cores = max(rank.cores for rank in here)
    return len(here) > cores or sum(rank.cpu for rank in here) >= FULL_HOST * cores


def _hosts(figures: Figures) -> list[str]:
    return list(dict.fromkeys(rank.host for rank in figures.ranks))


def _of_host(figures: Figures, host: str) -> list[RankFigures]:
    return [rank for rank in figures.ranks if rank.host == host]


def _communicating(figures: Figures) -> Iterator[Finding]:
    time = _mean(figures, lambda rank: rank.communicating)
    if len(figures.ranks) < 2 or time < COMMUNICATING * figures.step:
        return
    moved = figures.bytes_per_step
    # A larger batch computes longer, and exchanges the same gradients.
    doubled = time / (figures.step + _mean(figures, _compute))
    yield Finding(
        "communicating",
        f"exchanging gradients takes {percent(time / figures.step)} of the step, "
        f"{time_text(time)} in which nothing else goes on: {bytes_text(moved)} a step, "
        f"{bytes_text(moved / time)}/s",
        f"With batches of twice the size it would be about {percent(doubled)}. "
        + (
            "So small a model may train as fast on one rank."
            if moved < FEW_BYTES
            else "Half the bytes: compression=hvd.Compression.bf16. A reduction only every k-th "
            "time: backward_passes_per_step=k."
        ),
    )


def _nothing(figures: Figures) -> Finding:
    share = _mean(figures, _compute) / figures.step
    return Finding(
        "none", f"nothing limits scaling here; computing is {percent(share)} of the step", ""
    )


def what_if(figures: Figures) -> str:
    """Say how fast a job would be without the rank that it waits for most, and without exchange.

    What the other ranks compute is taken to last as long as now. Empty where too little is known.
    """
    if figures.steps < FEWEST_STEPS or len(figures.ranks) < max(2, figures.size):
        return ""
    exchange = _mean(figures, lambda rank: rank.communicating)
    one = max(figures.ranks, key=lambda rank: rank.held_up)
    # A rank that is left alone exchanges nothing.
    without = figures.step - one.held_up - (exchange if figures.size == 2 else 0.0)
    at_best = figures.step - exchange
    if min(without, at_best) < NOTHING_LEFT * figures.step:
        return ""
    ratio = figures.step / without
    told = all(rank.samples for rank in figures.ranks)
    left = 1 - (one.samples / figures.samples if told else 1 / figures.size)
    return (
        f"What if? Without rank {one.rank}: {ratio:.2f} times as many steps a second, "
        f"{ratio * left:.2f} times as many samples. If communication cost no time: "
        f"{figures.step / at_best:.2f} times as many of both."
    )


def _compute(rank: RankFigures) -> float:
    return rank.backward + rank.between


def _mean(figures: Figures, read: Callable[[RankFigures], float]) -> float:
    return sum(read(rank) for rank in figures.ranks) / max(1, len(figures.ranks))


def _waiting(figures: Figures) -> float:
    """Return how long a rank waits for the last one, as a mean over all but the last one."""
    return sum(rank.waiting for rank in figures.ranks) / max(1, len(figures.ranks) - 1)


def count_text(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def time_text(seconds: float) -> str:
    if seconds < 0.0005:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:,.0f} s"


def bytes_text(count: float) -> str:
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """Return a number with about three digits, without an exponent where people have none."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def not_called(stall: Stall) -> str:
    """Say who is in a call and who is not: "rank 0 is in 'x'; rank 1 has not called it"."""
    are = "is" if len(stall.submitted) == 1 else "are"
    have = "has" if len(stall.missing) == 1 else "have"
    inside = f"{names(stall.submitted)} {are} in '{stall.name}'"
    return f"{inside}; {names(stall.missing)} {have} not called it"


def names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, rest = (list(ranks), 0) if len(ranks) <= 8 else (list(ranks[:6]), len(ranks) - 6)
    words = [str(rank) for rank in shown] + ([f"{rest} others"] if rest else [])
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
