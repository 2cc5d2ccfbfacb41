"""The fast path: collectives of ordinary tensors in host memory, in one call of the core.

A submission in Python takes any tensor and any argument, and costs ten times what the engine needs
for a small tensor. The public functions of `allreduce` and `broadcast` ask here first. The core
(csrc/python/fast_path.cc) takes the call if it is plain: contiguous tensors of the class
torch.Tensor in host memory that do not require a gradient, without a weight, a compression or a
torch dispatch mode. Otherwise these functions return None without any effect, and the caller goes
on as if there were no fast path. Both ways have the same results and errors.

The core reads tensors through DLPack's C exchange interface. Torch releases without this interface
have no fast path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdlite import _core, basics
from hvdlite.ops import next_name
from hvdlite.process_sets import global_process_set, member_id
from hvdlite.torch.collectives.tensors import raise_moved

# The core numbers the ways in which a public function returns its result. From NEW on it blocks.
NEW_ASYNC = 0  # It returns a handle of a new tensor.
IN_PLACE_ASYNC = 1  # It returns a handle of the same tensor.
NEW = 2
IN_PLACE = 3
OVERWRITING = (IN_PLACE_ASYNC, IN_PLACE)

# These take the arguments of the public functions by position. They return the result, or, of the
# forms with a handle, the core's handle and a function that makes the result when it has completed.
# allreduce(tensor or list, average, name, op, prescale, postscale, process_set, form)
allreduce: Callable[..., Any] = _core.fast_path.allreduce
# broadcast(tensor, root_rank, name, process_set, form)
broadcast: Callable[..., Any] = _core.fast_path.broadcast
# barrier(process_set, name) returns True when all ranks have called it.
barrier: Callable[..., Any] = _core.fast_path.barrier
# read_gradients(params, tensors) lets each of the core's tensors say where the gradient of its
# parameter lies. It returns None unless all gradients are plain, and of the tensors' dtypes and
# shapes; otherwise an object that keeps their memory alive and has them as `gradients`. Its
# `first_changed()` returns the position of the first one that the script replaced or wrote
# meanwhile, or -1.
read_gradients: Callable[..., Any] = _core.fast_path.read_gradients


_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_increment_version = getattr(torch._C, "_increment_version", None)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
if _exchange and _increment_version and _dispatch_modes:
    _core.fast_path.install(
        exchange=_exchange,
        tensor_type=torch.Tensor,
        dispatch_modes=_dispatch_modes,
        increment_version=_increment_version,
        empty_like=torch.empty_like,
        engine=basics.engine,
        world_set=global_process_set,
        member_id=member_id,
        next_name=next_name,
        raise_moved=raise_moved,
    )
