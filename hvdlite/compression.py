"""The interface of compression: what happens to a tensor before it is sent, and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite import ops


class Compressor:
    """Base of compressors; subclass it and pass the class or an object as `compression=`.

    The compressed tensor is what ranks reduce, so reduction must make sense on it: its dtype and
    shape are the same on every rank, and a compressed zero is a zero.

    A class whose `compress` does nothing but cast float32 and float64 to "float16" or "bfloat16"
    may say so as `wire`: an allreduce then casts in the core, along with its copies. That is not
    inherited, since a subclass may do more.

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
        """Return the tensor to send, and a context that `decompress` receives on this rank."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return what the caller receives for the reduced tensor."""
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
    """Sends float32 and float64 as `wire`, everything else as it is.

    Each framework has a subclass that says how it casts, and subclasses of that say to what.
    """

    wide: tuple[Any, ...]  # the framework's float32 and float64
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


def cast_in_core(compression: Any, op: int) -> tuple[int | None, Any]:
    """Split a compression: what an allreduce casts to by itself, and what is left to do.

    Returns:
        The core's number of the dtype that float32 and float64 travel as, and the compressor to
        call; None and the compression itself where it is more than a cast, or for Adasum.
    """
    kind = compression if isinstance(compression, type) else type(compression)
    wire = vars(kind).get("wire")
    if wire is None or op == ops.Adasum:
        return None, compression
    return ops.dtype_number(wire), NoneCompressor


def send_compressed(
    send: Callable[[list[Any]], Sequence[Any]], tensors: Sequence[Any], compression: Any
) -> list[Any]:
    """Compress tensors, `send` what came of them, and decompress what it returns for each."""
    packed = [compression.compress(tensor) for tensor in tensors]
    results = send([wire for wire, _ in packed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]
