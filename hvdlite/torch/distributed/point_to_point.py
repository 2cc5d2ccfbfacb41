"""Send and receive between two members of a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import _core
from hvdlite.errors import UnsupportedError
from hvdlite.torch.collectives.tensors import readable
from hvdlite.torch.distributed.memory import as_written, check, spec
from hvdlite.torch.distributed.received import copying
from hvdlite.torch.distributed.submission import Submissions
from hvdlite.torch.distributed.work import Work


class PointToPoint(Submissions):
    """Transfers are matched by their order for each pair of ranks and tag, as in MPI."""

    # A send is not buffered: it completes when the other rank has received it.

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Work:
        """Send a tensor to a rank of this group."""
        check("send", tensors)
        source = readable(tensors[0])

        def submit(name: str) -> _core.Handle:
            return self._engine.send(name, spec(name, source), to, keep=source)

        return self._start_transfer(_way(self._own_rank, to, tag), submit, [], None)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank of this group."""
        check("recv", tensors)
        memory = as_written(tensors[0])

        def submit(name: str) -> _core.Handle:
            place = spec(name, memory, memory.data_ptr())
            return self._engine.recv(name, place, source, keep=memory)

        finish = copying([memory], tensors)
        way = _way(source, self._own_rank, tag)
        return self._start_transfer(way, submit, tensors, finish)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        """Refuse to receive from any rank."""
        # The engine matches by names, in which both ranks count the transfers of their pair. This
        # one would get its number when it has met a sender, and each later `recv` that names a
        # source would have to wait for that: rank 0 would have to match sends by source, tag and
        # order.
        raise UnsupportedError(
            "recv: the backend 'hvdlite' of torch.distributed receives from a rank that you name; "
            'give src=, or use a group dist.new_group(backend="gloo")'
        )


def _way(source: int, to: int, tag: int) -> str:
    return f"send.{source}.{to}.{tag}"
