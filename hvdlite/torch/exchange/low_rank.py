"""PowerSGD: the gradient of a matrix travels as two thin factors, and what they lack is kept.

The method is from Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019. On each rank M is the gradient plus the *error* of earlier steps, and Q
the *basis*, made of the right factor of the step before. The ranks reduce twice in a step:

    P = orthonormal(mean(M Q^T))      the left factor, thin
    Q = mean(P^T M)                   the right factor, flat
    gradient = P Q                    the same on all ranks
    error = M - P (P^T M)             what of this rank's M does not travel

The error is that of the paper, of this rank's own part of the product. M - P Q has the same mean
over the ranks, and would grow for ever where the ranks' data differ.

All ranks must get the same bits, also on CPUs of different kinds. What is reduced has them. What
all ranks compute from it (`orthonormalize`, `multiply`) is made of additions, multiplications,
divisions and square roots of single elements in a fixed order, which IEEE 754 defines to the bit.
Products that a rank computes from its own M are reduced afterwards, so any kernel may compute them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdlite.process_sets import ProcessSet
from hvdlite.torch.power_sgd import PowerSGD

_AT_ONCE = 1 << 15  # A CPU multiplies so many elements at once: they fit a cache.
_DEPENDENT = 1e-6  # A column of which earlier ones leave less than this part depends on them.


class Schedule:
    """Says, alike on all ranks, in which steps of a reducer gradients are compressed."""

    # Ranks that have joined, and new ranks of an elastic job, have counted fewer steps. So the
    # ranks count anew, and in the first step, which is exact, they agree whether any of them had
    # begun.

    def __init__(self, settings: PowerSGD, process_set: ProcessSet) -> None:
        self.settings = settings
        self._process_set = process_set
        self._agreed = False  # It says whether the ranks have agreed since the last restart.
        self.begun = False  # It says whether this rank has ever compressed.

    def compresses(self, step: int) -> bool:
        """Return whether the gradients of a step, counted from the last restart, are compressed."""
        if self._process_set.size() == 1 or not (self._agreed or step >= self.settings.start):
            return False
        self.begun = True
        return True

    def begin_anew(self) -> None:
        """Count from zero, as all ranks do."""
        self._agreed = False

    def agree(self, begun: float) -> None:
        """Take in how many ranks had begun, or their share, which all ranks see alike."""
        self._agreed = self._agreed or begun > 0


@dataclass
class _Flight:
    """The factors of one gradient in flight."""

    corrected: torch.Tensor  # It is M in the paper.
    left: torch.Tensor  # It is P, at first this rank's part.
    own: torch.Tensor  # It is this rank's part of Q.
    right: torch.Tensor  # It is Q.
    arrived: bool = False  # It says whether some rank had a gradient.


@dataclass
class _Matrix:
    """A parameter that may be compressed, and what is remembered of it between two steps."""

    rows: int
    columns: int
    rank: int
    dense: bool = False  # It says whether its last exact gradient was dense, on all ranks.
    error: torch.Tensor | None = None
    basis: torch.Tensor | None = None
    flight: _Flight | None = None


class LowRank:
    """The compressed gradients of one bucket: `begin`, `take`, `turn`, `write`, then `settle`."""

    # It is not thread-safe. Tensors that it returns belong to the core while they are in flight.

    def __init__(self, params: Sequence[torch.Tensor], schedule: Schedule) -> None:
        """Find the parameters that are worth compressing."""
        self.schedule = schedule
        found = ((i, _matrix_of(param, schedule.settings)) for i, param in enumerate(params))
        self._matrices = {i: matrix for i, matrix in found if matrix is not None}

    def __bool__(self) -> bool:
        return bool(self._matrices)

    def forget(self) -> None:
        """Forget errors and bases."""
        for matrix in self._matrices.values():
            matrix.error = matrix.basis = None

    def begin_anew(self) -> None:
        """Forget all of earlier steps."""
        self.forget()
        for matrix in self._matrices.values():
            matrix.dense = False

    def begin(self, step: int) -> set[int]:
        """Return the positions of the parameters that are compressed in a cycle."""
        for matrix in self._matrices.values():
            matrix.flight = None
        if not self.schedule.compresses(step):
            return set()
        return {i for i, matrix in self._matrices.items() if matrix.dense}

    def saw(self, position: int, dense: bool) -> None:
        """Note whether an exact gradient was dense on all ranks: sparse ones stay exact."""
        matrix = self._matrices.get(position)
        if matrix is not None:
            matrix.dense = dense

    def take(self, position: int, gradient: torch.Tensor) -> None:
        """Compute this rank's part of the left factor; the gradient stays as it is."""
        matrix = self._matrices[position]
        flat = gradient.detach().reshape(matrix.rows, matrix.columns)
        kind = torch.promote_types(flat.dtype, torch.float32)
        error, basis = matrix.error, matrix.basis
        if error is None or (error.device, error.dtype) != (flat.device, kind):
            corrected = flat.to(kind, copy=True)
        else:
            corrected = error + flat
        if basis is None or (basis.device, basis.dtype) != (flat.device, kind):
            basis = _first_basis(matrix).to(flat.device, kind)
        matrix.basis = basis
        left = torch.nn.functional.linear(corrected, basis)
        matrix.flight = _Flight(corrected, left, torch.empty_like(basis), torch.empty_like(basis))

    def lefts(self) -> dict[int, torch.Tensor]:
        """Return what is reduced first, by position."""
        return {i: flight.left for i, flight in self._flights().items()}

    def turn(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Make left factors; return by position this rank's right part, and where its mean goes."""
        flights = self._flights()
        lefts = orthonormalize([flight.left for flight in flights.values()])
        for flight, left in zip(flights.values(), lefts, strict=True):
            flight.left = left
            torch.mm(left.t(), flight.corrected, out=flight.own)
        return {i: (flight.own, flight.right) for i, flight in flights.items()}

    def write(self, position: int, target: torch.Tensor) -> None:
        """Write the gradient that all ranks have to a tensor of the parameter's shape."""
        matrix, flight = self._matrices[position], self._flights()[position]
        flight.arrived = True
        shape = (matrix.rows, matrix.columns)
        if target.is_contiguous():
            multiply(flight.left, flight.right, target.view(shape))
        else:
            product = torch.empty(shape, dtype=target.dtype, device=target.device)
            target.copy_(multiply(flight.left, flight.right, product).view(target.shape))

    def finite(self) -> bool:
        """Return whether all that arrived in this cycle is finite: all ranks see the same."""
        rights = [flight.right for flight in self._flights().values() if flight.arrived]
        return all(bool(torch.isfinite(right).all()) for right in rights)

    def settle(self, keep: bool, counts: bool) -> None:
        """End the cycle; `keep` its errors and bases if its gradients are used."""
        for matrix in self._matrices.values():
            flight, matrix.flight = matrix.flight, None
            if flight is None or not flight.arrived or not keep:
                continue
            # This rank's gradients count if its weight is not zero.
            if counts:
                matrix.error = flight.corrected.addmm_(flight.left, flight.own, alpha=-1)
            most = flight.right.abs().amax(1, keepdim=True)  # Squares might overflow.
            # A direction that is empty now stays in the basis, because it may not be later.
            matrix.basis = torch.where(most > 0, flight.right / most, matrix.basis)

    def _flights(self) -> dict[int, _Flight]:
        flights = ((i, matrix.flight) for i, matrix in self._matrices.items())
        return {i: flight for i, flight in flights if flight is not None}


def _matrix_of(param: torch.Tensor, settings: PowerSGD) -> _Matrix | None:
    """Return the matrix of a parameter, as rows x rest; None if it is not worth compressing."""
    plain = param.layout == torch.strided and param.is_floating_point()
    if param.dim() < 2 or param.numel() == 0 or not plain:
        return None
    rows, columns = param.shape[0], param.numel() // param.shape[0]
    rank = min(settings.rank, rows, columns)
    if rows * columns < settings.least_gain * rank * (rows + columns):
        return None
    return _Matrix(rows, columns, rank)


def _first_basis(matrix: _Matrix) -> torch.Tensor:
    """Return a random matrix, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(matrix.rank, matrix.columns, generator=generator, device="cpu")


def orthonormalize(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make the columns of each matrix orthonormal, by Gram-Schmidt twice; the bits are defined."""
    # A column that depends on those before it becomes zero. Infinities and NaN become NaN.
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for i, matrix in enumerate(matrices):
        groups.setdefault((matrix.device, matrix.shape[1]), []).append(i)
    results: Mapping[int, torch.Tensor] = {
        i: result
        for group in groups.values()
        for i, result in zip(group, _orthonormal([matrices[i] for i in group]), strict=True)
    }
    return [results[i] for i in range(len(matrices))]


def _orthonormal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Do so with matrices of one device and number of columns, all at once, in float64."""
    first = matrices[0]
    longest = max(len(matrix) for matrix in matrices)
    size = 1 << max(longest - 1, 0).bit_length()  # Zeros behind the rows change no sum.
    shape = (len(matrices), size, first.shape[1])
    block = torch.zeros(shape, dtype=torch.float64, device=first.device)
    for part, matrix in zip(block, matrices, strict=True):
        part[: len(matrix)] = matrix
    lengths = _sums(block * block).sqrt()
    block = block / torch.where(lengths == 0, 1.0, lengths).unsqueeze(1)
    done: list[torch.Tensor] = []
    for column in block.unbind(2):
        for _ in range(2 if done else 0):
            shares = _sums(torch.stack(done, 2) * column.unsqueeze(2))
            for earlier, share in zip(done, shares.unbind(1), strict=True):
                column = column - earlier * share.unsqueeze(1)
        length = _sums((column * column).unsqueeze(2)).sqrt()
        done.append(column / torch.where(length <= _DEPENDENT, math.inf, length))
    block = torch.stack(done, 2)
    return [
        part[: len(matrix)].to(matrix.dtype) for part, matrix in zip(block, matrices, strict=True)
    ]


def _sums(block: torch.Tensor) -> torch.Tensor:
    """Sum over the second dimension, whose size is a power of two, half by half."""
    while block.shape[1] > 1:
        half = block.shape[1] // 2
        block = block[:, :half] + block[:, half:]
    return block[:, 0]


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write left @ right to `out`, and return it; the bits are defined."""
    rows, columns = out.shape
    at_once = rows if out.is_cuda else max(1, _AT_ONCE // columns)
    total = left.new_empty(min(rows, at_once), columns)
    product = torch.empty_like(total)
    for begin in range(0, rows, at_once):
        part = left[begin : begin + at_once]
        here, there = total[: len(part)], product[: len(part)]
        torch.mul(part[:, :1], right[0], out=here)
        for k in range(1, len(right)):
            torch.mul(part[:, k : k + 1], right[k], out=there)
            here.add_(there)
        out[begin : begin + at_once] = here
    return out
