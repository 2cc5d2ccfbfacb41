"""Which modes and options of training can be combined: the registry of what is refused, and why.

`docs/modes.md` shows it as a table, which `tools/modes_doc.py` writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from enum import Enum

from hvdlite.errors import ArgumentError


class Mode(Enum):
    """An option or a mode, with the name by which users know it."""

    SUM = "op=hvd.Sum"
    ADASUM = "op=hvd.Adasum"
    PREDIVIDE = "gradient_predivide_factor="
    WEIGHT = "weight="
    PASSES = "backward_passes_per_step="
    BUCKET_VIEW = "gradient_as_bucket_view=True"
    PROCESS_SET = "process_set="
    COMPRESSION = "compression="
    LATE = "late="
    VIRTUAL = "virtual_size="
    LOCAL_SGD = "LocalSGD"
    LOCAL_SGD_OVER = "LocalSGD(DistributedOptimizer(...))"
    START = "LocalSGD(start=...)"
    DISTRIBUTED = "DistributedOptimizer"
    SHARDED = "ShardedOptimizer"
    SHARE_PARAMETERS = "ShardedOptimizer(share_parameters=True)"
    ELASTIC = "an elastic job"
    CLOSURE = "step(closure)"
    SYNC_BATCH_NORM = "SyncBatchNorm"
    SPARSE = "sparse gradients"


_NOT_OF_A_MEAN = (Mode.SUM, Mode.ADASUM)
_OTHER_NORM = "use torch's BatchNorm, or a layer that normalizes each sample alone"

# For each mode, what it is refused with, and why. A pair stands in one of its two rows.
_REFUSED: dict[Mode, dict[tuple[Mode, ...], str]] = {
    Mode.PREDIVIDE: {_NOT_OF_A_MEAN: "it divides an average in two parts; use op=hvd.Average"},
    Mode.WEIGHT: {_NOT_OF_A_MEAN: "it makes a weighted average; use op=hvd.Average"},
    Mode.BUCKET_VIEW: {
        (Mode.ADASUM,): "hvd.Adasum combines changes of the parameters, not gradients; use "
        "op=hvd.Average or hvd.Sum",
    },
    Mode.LATE: {
        _NOT_OF_A_MEAN: "a step divides by the number of gradients that are in it; use "
        "op=hvd.Average",
        (Mode.ELASTIC,): "the gradients of a step come from the same ranks there; leave late= out",
        (Mode.CLOSURE,): "every rank evaluates the model there, and with late= a rank that is "
        "behind computes nothing; call step() without a closure",
        (Mode.SYNC_BATCH_NORM,): "the layer waits for every rank, and a rank that is behind "
        f"computes nothing; {_OTHER_NORM}",
    },
    Mode.VIRTUAL: {
        _NOT_OF_A_MEAN: "a step uses the mean over the virtual ranks; use op=hvd.Average",
        (Mode.PREDIVIDE,): "gradients are divided once, after their sum; leave "
        "gradient_predivide_factor= out",
        (Mode.WEIGHT,): "every virtual rank counts the same; leave weight= out",
        (Mode.PASSES,): "it counts the backward() calls of a step itself; leave "
        "backward_passes_per_step at 1",
        (Mode.BUCKET_VIEW,): "the sums of a rank's block have memory of their own; leave "
        "gradient_as_bucket_view= out",
        (Mode.PROCESS_SET, Mode.LOCAL_SGD_OVER): "all ranks carry the virtual ranks together; "
        "leave process_set= and LocalSGD out",
        (Mode.COMPRESSION,): "what is rounded between ranks depends on their number; leave "
        "compression= out",
        (Mode.LATE,): "a step has the gradients of all virtual ranks; leave late= out",
        (Mode.SHARDED,): "norms and saved states would follow the division among ranks; use "
        "DistributedOptimizer",
        (Mode.CLOSURE,): "each evaluation would need the batches of all virtual ranks; call "
        "step() without a closure",
        (Mode.SYNC_BATCH_NORM,): "the layer sees the batches of ranks, whose number may change; "
        "use torch's BatchNorm, whose moments virtual_steps() averages",
    },
    Mode.LOCAL_SGD_OVER: {
        (Mode.ADASUM,): "both combine the changes of the parameters; pass the plain optimizer",
        (Mode.START,): "only the DistributedOptimizer averages gradients there; leave start= out",
    },
    Mode.SHARDED: {
        (Mode.ADASUM,): "it updates all parameters on every rank; use op=hvd.Average",
        (Mode.LATE,): "each step needs the parameters that every other rank has updated; use "
        "DistributedOptimizer",
    },
    Mode.SHARE_PARAMETERS: {
        (Mode.LOCAL_SGD, Mode.LOCAL_SGD_OVER): "a round would average the copies of ranks that "
        "have one in common; leave share_parameters= out",
    },
    Mode.ELASTIC: {
        (Mode.SHARDED,): "a rank that dies takes its share of the state along; use "
        "DistributedOptimizer",
    },
}
_PAIRS = {
    (mode, other): why
    for mode, row in _REFUSED.items()
    for others, why in row.items()
    for other in others
}

# What is accepted, and then refused by the first step that uses it, with a message of its own.
REFUSED_IN_A_STEP: dict[Mode, tuple[Mode, ...]] = {
    Mode.SPARSE: (Mode.VIRTUAL,),
}

# Parts and forms of another mode, which cannot be combined with what that one refuses, either.
_PART_OF = {
    Mode.SHARE_PARAMETERS: Mode.SHARDED,
    Mode.SHARDED: Mode.DISTRIBUTED,
    Mode.START: Mode.LOCAL_SGD,
}


def with_wholes(mode: Mode | None) -> Iterator[Mode]:
    """Give a mode, and those that it is a part of: LocalSGD after its start=."""
    while mode is not None:
        yield mode
        mode = _PART_OF.get(mode)


def refusal(one: Mode, other: Mode) -> str | None:
    """Return the message that refuses two modes together; None if they can be combined."""
    one, other = sorted((one, other), key=[*Mode].index)
    for pair in itertools.product(with_wholes(one), with_wholes(other)):
        for mode, second in (pair, pair[::-1]):
            why = _PAIRS.get((mode, second))
            if why is not None:
                return f"{mode.value} cannot be combined with {second.value}: {why}"
    return None


def check_together(chosen: Mapping[Mode, bool]) -> None:
    """Raise ArgumentError if two of the chosen modes cannot be combined."""
    modes = [mode for mode, given in chosen.items() if given]
    for one, other in itertools.combinations(modes, 2):
        message = refusal(one, other)
        if message is not None:
            raise ArgumentError(message)
