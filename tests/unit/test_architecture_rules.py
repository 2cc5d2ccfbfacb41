"""The tree obeys the rules of docs/architecture.md and CONTRIBUTING.md that text can show.

Contracts in pyproject.toml have the layers of Python (import-linter), ruff has the readers of the
environment, and clang-tidy the length of functions in C++.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 500
MOST_LINES_OF_THE_PRODUCT = 800  # of a file: it tells one story
MOST_LINES_OF_AN_EXAMPLE = 110
MOST_LINES_OF_A_FUNCTION = 80

# The folders of csrc by layer, lowest first.
LAYERS = (
    ("base",),
    ("wire", "transport", "kernels", "trace"),
    ("host", "negotiation"),
    ("gpu",),
    ("engine",),
    ("python", "tensorflow"),
)
LAYER_OF = {folder: layer for layer, folders in enumerate(LAYERS) for folder in folders}

# By rule: where it holds, and the words that may not stand there outside comments.
WORDS = {
    "Only csrc/base/config.cc reads the environment.": (
        r"csrc/(?!base/config\.cc)",
        r"\b(secure_)?getenv\b|\b(un)?setenv\b|\bputenv\b",
    ),
    "Only csrc/python knows pybind11.": (r"csrc/(?!python/)", r"\bpybind11\b|\bPython\.h\b"),
    "Mutexes are those of base/mutex.h.": (
        r"(csrc/(?!base/)|tests/).*\.(cc|h|inc)$",
        r"\bstd::(\w+_)?mutex\b|\bstd::condition_variable|\bstd::(lock_guard|scoped_lock)\b",
    ),
    "Absence is a value, not an #if.": (
        r"(csrc/(?!base/(cpu|mutex)\.|kernels/reduce)|tests/).*\.(cc|h|inc)$",
        r"^\s*#\s*(if|ifdef|ifndef|elif)\b",
    ),
    "A name says what the thing is for.": (
        "",
        r"^\s*(async def|def|class|struct|enum class)\s+\w*(?i:util|helper|manager)",
    ),
}

# By part of the package: what it may import besides the standard library.
PACKAGES = {
    "hvdlite": set(),
    "hvdlite/keras": {"keras", "numpy"},
    "hvdlite/keras/keras2": {"keras", "tensorflow", "tf_keras"},
    "hvdlite/keras/on_tensorflow": {"keras", "numpy", "tensorflow"},
    "hvdlite/keras/on_torch": {"keras", "torch"},
    "hvdlite/launch": {"cloudpickle", "shtab", "yaml"},
    "hvdlite/numpy": {"numpy"},
    "hvdlite/ray": {"ray"},
    "hvdlite/spark": {"pyarrow", "pyspark"},
    "hvdlite/tensorflow": {"keras", "numpy", "tensorflow", "tf_keras"},
    "hvdlite/torch": {"hvdlite_autoload", "numpy", "torch"},
}
# What torch makes on its default device, which torch.set_default_device changes for one thread.
TENSOR_MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "zeros"),
}


@cache
def sources() -> dict[str, str]:
    """Return the texts of all sources by their paths; those of C++ without comments."""
    found = {}
    for folder in ("csrc", "hvdlite", "tests", "tools", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cc", ".h", ".inc", ".py", ".pyi"):
                text = path.read_text(encoding="utf-8")
                if not path.suffix.startswith(".py"):
                    text = re.sub(r"//.*", "", text)
                found[path.relative_to(ROOT).as_posix()] = text
    assert len(found) > 500
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Return the Python sources, parsed, by their paths."""
    return {path: ast.parse(text) for path, text in sources().items() if path.endswith(".py")}


def wrong_includes() -> Iterator[str]:
    for path, text in sources().items():
        if path.startswith("csrc/"):
            folder = path.split("/")[1]
            for name in re.findall(r'^\s*#\s*include\s*"(.*)"', text, re.MULTILINE):
                included = name.split("/")[0]
                layer = LAYER_OF.get(included, len(LAYERS))
                if included != folder and layer >= LAYER_OF.get(folder, -1):
                    yield f"{path} includes {name}"


def test_an_include_points_to_a_lower_layer_or_stays_in_its_folder() -> None:
    assert list(wrong_includes()) == []


def test_the_page_on_architecture_is_short_and_names_functions_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1500
    core = "".join(text for path, text in sources().items() if path.startswith("csrc/"))
    named = re.findall(r"`(\w+::\w+)`", page)
    assert len(named) > 8
    assert [name for name in named if f" {name}(" not in core] == []


def wrong_words() -> Iterator[str]:
    for path, text in sources().items():
        for rule, (where, words) in WORDS.items():
            if re.match(where, path):
                for found in re.finditer(words, text, re.MULTILINE):
                    line = text.count("\n", 0, found.start()) + 1
                    yield f"{path}:{line}: {found[0].strip()}: {rule}"


def test_words_stand_only_where_they_may() -> None:
    assert list(wrong_words()) == []


def test_headers_are_read_once() -> None:
    headers = {path: text for path, text in sources().items() if path.endswith(".h")}
    assert [path for path, text in headers.items() if "\n#pragma once\n" not in "\n" + text] == []


def test_files_are_short_and_called_by_their_content() -> None:
    for path, text in sources().items():
        most = {
            "csrc": MOST_LINES_OF_THE_PRODUCT,
            "hvdlite": MOST_LINES_OF_THE_PRODUCT,
            "examples": MOST_LINES_OF_AN_EXAMPLE,
        }.get(path.split("/")[0], MOST_LINES)
        assert text.count("\n") <= most, path
        assert not re.search(r"(?i)util|helper|manager", path), path


def test_python_functions_are_short() -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= MOST_LINES_OF_A_FUNCTION, f"{path}: {node.name}: {length} lines"


def imported_by(tree: ast.Module) -> Iterator[str]:
    """Give the packages that a module imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.split(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_a_part_imports_only_its_packages() -> None:
    for path, tree in trees().items():
        parts = [part for part in PACKAGES if re.match(rf"{part}[/.]", path)]
        if parts:
            allowed = {"hvdlite", *sys.stdlib_module_names, *PACKAGES[max(parts, key=len)]}
            assert set(imported_by(tree)) <= allowed, path


def test_each_new_tensor_has_a_device() -> None:
    for path, tree in trees().items():
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        for call in calls if path.startswith("hvdlite/") else ():
            module, _, maker = ast.unparse(call.func).rpartition(".")
            given = {word.arg for word in call.keywords}
            if module == "torch" and maker in TENSOR_MAKERS:
                assert "device" in given, f"{path}:{call.lineno}: {ast.unparse(call)}"
