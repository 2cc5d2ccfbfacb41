"""Compression of TensorFlow tensors: they travel as a narrower floating-point type."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.ops import CastCompressor, NoneCompressor


class _Cast(CastCompressor):
    wide = (tf.float32, tf.float64)

    @staticmethod
    def cast(tensor: tf.Tensor, dtype: Any) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """Sends float16: three more digits than bfloat16, but values beyond 65504 overflow."""

    wire = "float16"


class BF16Compressor(_Cast):
    """Sends bfloat16: the range of float32 with two to three decimal digits."""

    wire = "bfloat16"


class Compression:
    """The compressors that come with hvdlite: give one as `compression=`.

    Attributes:
        none: sends tensors as they are.
        fp16: sends float32 and float64 as float16; values beyond 65504 overflow.
        bf16: sends them as bfloat16: the range of float32 with two to three decimal digits.

    Example:
        >>> wire, ctx = Compression.fp16.compress(tf.ones(2))
        >>> wire.dtype, Compression.fp16.decompress(wire, ctx).dtype
        (tf.float16, tf.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
