"""Process groups in gloo's place, for programs that name gloo: `hvdlite-run --replace-gloo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch

from hvdlite.errors import UnsupportedError
from hvdlite.torch.distributed.group import NAME, HvdliteGroup

_said = False


class Options(NamedTuple):
    """What torch tells a group of gloo, by the names that it has where it makes other groups."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str


class GlooGroup(HvdliteGroup):
    """A process group that torch.distributed takes for one of gloo."""

    # getBackendName() stays hvdlite's: torch's C++ code looks for a ProcessGroupGloo in each group
    # that has gloo's.

    shown_as = "gloo"

    def __init__(self, options: Any) -> None:
        global _said
        if not _said and options.group_rank == 0:
            text = "torch.distributed's backend gloo is hvdlite (HVDLITE_REPLACE_GLOO)"
            print(f"hvdlite: {text}", file=sys.stderr, flush=True)
        _said = True
        super().__init__(options)

    def _backends(self) -> dict[str, str]:
        return {
            device: NAME if device == "cpu" else backend
            for device, backend in super()._backends().items()
        }

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> NoReturn:
        raise UnsupportedError(
            "recv from any rank: hvdlite, which is in gloo's place, has to know who sends; give "
            "src=, or start without --replace-gloo (HVDLITE_REPLACE_GLOO)"
        )
