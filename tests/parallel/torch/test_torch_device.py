"""The choice of a rank's GPU: torch's own code with a fake of the CUDA runtime below it."""

from __future__ import annotations

from typing import Any

from harness import run_world

PRELOAD = ("torch._dynamo",)


class Runtime:
    """Replaces torch.cuda's functions in libtorch_cuda, in a process that has not used CUDA."""

    def __init__(self, gpus: int, current: int = 0) -> None:
        import torch

        self.torch: Any = torch
        self.current, self.contexts = current, list[int]()
        for name, function in {
            "_cuda_init": lambda: None,
            "_cuda_getDeviceCount": lambda: gpus,
            "_cuda_getDevice": lambda: self.current,
            "_cuda_setDevice": self.set_device,
            "_cuda_isInBadFork": False,
        }.items():
            setattr(torch._C, name, function)
        torch.version.cuda = None  # So torch does not ask for capabilities.
        self.torch.cuda._cudart = self
        self.torch.cuda._is_compiled = lambda: True
        self.torch.cuda._initialized = False
        self.torch.cuda._cached_device_count = None

    def set_device(self, device: int) -> None:
        self.torch.cuda._lazy_init()
        self.current = device
        self.contexts.append(device)  # CUDA 12 creates a context here.


def first_use(gpus: int, current: int = 0) -> tuple[int, list[int]]:
    """Return the current device at a script's first use, and the devices with contexts."""
    import torch

    runtime = Runtime(gpus, current)
    return torch.cuda.current_device(), runtime.contexts


def choose(device: int) -> int:
    import torch

    Runtime(4)
    torch.cuda.set_device(device)
    return torch.cuda.current_device()


def reduce_on_cpus() -> tuple[bool, list[int]]:
    import torch

    import hvdlite.torch as hvd

    runtime = Runtime(4)
    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")
    return torch.cuda.is_initialized(), runtime.contexts


def cases() -> dict[str, Any]:
    import torch

    import hvdlite.torch as hvd

    found: dict[str, Any] = {"before init": first_use(4)}
    hvd.init()
    found["after init, used before"] = torch.cuda.current_device()
    hvd.shutdown()
    found["CPUs only"] = reduce_on_cpus()
    found["four"] = first_use(4)
    found["set_device"] = choose(3)
    found["local_rank"] = choose(hvd.local_rank())
    found["one is visible"] = first_use(1)
    found["two"] = first_use(2)
    found["another library chose"] = first_use(4, current=2)
    hvd.shutdown()
    found["after shutdown"] = first_use(4)
    return found


def test_each_rank_takes_the_gpu_of_its_local_rank_unless_somebody_chose() -> None:
    for rank, result in enumerate(run_world(3, cases)):
        own = (rank, [rank] if rank else [])
        assert result.value == {
            "before init": (0, []),
            "after init, used before": 0,
            "CPUs only": (False, []),
            "four": own,
            "set_device": 3,
            "local_rank": rank,
            "one is visible": (0, []),
            "two": (rank % 2, [1] if rank == 1 else []),
            "another library chose": (2, []),
            "after shutdown": (0, []),
        }
