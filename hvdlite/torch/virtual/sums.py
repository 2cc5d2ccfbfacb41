"""What a rank adds up over its virtual ranks in one step: gradients, losses and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import nn

from hvdlite import ops
from hvdlite.errors import HvdliteError
from hvdlite.torch.collectives.allreduce import grouped_allreduce_async
from hvdlite.torch.collectives.autograd import Handle

Key = TypeVar("Key")


class Sums:
    def __init__(self, model: nn.Module) -> None:
        self.gradients: PartialSums[torch.Tensor] = PartialSums()
        self.losses: PartialSums[str] = PartialSums()
        self.buffers = Buffers(model)


class Buffers:
    """The buffers of a model in one step: each virtual rank starts from the same values."""

    # After the step floating-point buffers have the mean of the values that the virtual ranks have
    # left, and others the value that virtual rank 0 has left. Buffers that no virtual rank changes
    # are not sent.

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # A module may replace a buffer by another tensor, so these are read anew each time.
        self._places = self._find()
        self._before = [one.clone() for one in self._read()]
        self._of_first: list[torch.Tensor] = []  # Virtual rank 0 has left these, on its rank.
        self._sums: PartialSums[int] = PartialSums()
        self._sent: list[int] = []
        self._handle: Handle | None = None
        self.changed = [False] * len(self._places)  # This rank's virtual ranks have changed them.

    def _find(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _read(self) -> list[torch.Tensor]:
        found = (module._buffers[name] for module, name in self._places)
        return [one.detach() for one in found if one is not None]

    def start(self) -> None:
        for (module, name), before in zip(self._places, self._before, strict=True):
            buffer = module._buffers[name]
            if buffer is None:
                module._buffers[name] = before.clone()
            else:
                buffer.detach().copy_(before)

    def note(self, virtual_rank: int) -> None:
        """Note what a virtual rank has left; raise HvdliteError for other buffers than before."""
        if self._find() != self._places:
            raise HvdliteError(
                "virtual_steps(): a batch has made a buffer of the model, or has set one to None, "
                "so that virtual ranks would not start alike; register all buffers with tensors "
                "before the loop"
            )
        now = self._read()
        pairs = list(zip(now, self._before, strict=True))
        self.changed = [
            known or not torch.equal(*map(_bytes, pair))  # -0.0 differs from 0.0.
            for known, pair in zip(self.changed, pairs, strict=True)
        ]
        averaged = {i: _wide(one).clone() for i, one in enumerate(now) if _is_averaged(one)}
        self._sums.add(averaged)
        if virtual_rank == 0:
            self._of_first = [one if _is_averaged(one) else one.clone() for one in now]

    def send(self, name: str, changed: Sequence[bool]) -> None:
        sums, now = self._sums.take(), self._read()
        self._sent = [i for i, one in enumerate(changed) if one]
        # Others than means are a sum with zeros: a broadcast cannot be redone when its root has
        # died.
        values = self._of_first or [torch.zeros_like(one) for one in now]
        data = [sums[i] if i in sums else _bytes(values[i]) for i in self._sent]
        if data:
            self._handle = grouped_allreduce_async(data, name=f"{name}.buffers", op=ops.Sum)

    def finish(self, virtual_size: int) -> None:
        if self._handle is None:
            return
        now = self._read()
        for i, total in zip(self._sent, self._handle.wait(), strict=True):
            if _is_averaged(now[i]):
                now[i].copy_(total / virtual_size)
            else:
                now[i].copy_(total.view(now[i].dtype).reshape(now[i].shape))


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.reshape(-1).contiguous().view(torch.uint8)


def _is_averaged(buffer: torch.Tensor) -> bool:
    return bool(buffer.is_floating_point() or buffer.is_complex())


def _wide(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer in a dtype in which sums on one rank and between ranks are rounded alike."""
    return buffer.float() if buffer.is_floating_point() and buffer.itemsize < 4 else buffer


class PartialSums(Generic[Key]):
    """Sums of 2^k consecutive sets of tensors, as a binary counter keeps them."""

    # So many sets have been added as the set bits of the number say: after 6 of them there are
    # sums of 4 and of 2. A tensor that one of two summands lacks counts as zeros there.

    def __init__(self) -> None:
        # Each has its k; the largest is first.
        self._sums: list[tuple[int, dict[Key, torch.Tensor]]] = []

    def add(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Add the next set, whose memory this object may use from now on."""
        level, total = 0, dict(tensors)
        while self._sums and self._sums[-1][0] == level:
            total = self._added(self._sums.pop()[1], total)
            level += 1
        self._sums.append((level, total))

    def take(self) -> dict[Key, torch.Tensor]:
        """Return the sums of all sets, whose number is a power of two."""
        ((_, total),) = self._sums
        self._sums = []
        return total

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _added(
        self, left: dict[Key, torch.Tensor], right: dict[Key, torch.Tensor]
    ) -> dict[Key, torch.Tensor]:
        both = [key for key in left if key in right]
        if both:
            torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
        alone = {key: one for key, one in left.items() if key not in right}
        alone |= {key: one for key, one in right.items() if key not in left}
        if alone:
            torch._foreach_add_([*alone.values()], 0.0)  # It makes 0.0 of -0.0, as zeros do.
        return left | alone
