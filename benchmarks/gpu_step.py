"""Measure what communication adds to a training step on a GPU, for hvdlite and torch's DDP.

    python benchmarks/gpu_step.py --np 1
    python benchmarks/gpu_step.py --np 2
    python benchmarks/gpu_step.py --np 2 --device cpu --small

There are two models: a ResNet of 50 layers (25.6 M parameters in 161 tensors) and a small
transformer (200 tensors). Copies of each model train in turns of a few steps, in the same
processes: `bare` does not communicate, `hvdlite` uses hvd.DistributedOptimizer, `views` also
gradient_as_bucket_view=True, `kept` is like `views` with gradients that stay allocated
(zero_grad(set_to_none=False)), and `ddp` is torch's DistributedDataParallel.

`host_ms` is how long a step keeps the host busy, and `step_ms` how long it takes until the device
has finished; both are medians on the slowest rank. `kernels` is how many kernels one step launches.
`pack_us` is the time in which the core's kernels move all gradients once, as tensors of one grouped
allreduce, and `copy_us` the time in which the device copies as many bytes. On CPUs the last three
are null.

If a machine has one GPU, two ranks share it, and NCCL runs over sockets. Then `step_ms` says little
about real machines; the times of the host, the kernels and the copies are still meaningful.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as gloo
from step import Contestant, with_views
from step_models import GPU_MODELS, SMALL_MODELS, Batch
from torch import nn
from torch.autograd import DeviceType
from turns import join_gloo, slowest
from workers import add_common_arguments, print_row, run_ranks

ROUNDS, STEPS_PER_TURN = 8, 10
QUICK_ROUNDS, QUICK_STEPS_PER_TURN = 1, 2
OUR_KERNELS = ("hvdlite_copy_", "hvdlite_cast_")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models for a smoke run on CPUs")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here; use --device cpu")
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick + ["--small"] * arguments.small
        passed_on += ["--device", arguments.device]
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    measure_all(arguments)
    return 0


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: measure every model, and print the rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    if arguments.device == "cuda" and torch.cuda.device_count() < hvd.local_size():
        share_gpu(hvd.rank())
    join_gloo(arguments.store, hvd.rank(), hvd.size(), with_nccl=arguments.device == "cuda")
    device = torch.device(arguments.device)
    models = SMALL_MODELS if arguments.small else GPU_MODELS
    for name, (make_model, make_batch) in models.items():
        contestants = make_contestants(make_model, device)
        inputs, labels = make_batch()
        batch = inputs.to(device), labels.to(device)
        row = {
            "benchmark": "gpu_step",
            "model": name,
            "np": hvd.size(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            **sizes(contestants["bare"].model),
            **measure_steps(contestants, batch, arguments.quick),
            **count_kernels(contestants, batch),
            **measure_pack(contestants["bare"].model),
        }
        if hvd.rank() == 0:
            print_row(row)
    gloo.destroy_process_group()
    hvd.shutdown()


def share_gpu(rank: int) -> None:
    """Set variables with which NCCL runs several ranks on one GPU, as if each had its own host."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        os.environ[name] = "1"
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")


def make_contestants(
    make_model: Callable[[], nn.Module], device: torch.device
) -> dict[str, Contestant]:
    """Build the copies, with equal parameters on all ranks."""
    import hvdlite.torch as hvd

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    torch.manual_seed(0)
    bare, ours = make_model().to(device), make_model().to(device)
    theirs = nn.parallel.DistributedDataParallel(make_model().to(device), **leave_buffers_alone())
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    distributed = hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters())
    return {
        "bare": Contestant(bare, sgd(bare), lambda: None),
        "hvdlite": Contestant(ours, distributed, lambda: None),
        "ddp": Contestant(theirs, sgd(theirs), lambda: None),
        **with_views(lambda: make_model().to(device), sgd),
    }


def leave_buffers_alone() -> dict[str, bool]:
    """Return DDP's option that it sends no buffers, like hvdlite; torch has renamed the option."""
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    newer = "forward_sync_buffers" in parameters
    return {"forward_sync_buffers" if newer else "broadcast_buffers": False}


def sizes(model: nn.Module) -> dict[str, int]:
    parameters = list(model.parameters())
    return {"tensors": len(parameters), "parameters": sum(each.numel() for each in parameters)}


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure_steps(
    contestants: dict[str, Contestant], batch: Batch, quick: bool
) -> dict[str, float]:
    """Let the contestants take turns; all ranks call this and get figures of the slowest rank."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    steps = QUICK_STEPS_PER_TURN if quick else STEPS_PER_TURN
    host: dict[str, list[float]] = {name: [] for name in contestants}
    whole: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(1 + rounds):
        for name, contestant in contestants.items():
            contestant.step(batch)  # The first one warms up.
            wait_for_device()
            slowest([0.0])  # This is a barrier over gloo, whatever else the group has.
            begin = time.perf_counter_ns()
            times = [contestant.step(batch) for _ in range(steps)]
            wait_for_device()
            if round_number > 0:
                host[name] += times
                whole[name].append((time.perf_counter_ns() - begin) / 1e6 / steps)
    row = {}
    for name in contestants:
        medians = [statistics.median(host[name]), statistics.median(whole[name])]
        row[f"{name}_host_ms"], row[f"{name}_step_ms"] = (round(ms, 3) for ms in slowest(medians))
    return row


def kernels_of(work: Callable[[], Any]) -> list[Any]:
    """List the kernels that the device ran for some work, in torch.profiler's events."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    wait_for_device()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        wait_for_device()
    return [
        event
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        and not getattr(event, "is_user_annotation", False)
    ]


def count_kernels(contestants: dict[str, Contestant], batch: Batch) -> dict[str, int | None]:
    """Count the kernels that one step of each contestant launches; None on CPUs."""
    counts: dict[str, int | None] = {}
    for name, contestant in contestants.items():
        on_gpu = batch[0].is_cuda
        counts[f"{name}_kernels"] = (
            len(kernels_of(lambda one=contestant: one.step(batch))) if on_gpu else None
        )
        if not on_gpu:
            contestant.step(batch)
    return counts


def measure_pack(model: nn.Module) -> dict[str, float | None]:
    """Time the core's kernels for all gradients as one group, and a copy of as many bytes."""
    import hvdlite.torch as hvd

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    hvd.grouped_allreduce(gradients, op=hvd.Sum)
    if not gradients[0].is_cuda:
        return {"pack_us": None, "copy_us": None, "pack_speed_to_copy": None}
    source = torch.cat([gradient.flatten() for gradient in gradients])
    target = torch.empty_like(source)
    passes = 1 if hvd.size() == 1 else 2  # Alone from input to output, else by way of the buffer.
    packs, copies = [], []
    for _ in range(10):
        kernels = kernels_of(lambda: hvd.grouped_allreduce(gradients, op=hvd.Sum))
        ours = [one for one in kernels if one.name.startswith(OUR_KERNELS)]
        packs.append(sum(one.time_range.elapsed_us() for one in ours) / passes)
        copies.append(time_copy(source, target))
    pack_us, copy_us = statistics.median(packs), statistics.median(copies)
    speed = round(copy_us / pack_us, 3) if pack_us else None
    return {
        "pack_us": round(pack_us, 1),
        "copy_us": round(copy_us, 1),
        "pack_speed_to_copy": speed,
    }


def time_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the microseconds in which the device copies a tensor."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1000)


if __name__ == "__main__":
    sys.exit(main())
