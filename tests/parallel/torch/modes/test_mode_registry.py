"""Two modes are refused together if the registry says so, with its message, and else accepted."""

from __future__ import annotations

import gc
import importlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite import basics
from hvdlite.modes import REFUSED_IN_A_STEP, Mode, check_together, refusal, with_wholes
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)

OWN = "the process set of this rank alone"
ARGUMENTS: dict[Mode, dict[str, Any]] = {
    Mode.SUM: {"op": hvd.Sum},
    Mode.ADASUM: {"op": hvd.Adasum},
    Mode.PREDIVIDE: {"gradient_predivide_factor": 2.0},
    Mode.WEIGHT: {"weight": 2.0},
    Mode.PASSES: {"backward_passes_per_step": 2},
    Mode.BUCKET_VIEW: {"gradient_as_bucket_view": True},
    Mode.PROCESS_SET: {"process_set": OWN},
    Mode.COMPRESSION: {"compression": hvd.Compression.bf16},
    Mode.LATE: {"late": hvd.Late()},
    Mode.VIRTUAL: {"virtual_size": 4},
    Mode.START: {"start": 2},
    Mode.LOCAL_SGD_OVER: {"process_set": OWN},
    Mode.SHARE_PARAMETERS: {"share_parameters": True},
}
# What `DistributedOptimizer` alone has, and what the other functions take.
OF_DISTRIBUTED = {
    *(Mode.SUM, Mode.ADASUM, Mode.PREDIVIDE, Mode.PASSES, Mode.LATE),
    *(Mode.DISTRIBUTED, Mode.LOCAL_SGD_OVER, Mode.VIRTUAL),
}
OF_SHARDED = {one for one in Mode if Mode.SHARDED in with_wholes(one)}
IN_A_STEP = {Mode.CLOSURE, Mode.SYNC_BATCH_NORM}
TAKEN = {
    "LocalSGD": ("weight", "compression", "process_set", "start"),
}


class Model(nn.Module):
    """Has equal parameters on all ranks, and sparse gradients if asked to."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=sparse)
        self.linear = nn.Linear(3, 2)
        for param in self.parameters():
            nn.init.constant_(param, 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(rows)).square().mean()


def is_local(modes: set[Mode]) -> bool:
    """Return whether `LocalSGD` gets a plain optimizer."""
    return bool(modes & {Mode.LOCAL_SGD, Mode.START}) and Mode.LOCAL_SGD_OVER not in modes


def is_distributed(modes: set[Mode]) -> bool:
    """Return whether there is a `DistributedOptimizer`, or a `ShardedOptimizer`."""
    return not is_local(modes)


def arguments_of(modes: set[Mode], own: hvd.ProcessSet) -> dict[str, Any] | None:
    """Return the arguments that choose these modes; None if no program can write them."""
    arguments: dict[str, Any] = {}
    for mode in modes:
        for key, value in ARGUMENTS.get(mode, {}).items():
            if arguments.get(key, value) is not value:
                return None
            arguments[key] = value
    if is_local(modes) and (
        modes & (OF_DISTRIBUTED | OF_SHARDED) or not {*arguments} <= {*TAKEN["LocalSGD"]}
    ):
        return None
    if {Mode.LOCAL_SGD, Mode.LOCAL_SGD_OVER} <= modes:
        return None
    if "process_set" in arguments:
        arguments["process_set"] = own
    return arguments


def optimizer_of(model: Any, modes: set[Mode], arguments: dict[str, Any]) -> Any:
    """Make the optimizer."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_local(modes):
        return hvd.LocalSGD(sgd, every=1, **arguments)
    start = arguments.pop("start", 0)
    make = hvd.ShardedOptimizer if modes & OF_SHARDED else hvd.DistributedOptimizer
    optimizer = make(sgd, **arguments)
    if Mode.LOCAL_SGD_OVER in modes:
        return hvd.LocalSGD(optimizer, every=1, start=start)
    return optimizer


def step(model: Any, optimizer: Any, modes: set[Mode]) -> None:
    """Use the modes that are chosen by calls in a step."""

    def closure() -> torch.Tensor:
        if Mode.SYNC_BATCH_NORM in modes:
            hvd.SyncBatchNorm(3)(torch.ones(4, 3))
        loss: torch.Tensor = model(torch.tensor([0, 2]))
        loss.backward()
        return loss

    if Mode.VIRTUAL in modes:
        sampler = hvd.VirtualBatchSampler(range(4), batch_size=1, virtual_size=4)
        loader = torch.utils.data.DataLoader(range(4), batch_sampler=sampler)
        for _ in next(optimizer.virtual_steps(loader, 0, model)):
            closure()
    elif Mode.CLOSURE not in modes:
        closure()
    optimizer.step(*([closure] if Mode.CLOSURE in modes else []))


def message_of(modes: set[Mode], arguments: dict[str, Any], steps: bool) -> str | None:
    """Make and use what the modes stand for; return the message of the refusal."""
    model = Model(sparse=Mode.SPARSE in modes)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if Mode.ELASTIC in modes:
                patch.setattr(basics, "in_elastic_job", lambda: True)
            optimizer = optimizer_of(model, modes, arguments)
        if steps:
            step(model, optimizer, modes)
    except hvd.ArgumentError as error:
        return str(error.args[0])
    return None


def scenario_every_pair() -> None:
    warnings.simplefilter("ignore", hvd.UnreducedGradientsWarning)  # one backward of two
    importlib.import_module("torch._dynamo")  # torch imports it on the way; many objects
    gc.collect()
    gc.freeze()  # hvdlite collects garbage where an optimizer may be in it
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    refused = accepted = 0
    for pair in itertools.combinations(Mode, 2):
        chosen = {*pair}
        arguments = arguments_of(chosen, alone[hvd.rank()])
        if arguments is None:
            assert refusal(*pair) is None or chosen & OF_SHARDED, f"{pair} cannot be tried"
            continue
        used = {whole for mode in pair for whole in with_wholes(mode)}
        used |= {Mode.DISTRIBUTED} if is_distributed(chosen) else set()
        used |= {Mode.PROCESS_SET} if Mode.LOCAL_SGD_OVER in chosen else set()
        used |= {Mode.LOCAL_SGD} if is_local(chosen) and refusal(*pair) else set()
        expected = {refusal(one, other) for one, other in itertools.combinations(used, 2)}
        later = any(mode in used and used & {*others} for mode, others in REFUSED_IN_A_STEP.items())
        message = message_of(chosen, arguments, later or bool(chosen & IN_A_STEP))
        if expected == {None} and later:
            assert message and "cannot be combined with" not in message, f"{pair}: {message}"
        else:
            assert message in expected - ({None} if len(expected) > 1 else set()), (pair, message)
        refused, accepted = refused + (message is not None), accepted + (message is None)
    assert refused > 30 and accepted > 100, (refused, accepted)
    for one in alone:
        hvd.remove_process_set(one)


def scenario_messages_have_one_form() -> None:
    for pair in itertools.combinations(Mode, 2):
        message = refusal(*pair)
        assert message == refusal(*pair[::-1])
        if message is None:
            check_together(dict.fromkeys(pair, True))
            continue
        assert "cannot be combined with" in message, message
        assert "; " in message.partition(": ")[2], f"{message}: what is to be done?"
        with pytest.raises(hvd.ArgumentError) as caught:
            check_together(dict.fromkeys(pair, True))
        assert caught.value.args == (message,)
        check_together({pair[0]: True, pair[1]: False})


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_mode_registry = make_tests(body, sizes(2))
