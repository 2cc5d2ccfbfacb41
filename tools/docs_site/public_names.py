"""Find where a public name of hvdlite is defined, by reading the sources.

Nothing is imported: torch, TensorFlow, Keras, Ray and Spark need not be installed, and the core
need not be built. The site's reference and tests/unit/test_public_names.py use it.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The modules that users import. `hvdlite.api` has what the adapters share, and is documented once.
MODULES = (
    "hvdlite",
    "hvdlite.api",
    "hvdlite.errors",
    "hvdlite.torch",
    "hvdlite.torch.elastic",
    "hvdlite.torch.parameter_server",
    "hvdlite.tensorflow",
    "hvdlite.tensorflow.elastic",
    "hvdlite.keras",
    "hvdlite.keras.callbacks",
    "hvdlite.keras.elastic",
    "hvdlite.keras.parameter_server",
    "hvdlite.numpy",
    "hvdlite.elastic",
    "hvdlite.ray",
    "hvdlite.spark",
)
# Names that a module's __getattr__ imports at their first use.
LATE = {
    "hvdlite.keras.Compression": "hvdlite.tensorflow.compression.Compression",
    "hvdlite.tensorflow.PartialDistributedOptimizer": (
        "hvdlite.keras.optimizer.PartialDistributedOptimizer"
    ),
    "hvdlite.tensorflow.SyncBatchNormalization": (
        "hvdlite.tensorflow.sync_batch_norm.SyncBatchNormalization"
    ),
    "hvdlite.torch.elastic.ElasticSampler": "hvdlite.torch.elastic.sampler.ElasticSampler",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


class NotFoundError(LookupError):
    """A name is listed as public, and the sources do not define it."""


@dataclass(frozen=True)
class Public:
    """A definition: the module that has it, its name there, and its node."""

    module: str
    name: str
    node: Definition

    @property
    def path(self) -> str:
        """The name with its module: one for each definition, under whatever names it is public."""
        return f"{self.module}.{self.name}"

    @property
    def place(self) -> str:
        """The file and line, for messages."""
        return f"{file_of(self.module).relative_to(ROOT)}:{self.node.lineno}"

    @property
    def docstring(self) -> str:
        """The docstring, "" if there is none; that of a variable is the string below it."""
        if isinstance(self.node, Function | ast.ClassDef):
            return ast.get_docstring(self.node) or ""
        body = _tree(self.module).body
        for node, below in itertools.pairwise(body):
            if node is self.node and isinstance(below, ast.Expr):
                value = below.value
                return str(value.value) if isinstance(value, ast.Constant) else ""
        return ""

    @property
    def initializer(self) -> Public | None:
        """The `__init__` of a class, None if it has none of its own."""
        if isinstance(self.node, ast.ClassDef):
            for node in self.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    return Public(self.module, f"{self.name}.__init__", node)
        return None

    def members(self, documented: Container[str] = ()) -> Iterator[Public]:
        """Give the methods and properties of a class that do not begin with an underscore."""
        # Those that it inherits follow, if the sources of hvdlite define them. Members of the bases
        # whose paths are `documented`, also inherited ones, are left out.
        seen: set[str] = set()
        for one in self.lineage(documented):
            for node in one.node.body if isinstance(one.node, ast.ClassDef) else ():
                if not isinstance(node, Function) or node.name in {*seen, "__init__"}:
                    continue
                seen.add(node.name)
                if not node.name.startswith("_"):
                    yield Public(one.module, f"{one.name}.{node.name}", node)

    def lineage(self, documented: Container[str] = ()) -> Iterator[Public]:
        """Give a class, and its bases in hvdlite, none that is documented or behind one that is."""
        yield self
        for base in self.bases():
            if base.path not in documented:
                yield from base.lineage(documented)

    def bases(self) -> Iterator[Public]:
        """Give the direct bases of a class that the sources of hvdlite define."""
        if isinstance(self.node, ast.ClassDef):
            for base in self.node.bases:
                with contextlib.suppress(NotFoundError):
                    public = find(self.module, ast.unparse(base))
                    if public is not None:
                        yield public


def file_of(module: str) -> Path:
    """Return the file of a module; raise NotFoundError if there is none."""
    path = ROOT / module.replace(".", "/")
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    raise NotFoundError(f"there is no module {module}")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def docstring_of(module: str) -> str:
    """Return the docstring of a module, "" if it has none."""
    return ast.get_docstring(_tree(module)) or ""


def _statements(module: str) -> Iterator[ast.stmt]:
    """Give the statements of a module, with those that only type checkers see."""
    for node in _tree(module).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from node.body
        else:
            yield node


@cache
def names_of(module: str) -> tuple[str, ...]:
    """Return the names that a module lists in `__all__`; without one, its classes and functions."""
    names: list[str] = []
    for node in _statements(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names += ast.literal_eval(node.value)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
            other = ast.unparse(node.value).removesuffix(".__all__")
            names += names_of(_module_called(module, other))
    if names:
        return tuple(names)
    defined = [node for node in _statements(module) if isinstance(node, Function | ast.ClassDef)]
    return tuple(node.name for node in defined if not node.name.startswith("_"))


def _module_called(module: str, name: str) -> str:
    """Return the full name of the module that `module` calls `name`."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"{node.module}.{alias.name}"
    raise NotFoundError(f"{module} does not import {name}")


@cache
def find(module: str, name: str) -> Public | None:
    """Find the definition of a public name; None if the name is that of a module."""
    # If the sources define no such name, NotFoundError is raised.
    late = LATE.get(f"{module}.{name}")
    if late is not None:
        return find(*late.rsplit(".", 1))
    for node in _statements(module):
        if _defines(node, name):
            assert isinstance(node, Function | ast.ClassDef | ast.Assign | ast.AnnAssign)
            return Public(module, name, node)
        if isinstance(node, ast.ImportFrom) and node.module:
            found = _imported(node, name)
            if found is not None:
                origin, called = found
                if origin == module:
                    return None  # `from hvdlite.torch import elastic` in hvdlite.torch itself
                return find(origin, called)
    raise NotFoundError(f"{module} does not define {name}")


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, Function | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(one, ast.Name) and one.id == name for one in node.targets)
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name


def _imported(node: ast.ImportFrom, name: str) -> tuple[str, str] | None:
    """Return (module, name there) if this import brings the name."""
    assert node.module is not None
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            return node.module, alias.name
        if alias.name == "*" and name in names_of(node.module):
            return node.module, name
    return None
