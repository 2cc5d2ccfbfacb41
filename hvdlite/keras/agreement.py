"""What the ranks tell each other about a call of `fit`, so that a difference ends in an error."""

from __future__ import annotations

from typing import Any

from hvdlite import basics
from hvdlite.errors import ArgumentError
from hvdlite.keras.arrays import describe_by_rank, exchange
from hvdlite.numbering import next_name

_COMPARED = {
    "steps": (
        "batches per epoch",
        "give every rank the same number of samples, or set steps_per_epoch={least} on all",
    ),
    "epochs": ("epochs", "give epochs={least} on all"),
}


def agree_on_fit(params: dict[str, Any], **facts: Any) -> list[dict[str, Any]]:
    """Compare the numbers of batches and epochs, where they are known beforehand.

    A rank that ran out of batches would leave the others waiting for it in the middle of a step.

    Args:
        params: those of a callback.
        facts: what else to exchange.

    Returns:
        The facts of every rank, by rank.

    Raises:
        ArgumentError: the ranks' numbers differ; on every rank.
    """
    mine = {"steps": params.get("steps"), "epochs": params.get("epochs"), **facts}
    everyone = exchange(mine, next_name("keras.fit"))
    for key, (what, advice) in _COMPARED.items():
        values = [one[key] for one in everyone]
        known = {value for value in values if value is not None}
        if len(known) > 1:
            raise ArgumentError(
                f"rank {basics.rank()}: fit() would run different numbers of {what} "
                f"({describe_by_rank(values)}), but every step needs every rank; "
                + advice.format(least=min(known))
            )
    return everyone
