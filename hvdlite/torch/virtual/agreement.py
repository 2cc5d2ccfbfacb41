"""What ranks must have in common so that all of them compute the same bits."""

from __future__ import annotations

import contextlib
import json
import platform
import warnings
from pathlib import Path
from typing import Any

import torch

import hvdlite
from hvdlite import basics
from hvdlite.errors import HvdliteError, MismatchError, VirtualRanksWarning
from hvdlite.ops import gather_bytes


def agree(name: str, arguments: dict[str, Any], machine: dict[str, str]) -> None:
    """Compare the arguments of `virtual_steps` and the machines of the ranks."""
    data = json.dumps([basics.rank(), arguments, machine]).encode()
    for block in gather_bytes(basics.engine(), data, f"#{name}.arguments"):
        if len(block) == 0:
            continue  # The rank has joined: the step raises an error.
        rank, others, its_machine = json.loads(bytes(block))
        for what, own in arguments.items():
            if own != others[what]:
                raise MismatchError(
                    f"virtual_steps(): {what} is {own} on rank {basics.rank()} and {others[what]} "
                    f"on rank {rank}; give every rank the same, and load the same state on all"
                )
        warn_of(f"on rank {basics.rank()} and on rank {rank}", machine, its_machine)


def warn_of(where: str, one: dict[str, str], other: dict[str, str]) -> None:
    """Warn if two machines differ in what decides the bits."""
    keys = [*one, *(key for key in other if key not in one)]
    found = "; ".join(
        f"{key}: {one.get(key)} and {other.get(key)}"
        for key in keys
        if one.get(key) != other.get(key)
    )
    if found:
        warnings.warn(
            f"virtual ranks have the same bits only on machines of the same kind, and {where} "
            f"there are different ones ({found})",
            VirtualRanksWarning,
            stacklevel=2,
        )


def warn_of_collective() -> None:
    """Warn of a collective in the body of the loop over a step."""
    warnings.warn(
        "a collective ran inside of the loop over a step of virtual_steps(): ranks carry different "
        "numbers of virtual ranks, so its results depend on the number of ranks, or ranks wait in "
        "vain; call it after the loop, or give the loss to step.record()",
        VirtualRanksWarning,
        stacklevel=4,
    )


def check_carried(carried: float, virtual_size: int) -> None:
    """Raise an error if the sum over the ranks lacks virtual ranks."""
    if carried != virtual_size:
        raise HvdliteError(
            f"the gradients of {virtual_size - carried:.0f} of {virtual_size} virtual ranks are "
            "missing: a rank that carries some of them has called hvd.join(); all ranks "
            "have the same number of steps, and need no join()"
        )


def check_threads(now: int, threads: int) -> None:
    """Raise an error if the number of torch's threads was changed in a loop."""
    if now != threads:
        raise HvdliteError(
            f"torch has {now} threads on rank {basics.rank()}, and virtual_steps() has "
            f"threads={threads}: sums would have other bits; call torch.set_num_threads "
            "nowhere else"
        )


def refuse_unfinished(number: int) -> None:
    """Raise the error for a step whose batches were not all done."""
    raise HvdliteError(
        f"step {number} of virtual_steps() was left before its end: loop over all "
        "batches of each step, or leave the loop over virtual_steps(), too"
    )


def describe(threads: int) -> dict[str, str]:
    """Return the kind of processor, the versions of the libraries, and torch's threads."""
    kind = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    # Libraries choose their kernels by the maker and the model of the processor, too.
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        kind = f"{model.partition(':')[2].strip()}, {kind}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none"
    return {
        "processor": kind,
        "GPU": gpu,
        "torch": str(torch.__version__),
        "hvdlite": hvdlite.__version__,
        "threads": str(threads),
    }
