"""Registers the backend "hvdlite" of torch.distributed; PyTorch calls `register` when imported.

The entry point `torch.backends` of this distribution names `register`, and PyTorch 2.5 and later
calls every such function during `import torch`. If one raises, nobody can import torch. So this
module is tiny, imports nothing of hvdlite before a process group is made, and never raises. It is
not in the package hvdlite because `import hvdlite` removes the job's secret from the environment,
which a program that only imports torch must not do.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    """Write a warning; a filter that makes an error of warnings must not stop `import torch`."""
    import sys

    text = f"hvdlite: warning: torch.distributed does not get the backend {NAME!r}: {error!r}"
    print(text, file=sys.stderr)


def _create(options: Any, backend_options: Any) -> Any:
    """Make the process group that torch.distributed asks for."""
    from hvdlite.torch.distributed import create

    return create(options, backend_options)


def _extend_env_rendezvous() -> None:
    """Let "env://" also work under launchers that do not set RANK and MASTER_ADDR.

    PyTorch's own handler is asked first; only where it raises, because a variable is missing,
    hvdlite looks for hvdlite-run, srun or mpirun.
    """
    import importlib

    # torch.distributed.rendezvous, as an attribute, is a function.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]

    def env_or_launcher(url: str, **options: Any) -> Iterator[Any]:
        try:
            place = next(original(url, **options))
        except ValueError as error:
            from hvdlite.torch.distributed.rendezvous import meet

            place = meet(error, options.get("timeout"))
        yield place
        raise RuntimeError("env:// meets once per process group")

    handlers["env"] = env_or_launcher
