"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.live.sample import Stall


def time_text(seconds: float) -> str:
    """Return a time with about three digits."""
    if seconds < 0.0005:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:,.0f} s"


def bytes_text(count: float) -> str:
    """Return a number of bytes."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """Return a number with about three digits, without an exponent where people have none."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def percent(share: float) -> str:
    """Return a share."""
    return f"{share:.0%}".replace("%", " %")


def not_called(stall: Stall) -> str:
    """Say who is in a call and who is not: "rank 0 is in 'x'; rank 1 has not called it"."""
    are = "is" if len(stall.submitted) == 1 else "are"
    have = "has" if len(stall.missing) == 1 else "have"
    inside = f"{names(stall.submitted)} {are} in '{stall.name}'"
    return f"{inside}; {names(stall.missing)} {have} not called it"


def names(ranks: Sequence[int]) -> str:
    """Name ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, rest = (list(ranks), 0) if len(ranks) <= 8 else (list(ranks[:6]), len(ranks) - 6)
    words = [str(rank) for rank in shown] + ([f"{rest} others"] if rest else [])
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
