"""`hvdlite-run --compat`: scripts that import horovod run unchanged.

`on_path` puts the folder of this file on the ranks' import path. It holds a package called horovod,
whose modules are those of hvdlite under Horovod's names: `horovod.torch` is the module
`hvdlite.torch`. So both names share their state in whatever order they are imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType

from hvdlite.rendezvous.environment import imitate_horovod

# Knobs that choose Horovod's behaviour; variables that the user sets win.
_MEANINGS = {"HVDLITE_AVERAGE_OVER_JOINED": "1"}


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with our package horovod before an installed one on the path."""
    own = str(Path(__file__).resolve().parent)
    rest = environment.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (own, rest)))
    return {**_MEANINGS, **environment, "PYTHONPATH": path}


# Horovod's names and hvdlite's. If several names fit a module, the longest one counts, and the rest
# of the module's name is the same in both.
_MODULES = {
    "horovod": "hvdlite",
    "horovod.tensorflow.keras": "hvdlite.keras",
    "horovod.torch.mpi_ops": "hvdlite.torch",
    "horovod.torch.elastic.sampler": "hvdlite.torch.elastic",
    "horovod.torch.elastic.state": "hvdlite.torch.elastic",
    "horovod.tensorflow.compression": "hvdlite.tensorflow",
    "horovod.tensorflow.mpi_ops": "hvdlite.tensorflow",
    "horovod.common.basics": "hvdlite.basics",
    "horovod.common.elastic": "hvdlite.compat.elastic",
    "horovod.common.exceptions": "hvdlite.errors",
    "horovod.common.process_sets": "hvdlite.process_sets",
    "horovod.ray.runner": "hvdlite.ray",
    "horovod.runner": "hvdlite.compat.runner",
}
_ELASTIC_ON_RAY = (
    "elastic jobs on Ray are run by hvdlite.ray.run with min_np= and max_np=; see docs/ray.md"
)
_NOT_OURS = {
    "horovod.mxnet": "MXNet is retired",
    **{
        f"horovod.spark.{part}": "there are no estimators; docs/spark.md shows how ranks read what "
        "Spark has written, for a function that hvdlite.spark.run calls"
        for part in ("common", "keras", "lightning", "torch")
    },
    **dict.fromkeys(("horovod.ray.elastic", "horovod.ray.elastic_v2"), _ELASTIC_ON_RAY),
    "horovod.data": "the loaders of PyTorch and tf.data work in the background, too",
    "horovod.common.util": "it serves Horovod's own modules; ask hvd for what was built, such as "
    "hvd.nccl_built()",
    **{
        f"horovod.runner.{part}": "it is a part of Horovod's launcher; use horovod.run or the "
        "command hvdlite-run"
        for part in ("common", "driver", "elastic", "launch", "task", "util")
    },
}
# Names of Horovod that hvdlite's modules lack, and why.
_NAMES_NOT_OURS = {
    "hvdlite.ray": {"ElasticRayExecutor": _ELASTIC_ON_RAY},
    "hvdlite.spark": {
        "run_elastic": "the ranks of hvdlite.spark.run are fixed; begin again from a checkpoint, "
        "or start an elastic job with hvdlite-run --min-np"
    },
}


def install() -> None:
    """Make imports below `horovod` find hvdlite's modules from now on."""
    imitate_horovod()
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())


class AliasFinder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find hvdlite's module for a name; None if there is none, which import reports."""
        if not fullname.startswith("horovod."):
            return None
        if fullname == "horovod.common":  # It only holds other modules.
            return importlib.util.spec_from_loader(fullname, _Alias(None), is_package=True)
        # A part of Horovod that hvdlite does not have raises ModuleNotFoundError, and says why.
        for name, why in _NOT_OURS.items():
            if f"{fullname}.".startswith(f"{name}."):
                raise ModuleNotFoundError(f"hvdlite has no {fullname}: {why}", name=fullname)
        ours = target_of(fullname)
        if not _exists(ours):
            return None
        return importlib.util.spec_from_loader(fullname, _Alias(ours))


def target_of(name: str) -> str:
    """Return hvdlite's name for the full name of one of Horovod's modules."""
    known = max((one for one in _MODULES if f"{name}.".startswith(f"{one}.")), key=len)
    return _MODULES[known] + name[len(known) :]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # Its package is not there either. A framework that is missing is another matter.
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return False
        raise


class _Alias(Loader):
    """Loads an alias by importing the module that it stands for, or an empty package for None."""

    def __init__(self, target: str | None) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        if self._target is None:
            module.__path__ = []
            return
        # The import statement returns the entry of sys.modules after the loader has run.
        target = importlib.import_module(self._target)
        vars(target).setdefault("__path__", [])  # What is below it in Horovod is found, too.
        _explain_names(target)
        sys.modules[module.__name__] = target


def _explain_names(module: ModuleType) -> None:
    """Make a module say why it lacks some of Horovod's names."""
    missing = _NAMES_NOT_OURS.get(module.__name__)
    if missing is None:
        return
    others = vars(module).get("__getattr__")

    def look_up(name: str) -> object:
        if name in missing:
            raise ImportError(f"hvdlite has no {name} of Horovod: {missing[name]}", name=name)
        if others is not None:
            return others(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = look_up
