"""Compression of torch tensors: they travel as a narrower type."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import compression as neutral
from hvdlite.compression import CastCompressor, Compressor, NoneCompressor
from hvdlite.errors import ArgumentError
from hvdlite.modes import Mode


class _Cast(CastCompressor):
    wide = (torch.float32, torch.float64)

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


class FP16Compressor(_Cast):
    """Sends float16: three more digits than bfloat16, but values beyond 65504 overflow."""

    wire = "float16"


class BF16Compressor(_Cast):
    """Sends bfloat16: the range of float32 with two to three decimal digits."""

    wire = "bfloat16"


BLOCK = 256  # So many numbers share one scale.


class BlockCompressor(Compressor):
    """Packs blocks of 256 numbers as small integers, scaled by the block's largest magnitude."""

    # Sums of packed numbers have no meaning, so `hvd.LocalSGD` and `hvd.DiLoCo` unpack, sum, and
    # pack again.

    bits: int

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Raise an error, because packed numbers cannot be reduced."""
        raise ArgumentError(
            "Compression.int4 is for the rounds of hvd.LocalSGD and hvd.DiLoCo; compress gradients "
            "with Compression.int8 or Compression.bf16"
        )

    @classmethod
    def pack(cls, numbers: torch.Tensor) -> torch.Tensor:
        """Pack a flat float32 tensor into one row of bytes for each block: scale and numbers."""
        padding = -numbers.numel() % BLOCK
        padded = torch.nn.functional.pad(numbers, (0, padding))
        blocks = padded.view(padded.numel() // BLOCK, BLOCK)
        most = 2 ** (cls.bits - 1) - 1
        # A block with an infinity or NaN is unpacked as infinities or NaN.
        scales = blocks.abs().amax(1, keepdim=True) / most
        small = (blocks / scales.where(scales != 0, 1.0)).round().clamp(-most, most)
        if cls.bits == 8:
            packed = small.to(torch.int8).view(torch.uint8)
        else:
            halves = (small + 8).nan_to_num(0).to(torch.uint8)
            packed = halves[:, ::2] | halves[:, 1::2] << 4
        heads = scales.reshape(-1).view(torch.uint8).view(len(blocks), 4)
        return torch.cat([heads, packed], dim=1)

    @classmethod
    def unpack(cls, rows: torch.Tensor) -> torch.Tensor:
        """Undo `pack`; the padding of the last block is still there."""
        scales = rows[:, :4].reshape(-1).view(torch.float32).view(len(rows), 1)
        packed = rows[:, 4:].contiguous()
        if cls.bits == 8:
            small = packed.view(torch.int8).float()
        else:
            small = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, BLOCK).float() - 8
        return (small * scales).reshape(-1)


class Int8Compressor(BlockCompressor):
    """Sends 260 bytes for 256 numbers.

    In an allreduce, of gradients and by `hvd.allreduce`, the core packs what travels between hosts,
    see `hvdlite.compression.Int8Compressor`. In rounds of `hvd.LocalSGD` and `hvd.DiLoCo` each rank
    packs what it sends to other ranks, in the same way.
    """

    bits = 8
    mode = Mode.INT8
    wire = neutral.Int8Compressor.wire

    compress = staticmethod(neutral.Int8Compressor.compress)


class Int4Compressor(BlockCompressor):
    """Sends 132 bytes for 256 numbers, in rounds of `hvd.LocalSGD` and `hvd.DiLoCo`."""

    bits = 4
    mode = Mode.INT4


class Compression:
    """The compressors that come with hvdlite: give one as `compression=`.

    Attributes:
        none: sends tensors as they are.
        fp16: sends float32 and float64 as float16; values beyond 65504 overflow.
        bf16: sends them as bfloat16: the range of float32 with two to three decimal digits.
        int8: sends 260 bytes for 256 numbers between hosts, for averages and sums.
        int4: sends 132 bytes for 256 numbers, in rounds of `LocalSGD` and `DiLoCo` alone.

    Example:
        >>> wire, ctx = Compression.fp16.compress(torch.ones(2))
        >>> wire.dtype, Compression.fp16.decompress(wire, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
