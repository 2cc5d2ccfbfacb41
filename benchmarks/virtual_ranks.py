"""Measure what virtual ranks add to a step, beside the ordinary optimizer with as many batches.

    python benchmarks/virtual_ranks.py

Two copies of an MLP with batch normalization (1.05 M parameters, batches of 64) train in turns of
an epoch, in the same processes with one thread each: one with virtual_size=, and one with
backward_passes_per_step=, as many as a rank has virtual ranks. A row has both medians in
milliseconds, on rank 0, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn
from workers import add_common_arguments, print_row, run_ranks

BATCH = 64
STEPS = 10  # of an epoch
EPOCHS = 6
WORLDS = ((1, 1), (1, 8), (2, 1), (2, 4))  # ranks, and virtual ranks of each


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--block", type=int, help="virtual ranks of a rank; by default four worlds")
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.block or 1, 2 if arguments.quick else EPOCHS)
        return 0
    worlds = [(arguments.np, arguments.block)] if arguments.block else WORLDS
    for ranks, block in worlds:
        passed_on = ["--quick"] * arguments.quick + ["--block", str(block)]
        status = run_ranks(__file__, ranks, arguments.output, passed_on)
        if status != 0:
            return status
    return 0


def make_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*[layer for layers in hidden for layer in layers], nn.Linear(512, 10))


def measure(block: int, epochs: int) -> None:
    """Run one rank, and print the row on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    size = hvd.size() * block
    data = torch.utils.data.TensorDataset(torch.randn(BATCH * size * STEPS, 512))
    virtual, ordinary = make_model(), make_model()
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options
        )
        for model, options in (
            (virtual, {"virtual_size": size}),
            (ordinary, {"backward_passes_per_step": block}),
        )
    ]
    sampler = hvd.VirtualBatchSampler(data, batch_size=BATCH, virtual_size=size)
    in_blocks = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    mine = hvd.DistributedSampler(data)
    in_turn = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=mine)
    times: tuple[list[float], list[float]] = ([], [])
    for epoch in range(epochs):
        begin = time.perf_counter()
        for step in optimizers[0].virtual_steps(in_blocks, epoch, virtual):
            optimizers[0].zero_grad()
            for (inputs,) in step:
                virtual(inputs).square().mean().backward()
            optimizers[0].step()
            begin = note(times[0], begin)
        batches = iter(in_turn)
        begin = time.perf_counter()
        for _ in range(STEPS):
            optimizers[1].zero_grad()
            for _ in range(block):
                ordinary(next(batches)[0]).square().mean().div(block).backward()
            optimizers[1].step()
            begin = note(times[1], begin)
    ours, theirs = (statistics.median(one[STEPS:]) for one in times)
    if hvd.rank() == 0:
        row = {"benchmark": "virtual_ranks", "np": hvd.size(), "block": block}
        row |= {"virtual_ms": round(ours, 2), "ordinary_ms": round(theirs, 2)}
        print_row({**row, "ratio": round(ours / theirs, 3)})
    hvd.shutdown()


def note(times: list[float], begin: float) -> float:
    """Note the milliseconds since `begin`; return the time now."""
    now = time.perf_counter()
    times.append((now - begin) * 1e3)
    return now


if __name__ == "__main__":
    raise SystemExit(main())
