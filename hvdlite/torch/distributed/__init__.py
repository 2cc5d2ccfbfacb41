"""The backend "hvdlite" of torch.distributed: torch's own tools over hvdlite's data plane.

    dist.init_process_group("hvdlite")

PyTorch 2.5 and later finds the backend alone (`hvdlite_autoload`); for older releases, `import
hvdlite.torch` registers it. `engines` connects the members of a process group, `collectives` has
the operations, and `group` the face that torch.distributed sees. See docs/torch_distributed.md.
"""

from __future__ import annotations

from typing import Any

from hvdlite.torch.distributed.group import HvdliteGroup

__all__ = ["HvdliteGroup", "create"]


def create(options: Any, backend_options: Any = None) -> HvdliteGroup:
    """Make a process group; all its members, and nobody else, call `create`."""
    # `options` are what torch.distributed tells a backend: store, rank, size, timeout, name. The
    # `pg_options` of init_process_group are not used.
    return HvdliteGroup(options)
