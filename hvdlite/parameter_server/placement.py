"""Which server holds what: whole tensors go to the least loaded one, and large ones by rows.

Every process computes the placement from the tensors alone, so nobody has to be told.

Example:
    >>> specs = [TensorSpec("table", "float32", (1 << 20,)), TensorSpec("bias", "float32", (8,))]
    >>> [(one.tensor, one.server, one.first, one.rows) for one in place(specs, servers=2)]
    [(0, 0, 0, 524288), (0, 1, 524288, 524288), (1, 0, 0, 8)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.parameter_server.tensors import TensorSpec

# Vector instructions may round the last elements of a tensor otherwise than those before them. So
# parts consist of whole vectors, and are updated to the same bits as the whole tensor.
_VECTOR_ELEMENTS = 64
_LEAST_SPLIT_BYTES = 256 << 10  # Smaller tensors are not worth more than one server.


@dataclass(frozen=True)
class Part:
    """Rows of one tensor that one server holds."""

    tensor: int  # This is the index of the tensor in its collection.
    spec: TensorSpec  # It describes the whole tensor.
    server: int  # This is the index of the server.
    first: int  # The rows begin with this one.
    rows: int  # A tensor that is not split has all its rows here.
    servers: int  # The collection is placed on so many servers.

    @property
    def nbytes(self) -> int:
        """The number of bytes of these rows."""
        return self.rows * self.spec.row_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows as a tensor."""
        return (self.rows, *self.spec.shape[1:]) if self.spec.shape else ()


def place(specs: Sequence[TensorSpec], servers: int) -> list[Part]:
    """Place the tensors of a collection; the parts stand in the order of tensors and rows."""
    # A tensor is split evenly over all servers if it has more than half of a server's even share of
    # the bytes, and at least 256 KiB.
    share = sum(one.nbytes for one in specs) / servers
    load = [0] * servers
    parts: list[list[Part]] = [[] for _ in specs]
    whole = []
    for index, spec in enumerate(specs):
        large = spec.nbytes >= max(_LEAST_SPLIT_BYTES, share / 2) and spec.rows >= servers
        if servers == 1 or not large:
            whole.append(index)
            continue
        bounds = _bounds(spec, servers)
        for server, (first, end) in enumerate(itertools.pairwise(bounds)):
            parts[index].append(Part(index, spec, server, first, end - first, servers))
            load[server] += parts[index][-1].nbytes
    for index in sorted(whole, key=lambda one: (-specs[one].nbytes, one)):
        server = load.index(min(load))
        parts[index].append(Part(index, specs[index], server, 0, specs[index].rows, servers))
        load[server] += specs[index].nbytes
    return [part for some in parts for part in some]


def _bounds(spec: TensorSpec, servers: int) -> list[int]:
    """Return where the rows of each server begin, and where the last ones end."""
    elements = max(1, math.prod(spec.shape[1:]))
    step = _VECTOR_ELEMENTS // math.gcd(_VECTOR_ELEMENTS, elements)
    cuts = [spec.rows * number // servers // step * step for number in range(1, servers)]
    return [0, *cuts, spec.rows]
