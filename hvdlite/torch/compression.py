"""Compression of torch tensors: they travel as a narrower floating-point type."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.compression import Compressor, NoneCompressor

WIDE = (torch.float32, torch.float64)


class _CastCompressor(Compressor):
    """Sends float32 and float64 as `wire`, and other dtypes unchanged."""

    wire: str

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the cast tensor, and the dtype to return to."""
        if tensor.dtype in WIDE:
            return tensor.to(getattr(torch, cls.wire)), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Cast back."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends float16: three more digits than bfloat16, but values beyond 65504 overflow."""

    wire = "float16"


class BF16Compressor(_CastCompressor):
    """Sends bfloat16: the range of float32 with two to three decimal digits."""

    wire = "bfloat16"


class Compression:
    """The compressors that come with hvdlite.

    Example:
        >>> wire, ctx = Compression.fp16.compress(torch.ones(2))
        >>> wire.dtype, Compression.fp16.decompress(wire, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
