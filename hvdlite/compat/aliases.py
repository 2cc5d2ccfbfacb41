"""One module under two names: `horovod.torch` is `hvdlite.torch`, the same object.

So state is shared whichever name is imported first, and whatever hvdlite gains is there at once.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

from hvdlite import horovod_mode

# Horovod's name, and ours; of several that fit, the longest counts. What is not listed has the same
# name below both.
_MODULES = {
    "horovod": "hvdlite",
    "horovod.tensorflow.keras": "hvdlite.keras",
    "horovod.torch.mpi_ops": "hvdlite.torch",
    "horovod.tensorflow.mpi_ops": "hvdlite.tensorflow",
    "horovod.common.basics": "hvdlite.basics",
    "horovod.common.exceptions": "hvdlite.errors",
    "horovod.common.process_sets": "hvdlite.process_sets",
    "horovod.runner": "hvdlite.compat.runner",
}
_NOT_OURS = {
    "horovod.mxnet": "MXNet is retired",
    "horovod.spark": "Spark is not supported; start ranks with hvdlite-run or hvdlite.run",
    "horovod.ray": "Ray is not supported; start ranks with hvdlite-run or hvdlite.run",
}
# A package of Horovod's that only holds others.
_FOLDERS = ("horovod.common",)


def target_of(name: str) -> str:
    """Give our name of one of Horovod's modules.

    Example:
        >>> target_of("horovod.tensorflow.keras.callbacks")
        'hvdlite.keras.callbacks'
    """
    known = max((one for one in _MODULES if f"{name}.".startswith(f"{one}.")), key=len)
    return _MODULES[known] + name[len(known) :]


class _Alias(Loader):
    """Loads a module by importing the one that it is another name of."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Import gives out whatever stands in sys.modules once the loader has run.
        sys.modules[module.__name__] = importlib.import_module(self._target)


class _Folder(Loader):
    """Loads an empty package."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class AliasFinder(MetaPathFinder):
    """Answers imports below `horovod`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find our module of that name; None when there is none, which import reports."""
        if not fullname.startswith("horovod."):
            return None
        if fullname in _FOLDERS:
            return importlib.util.spec_from_loader(fullname, _Folder(), is_package=True)
        for name, why in _NOT_OURS.items():
            if f"{fullname}.".startswith(f"{name}."):
                raise ModuleNotFoundError(f"hvdlite has no {fullname}: {why}", name=fullname)
        ours = target_of(fullname)
        if importlib.util.find_spec(ours) is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Alias(ours))


def install() -> None:
    """Answer imports below `horovod` from now on."""
    horovod_mode.turn_on()
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
