"""Whether an optimizer may be divided: servers update rows of a tensor, and tensors, apart.

SGD and Adam look at each element alone. Adafactor, Muon and LAMB look at whole tensors, and
clipping by a global norm looks at all of them, so that training would depend on the number of
servers. Nobody keeps a list of such optimizers: a trial on small tensors shows it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.placement import Part

# A trial's tensor has so many; half of them are whole vectors, so that their bits are the same.
_ROWS = 128
_COLUMNS = 4
_STEPS = 3
_TOLERANCE = 1e-3  # It is a share of the largest move; Adafactor and Muon differ by a tenth.


class Tensor(NamedTuple):
    """A tensor of a trial, as rows of numbers, and its gradient in each step."""

    values: list[list[float]]
    gradients: list[list[list[float]]]


# Makes a new optimizer of these tensors, takes all steps, and returns their rows, in this order.
Update = Callable[[Sequence[Tensor]], list[list[float]]]


def check_rows(parts: Sequence[Part], update: Update, optimizer: str) -> None:
    """Refuse an optimizer that looks at whole tensors, if one of these parts is not a whole one."""
    # Its updates would depend on the number of servers, which is an ArgumentError. `update` takes
    # the steps of a trial, and behaves as the optimizer of all these parts.
    divided = [part for part in parts if part.rows < part.spec.rows]
    if divided and _matters(update, [_halves(_tensor(0))]):
        of = divided[0].spec
        raise ArgumentError(
            f"{optimizer} looks at a tensor as a whole, and {of.name!r} ({of}) is divided among "
            f"{divided[0].servers} servers: use one server, or an optimizer that updates each "
            "element by its own gradients, such as SGD, Adagrad or AdamW"
        )


def check_tensors(update: Update, optimizer: str, apart: str) -> None:
    """Raise ArgumentError for an optimizer that looks at all tensors together."""
    # Its updates would depend on the number of servers. `update` takes the steps of a trial, and
    # `apart` says in the message how tensors are updated apart, and the remedy.
    if _matters(update, [[_tensor(1)], [_tensor(2)]]):
        raise ArgumentError(f"{optimizer} looks at all tensors together, {apart}")


def _matters(update: Update, tensors: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether tensors, given by their parts, come out otherwise if parts are apart."""
    whole = [_joined(some) for some in tensors]
    together = update(whole)
    if _differ(together, update(whole), whole):
        return False  # The optimizer draws random numbers.
    apart = [row for some in tensors for one in some for row in update([one])]
    return _differ(together, apart, whole)


def _differ(one: list[list[float]], other: list[list[float]], before: Sequence[Tensor]) -> bool:
    begun = [row for tensor in before for row in tensor.values]
    return _distance(one, other) > _TOLERANCE * _distance(one, begun)


def _distance(one: list[list[float]], other: list[list[float]]) -> float:
    rows = zip(one, other, strict=True)
    return max(abs(a - b) for left, right in rows for a, b in zip(left, right, strict=True))


def _tensor(seed: int) -> Tensor:
    """Draw a tensor, whose gradients are larger in later rows."""
    draw = random.Random(seed).gauss

    def rows(scale: Callable[[int], float]) -> list[list[float]]:
        return [[draw(0, scale(row)) for _ in range(_COLUMNS)] for row in range(_ROWS)]

    return Tensor(rows(lambda _: 1), [rows(lambda row: 0.1 + row) for _ in range(_STEPS)])


def _halves(tensor: Tensor) -> list[Tensor]:
    half = _ROWS // 2
    cuts = (slice(None, half), slice(half, None))
    return [Tensor(tensor.values[cut], [one[cut] for one in tensor.gradients]) for cut in cuts]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    values = [row for part in parts for row in part.values]
    steps = zip(*(part.gradients for part in parts), strict=True)
    return Tensor(values, [[row for one in step for row in one] for step in steps])
