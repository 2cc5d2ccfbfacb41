"""Compression of TensorFlow tensors: they travel as a narrower floating-point type."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.compression import Compressor, NoneCompressor

WIDE = (tf.float32, tf.float64)


class _CastCompressor(Compressor):
    """Sends float32 and float64 as `wire`, and other dtypes unchanged."""

    wire: str

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the cast tensor, and the dtype to return to."""
        if tensor.dtype in WIDE:
            return tf.cast(tensor, cls.wire), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Cast back."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends float16: three more digits than bfloat16, but values beyond 65504 overflow."""

    wire = "float16"


class BF16Compressor(_CastCompressor):
    """Sends bfloat16: the range of float32 with two to three decimal digits."""

    wire = "bfloat16"


class Compression:
    """The compressors that come with hvdlite.

    Example:
        >>> wire, ctx = Compression.fp16.compress(tf.ones(2))
        >>> wire.dtype, Compression.fp16.decompress(wire, ctx).dtype
        (tf.float16, tf.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
