"""The interface of compressors, which change tensors before a reduction and back after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite import ops


class Compressor:
    """Base class of compressors; subclass it and pass the class or an object as `compression=`.

    Ranks reduce the compressed tensor, so a reduction of it must make sense: its dtype and shape
    are the same on every rank, and a compressed zero is a zero.

    A class whose `compress` only casts float32 and float64 to "float16" or "bfloat16" may name that
    dtype in a class attribute `wire`: the core then casts while it copies. A subclass does not
    inherit `wire`, since its `compress` may do more.

    Example:
        >>> class Halving(Compressor):
        ...     @staticmethod
        ...     def compress(tensor):
        ...         return tensor / 2, None
        ...
        ...     @staticmethod
        ...     def decompress(tensor, ctx):
        ...         return tensor * 2
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context that `decompress` receives on this rank.

        Args:
            tensor: this rank's input, of the adapter's framework.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return what the caller receives for the reduced tensor.

        Args:
            tensor: the result, of the shape and dtype that `compress` returned.
            ctx: what `compress` returned besides.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class CastCompressor(Compressor):
    """Sends float32 and float64 as `wire`, everything else as it is."""

    # Each framework has a subclass that says how it casts, and subclasses of that subclass say to
    # what.

    wide: tuple[Any, ...]  # These are the framework's float32 and float64.
    wire: str

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return a tensor as one of `dtype`: a type of the framework, or the name of one."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the cast tensor, and the dtype to return to."""
        if tensor.dtype in cls.wide:
            return cls.cast(tensor, cls.wire), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Cast back."""
        return tensor if ctx is None else cls.cast(tensor, ctx)


CAST_TYPES = ("float32", "float64")  # The core can cast these.


def travels_as(cast: int | None, dtype: str) -> int | None:
    """Return the core's number of the dtype as which `dtype` travels; None: as it is."""
    # `cast` is what `cast_in_core` returned.
    return cast if dtype in CAST_TYPES else None


def cast_in_core(compression: Any, op: int) -> tuple[int | None, Any]:
    """Split a compression into the cast that the core does and the compressor left to call."""
    # For a mere cast the result is the core's number of a dtype, for `travels_as`, and a compressor
    # that does nothing; otherwise, and for Adasum, None and the compression itself.
    kind = compression if isinstance(compression, type) else type(compression)
    wire = vars(kind).get("wire")
    if wire is None or op == ops.Adasum:
        return None, compression
    return ops.dtype_number(wire), NoneCompressor


def send_compressed(
    send: Callable[[list[Any]], Sequence[Any]], tensors: Sequence[Any], compression: Any
) -> list[Any]:
    """Compress tensors, pass them to `send`, and decompress the results that `send` returns."""
    packed = [compression.compress(tensor) for tensor in tensors]
    results = send([wire for wire, _ in packed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]
