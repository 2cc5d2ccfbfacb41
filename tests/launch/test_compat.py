"""Scripts that import horovod run under hvdlite-run --compat, and fail without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import base_environment
from launch.marked import python
from launcher import run_launcher

TORCH = """
import horovod
import horovod.torch as hvd
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import rank, size
import torch
import hvdlite, hvdlite.torch, hvdlite.errors

assert hvd is hvdlite.torch is horovod.torch
assert hvd.__name__ == hvd.__spec__.name == "hvdlite.torch"
assert HorovodInternalError is hvdlite.errors.HorovodInternalError
assert HostsUpdatedInterrupt is hvdlite.errors.HostsUpdatedInterrupt
assert hvd.elastic is horovod.torch.elastic is hvdlite.torch.elastic
assert TorchState is hvd.elastic.TorchState and issubclass(TorchState, ObjectState)
assert horovod.__version__ == "0.28.1" != hvdlite.__version__  # scripts compare it
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert all((param.grad == 0).all() for param in model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
total = hvd.allreduce(torch.tensor(float(rank())), op=hvd.Sum)
print(size(), total.item(), f"{model.weight.sum().item():.9f}")
"""


def run(code: str, np: int = 2, **env: str) -> list[str]:
    result = run_launcher("-np", str(np), "--compat", *python(code), env=env)
    assert result.returncode == 0, result.stderr
    return [line.partition("] ")[2] for line in sorted(result.stdout.splitlines())]


def test_script_for_horovod_trains() -> None:
    first, second = run(TORCH)
    assert first == second
    assert first.startswith("2 ")


MISSING_MODULES = {
    "horovod.mxnet": "hvdlite has no horovod.mxnet: MXNet is retired",
    "horovod.spark.keras": "hvdlite has no horovod.spark.keras: there are no estimators",
    "horovod.ray.elastic": "hvdlite has no horovod.ray.elastic: elastic jobs on Ray are run by",
    "horovod.data": "hvdlite has no horovod.data: the loaders of PyTorch",
    "horovod.common.util": "hvdlite has no horovod.common.util: it serves Horovod's own",
    "horovod.runner.common": "hvdlite has no horovod.runner.common: it is a part of",
    "horovod.runner.elastic.x": "hvdlite has no horovod.runner.elastic: it is a part of",
    "horovod.nothing": "No module named 'horovod.nothing'",
    "horovod.common.nothing": "No module named 'horovod.common.nothing'",
}
MISSING_NAMES = {
    ("horovod.ray", "ElasticRayExecutor"): "elastic jobs on Ray are run by hvdlite.ray.run",
    ("horovod.spark", "run_elastic"): "the ranks of hvdlite.spark.run are fixed",
    ("horovod.spark", "nothing"): "cannot import name 'nothing' from 'hvdlite.spark'",
}


def test_modules_and_names_that_are_not_there() -> None:
    missing = [f"import {module}" for module in MISSING_MODULES]
    missing += [f"from {module} import {name}" for module, name in MISSING_NAMES]
    code = "".join(
        f"try: {statement}\n"
        f"except ImportError as error: print({number}, type(error).__name__, error)\n"
        for number, statement in enumerate(missing, 10)
    )
    lines = run(code, np=1)
    assert len(lines) == len(missing)
    for line, message in zip(lines, MISSING_MODULES.values(), strict=False):
        assert line.split(maxsplit=1)[1].startswith(f"ModuleNotFoundError {message}")
    for line, message in zip(lines[len(MISSING_MODULES) :], MISSING_NAMES.values(), strict=True):
        assert message in line


def test_variables_of_horovod_are_honoured() -> None:
    code = (
        "import os; from hvdlite import _core; values = _core.knob_values();"
        "print(*(values[name] for name in"
        " ('fusion_threshold', 'cache_capacity', 'average_over_joined')),"
        " os.environ.get('HVDLITE_STALL_WARNING'))"
    )
    knobs = {"HOROVOD_FUSION_THRESHOLD": "4096", "HOROVOD_CACHE_CAPACITY": "3"}
    # Averages divide by all ranks, as Horovod's do.
    assert run(code, np=1, **knobs, HOROVOD_STALL_CHECK_DISABLE="1") == ["4096 3 1 0"]
    own = {"HVDLITE_AVERAGE_OVER_JOINED": "0", "HOROVOD_STALL_CHECK_DISABLE": "0"}
    assert run(code, np=1, **knobs, **own) == ["4096 3 0 None"]


def test_run_of_horovod() -> None:
    code = """
import horovod, horovod.runner
from hvdlite.errors import ArgumentError
def number(plus):
    import horovod.common.exceptions
    from hvdlite import basics
    basics.init()
    return basics.rank() + plus
assert horovod.runner.run is horovod.run
print(horovod.run(number, args=(5,), num_proc=2, use_gloo=True))
for interfaces in ({"network_interface": "lo"}, {"network_interfaces": ["lo"]}):
    print(horovod.run(number, args=(5,), np=2, **interfaces))
try: horovod.run(number, min_np=2)
except ArgumentError as error: print(error)
"""
    lines = run(code, np=1)
    assert lines == [
        *["[5, 6]"] * 3,
        "min-np 2 is more than np 1, with which the job starts",
    ]


def test_without_the_flag_there_is_no_horovod(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import hvdlite, horovod"],
        env=base_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'horovod'" in done.stderr
