"""Chooses the GPU of this rank: that of its local rank, unless the script has chosen one.

PyTorch's default is GPU 0 in every process. All GPUs stay visible, because NCCL reaches the GPUs of
its peers best when it sees them, and because scripts rely on `local_rank` being an index.
"""

from __future__ import annotations

import torch

from hvdlite import basics


def take_own_gpu() -> None:
    """Make the GPU of `local_rank` the current one when this process first uses CUDA, if ever."""
    # A script chooses by using CUDA before `init`, by `torch.cuda.set_device` at any time, by
    # indices as in "cuda:1", or if the process sees one GPU only. CUDA has a current device per
    # thread; this function sets that of the thread which uses CUDA first.
    if not torch.cuda.is_initialized():
        # torch queues such calls, like its seeding, for the moment when it initialises CUDA. A
        # script that uses no GPU never initialises CUDA, and gets no context on any GPU.
        torch.cuda._lazy_call(_take_it)


def _take_it() -> None:
    if not basics.is_initialized():
        return
    own = basics.local_rank() % torch.cuda.device_count()
    if own != 0 and torch.cuda.current_device() == 0:
        torch.cuda.set_device(own)
