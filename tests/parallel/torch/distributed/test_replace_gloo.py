"""Programs that name gloo, unchanged, over hvdlite: `hvdlite-run --replace-gloo`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import base_environment

HVDLITE_RUN = [sys.executable, "-m", "hvdlite.launch", "--replace-gloo", "-np"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
REPLACED = {"HVDLITE_REPLACE_GLOO": "1"}
SAID = "hvdlite: torch.distributed's backend gloo is hvdlite"

# It knows nothing of hvdlite. Sums of two numbers have the same bits over both.
PROGRAM = """
import functools, json, pathlib, sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
found = {"backend": dist.get_backend(), "gloo": dist.is_gloo_available()}


def numbers(name, tensors):
    found[name] = [one.detach().double().flatten().tolist() for one in tensors]


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def train(name, model, make=torch.optim.SGD, around=lambda model: model):
    optimizer, call = make(model.parameters(), lr=0.1), around(model)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        call(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    state = model.state_dict()
    numbers(name, [one.full_tensor() if "fsdp" in name else one for one in state.values()])
    return state


group = dist.new_group([0, 1])
found["group"] = dist.get_backend(group)
with torch.profiler.profile() as profile:
    total = torch.arange(5.0) + rank
    dist.all_reduce(total)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group, async_op=True).wait()
    dist.barrier()
found["events"] = sorted(one.name for one in profile.events() if one.name.startswith("gloo:"))
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
found["objects"] = objects
received, other = torch.zeros(1), 1 - rank
pair = [dist.P2POp(dist.isend, torch.tensor([7.0 + rank]), other)]
for work in dist.batch_isend_irecv([*pair, dist.P2POp(dist.irecv, received, other)]):
    work.wait()
sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,), check_invariants=True)
dist.all_reduce(sparse)
numbers("collectives", [total, *parts, received, sparse.to_dense()])
train("ddp", DistributedDataParallel(make_model()))
sharded = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
train("zero", DistributedDataParallel(make_model()), sharded)
compiled = lambda model: torch.compile(model, backend="eager")
train("compiled", DistributedDataParallel(make_model()), around=compiled)
state = train("fsdp", fully_shard(make_model(), mesh=dist.init_device_mesh("cpu", (size,))))
dcp.save(state, checkpoint_id=folder / "state")
for one in state.values():
    torch.nn.init.zeros_(one)
dcp.load(state, checkpoint_id=folder / "state")
numbers("loaded", [one.full_tensor() for one in state.values()])
dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
last = dist.new_group()
if rank == 0:
    try:
        dist.monitored_barrier(last, timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        found["missing"] = "1 failed to pass monitoredBarrier" in str(error)
dist.barrier()
(folder / f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""

# The error does not wait for another rank.
FROM_ANY = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.recv(torch.zeros(1))
"""


def run(program: str, folder: Path, command: list[str], **variables: str) -> Any:
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(program)
    return subprocess.run(
        [*command, str(script), str(folder)],
        env={**base_environment(), "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def results(folder: Path, command: list[str], **variables: str) -> list[Any]:
    done = run(PROGRAM, folder, [*command, "2"], **variables)
    assert done.returncode == 0, done.stderr
    expected = int(bool(variables) or "--replace-gloo" in command)
    assert done.stderr.count(SAID) + done.stdout.count(SAID) == expected, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_program_finds_what_it_finds_over_gloo(tmp_path: Path) -> None:
    over_gloo = results(tmp_path / "gloo", TORCHRUN)
    assert over_gloo[0]["missing"]
    assert over_gloo[0]["events"] == ["gloo:all_gather", "gloo:all_reduce", "gloo:barrier"]
    assert over_gloo[0]["loaded"] == over_gloo[0]["fsdp"]
    assert results(tmp_path / "hvdlite-run", HVDLITE_RUN) == over_gloo
    assert results(tmp_path / "torchrun", TORCHRUN, **REPLACED) == over_gloo


def test_recv_from_any_rank_names_the_flag_to_drop(tmp_path: Path) -> None:
    done = run(FROM_ANY, tmp_path / "any", [*HVDLITE_RUN, "1"])
    assert done.returncode != 0
    assert "without --replace-gloo (HVDLITE_REPLACE_GLOO)" in done.stderr + done.stdout
