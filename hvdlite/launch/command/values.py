"""Functions that read the value of a flag; argparse names them in its messages."""

from __future__ import annotations


def megabytes(text: str) -> int:
    """Read a number of MiB as bytes."""
    return int(amount(text) * (1 << 20))


def count(text: str) -> int:
    """Read a whole number from 0."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def amount(text: str) -> float:
    """Read a number from 0."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def port(text: str) -> int:
    """Read the number of a port."""
    value = int(text)
    if not 0 < value < 1 << 16:
        raise ValueError(text)
    return value


def names(text: str) -> list[str]:
    """Read names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


# Argparse says, for example, "invalid number of MiB value: 'x'".
megabytes.__name__ = "number of MiB"
amount.__name__ = "number"
