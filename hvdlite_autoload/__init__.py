"""Registers the backend "hvdlite" of torch.distributed; PyTorch calls `register` when imported.

The entry point `torch.backends` of this distribution names `register`, and PyTorch 2.5 and later
calls every such function during `import torch`. If one raises, nobody can import torch. So this
module is tiny, imports nothing of hvdlite before a process group is made, and never raises. It is
not in the package hvdlite because `import hvdlite` removes the job's secret from the environment,
which a program that only imports torch must not do. Without the first entry point, as with
TORCH_DEVICE_BACKEND_AUTOLOAD=0, PyTorch 2.14 and later find `torch.distributed.backends`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

NAME = "hvdlite"


def register() -> None:
    """Make torch.distributed know the backend; a second call changes nothing.

    Example:
        >>> import torch.distributed
        >>> register()
        >>> torch.distributed.is_backend_available("hvdlite")
        True
    """
    try:
        from torch import distributed

        if not distributed.is_available() or NAME in distributed.Backend.backend_list:
            return
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        _extend_env_rendezvous()
        if os.environ.get("HVDLITE_REPLACE_GLOO", "0") not in ("", "0"):
            _replace_gloo(distributed)
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    """Write a warning; a filter that makes an error of warnings must not stop `import torch`."""
    text = f"hvdlite: warning: torch.distributed does not get the backend {NAME!r}: {error!r}"
    print(text, file=sys.stderr)


def _create(options: Any, backend_options: Any) -> Any:
    """Make the process group that torch.distributed asks for."""
    from hvdlite.torch.distributed import create

    return create(options, backend_options)


def _replace_gloo(distributed: Any) -> None:
    """Let hvdlite make the process groups that programs ask gloo for."""
    if hasattr(distributed.Backend, "_ensure_backend_registered"):  # torch 2.14 and newer
        make = _create_in_place_of_gloo
        distributed.Backend.register_backend("gloo", make, extended_api=True, devices=["cpu"])
        return
    made_by: Any = importlib.import_module("torch.distributed.distributed_c10d")
    torchs = made_by.ProcessGroupGloo

    class InPlaceOfGloo(type):
        """What torch takes for the class of gloo's groups: it calls it, and asks who is one."""

        def __call__(cls, *given: Any, **named: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_code.co_name != "_new_process_group_helper":
                return torchs(*given, **named)  # It is put into another group, as it is.
            from hvdlite.torch.distributed.gloo import Options

            name = caller.f_locals.get("group_name") or "gloo"
            store, rank, size = given
            return _create_in_place_of_gloo(Options(store, rank, size, named["timeout"], name))

        def __getattr__(cls, name: str) -> Any:
            return getattr(torchs, name)

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, torchs) or type(one).__name__ == "GlooGroup"

    made_by.ProcessGroupGloo = InPlaceOfGloo("ProcessGroupGloo", (), {})


def _create_in_place_of_gloo(options: Any, backend_options: Any = None) -> Any:
    from hvdlite.torch.distributed.gloo import GlooGroup

    return GlooGroup(options)


def _has_seat(url: str, variables: Mapping[str, str]) -> bool:
    """Return whether torch is asked for the very place that hvdlite-run gave to this process.

    A program that the rank started does not have the job's secret, and may have other numbers.
    """
    from urllib.parse import parse_qsl, urlparse

    asked = {
        "rank": variables.get("RANK", ""),
        "world_size": variables.get("WORLD_SIZE", ""),
        "master": f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}",
        **dict(parse_qsl(urlparse(url).query)),
    }
    given = {"rank": "RANK", "world_size": "SIZE", "master": "TORCH_MASTER"}
    return ("HVDLITE_TOKEN" in variables or "hvdlite" in sys.modules) and all(
        asked[name] == variables.get(f"HVDLITE_{ours}") for name, ours in given.items()
    )


def _extend_env_rendezvous() -> None:
    """Let "env://" meet by hvdlite's store, and under launchers that do not set MASTER_ADDR.

    Where hvdlite-run chose MASTER_ADDR, its store is there already, knows the job's secret, and
    names the ranks that do not come. Elsewhere PyTorch's own handler is asked first; where it
    raises, because a variable is missing, hvdlite looks for srun or mpirun.
    """
    # torch.distributed.rendezvous, as an attribute, is a function.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]

    def env_or_launcher(url: str, **options: Any) -> Iterator[Any]:
        try:
            if _has_seat(url, os.environ):
                raise ValueError("hvdlite's store is there")
            place = next(original(url, **options))
        except ValueError as error:
            from hvdlite.torch.distributed.store import meet

            place = meet(error, options.get("timeout"))
        yield place
        raise RuntimeError("env:// meets once per process group")

    handlers["env"] = env_or_launcher
