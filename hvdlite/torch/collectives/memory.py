"""Tensors as bytes, and bytes as tensors, without copies and without NumPy.

Torch works where NumPy is not installed, and `Tensor.numpy()` does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_over(memory: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose values are these bytes, without a copy."""
    if not len(memory):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).reshape(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; they keep its memory alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.storage = tensor.untyped_storage()
    return memoryview(memory).cast("B")
