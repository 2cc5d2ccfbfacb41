"""Compression of torch tensors: they travel as a narrower type."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.ops import CastCompressor, NoneCompressor


class _Cast(CastCompressor):
    wide = (torch.float32, torch.float64)

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


class FP16Compressor(_Cast):
    wire = "float16"


class BF16Compressor(_Cast):
    wire = "bfloat16"


class Compression:
    """The compressors that come with hvdlite: give one as `compression=`.

    Attributes:
        none: sends tensors as they are.
        fp16: sends float32 and float64 as float16; values beyond 65504 overflow.
        bf16: sends them as bfloat16: the range of float32 with two to three decimal digits.

    Example:
        >>> wire, ctx = Compression.fp16.compress(torch.ones(2))
        >>> wire.dtype, Compression.fp16.decompress(wire, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
