"""The rules of docs/architecture.md that a machine can check, such as the layers.

The folders of one *layer* do not include or import each other. An include or an import points to a
lower layer or stays in its folder. `find_violations(root)` reads only the tree below `root`, so
that the tests can plant a violation in a tree of their own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# What torch makes on its default device.
TENSOR_MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "zeros"),
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_EXAMPLE_LINES = 110

# C++: the folders of csrc by layer, lowest first. No shipped file includes csrc/testing.
CPP_LAYERS = (
    ("base",),
    ("os",),
    ("trace", "transport", "wire", "kernels"),
    ("backend", "gpu/cuda", "negotiation"),
    ("plane", "gpu/nccl", "entry", "negotiation/step_clock", "negotiation/waits"),
    ("host", "gpu", "negotiation/autotune", "negotiation/deadlock", "negotiation/late_gradients"),
    ("execution",),
    ("engine",),
    ("api",),
    ("python", "tensorflow", "testing"),
)
CPP_LAYER_OF = {folder: layer for layer, folders in enumerate(CPP_LAYERS) for folder in folders}

# Python: for each part of the package, the parts that it may import, lowest first. A part is a
# folder or a single module; "hvdlite" stands for the modules directly in it. Modules of an adapter
# that scripts for Horovod import by name stand beside its folders, although these import them.
NEUTRAL = (
    *("hvdlite", "hvdlite.rendezvous", "hvdlite.elastic", "hvdlite.errors"),
    "hvdlite.parameter_server",
)
TORCH = (
    "hvdlite.torch.compression",
    "hvdlite.torch.collectives",
    "hvdlite.torch.exchange",
    "hvdlite.torch.optimizers",
    "hvdlite.torch.virtual",
    "hvdlite.torch.distributed",
)
TENSORFLOW = (
    "hvdlite.tensorflow.errors",
    "hvdlite.tensorflow.compression",
    "hvdlite.tensorflow.graph",
    "hvdlite.tensorflow.collectives",
    "hvdlite.tensorflow.gradients",
)
BELOW_LAUNCH = ("hvdlite.compat", "hvdlite.emit", "hvdlite.live", "hvdlite.timeline")
LAUNCH = (
    "hvdlite.launch.process",
    "hvdlite.launch.output",
    "hvdlite.launch.hosts",
    "hvdlite.launch.remote",
    "hvdlite.launch.view",
    *(f"hvdlite.launch.{name}" for name in ("description", "timeline_parts", "strangers")),
    *(f"hvdlite.launch.{name}" for name in ("loop", "control", "supervisor", "run")),
    "hvdlite.launch.elastic",
    "hvdlite.launch.policies",
    "hvdlite.launch",
)
PYTHON_PARTS: dict[str, tuple[str, ...]] = {
    "hvdlite.errors": (),
    "hvdlite.rendezvous": ("hvdlite.errors",),
    "hvdlite.timeline": ("hvdlite.errors", "hvdlite.rendezvous"),
    "hvdlite": ("hvdlite.errors", "hvdlite.rendezvous", "hvdlite.timeline"),
    "hvdlite.elastic": ("hvdlite.errors", "hvdlite.rendezvous", "hvdlite"),
    "hvdlite.live": ("hvdlite.errors", "hvdlite.rendezvous", "hvdlite"),
    "hvdlite.parameter_server": ("hvdlite.errors", "hvdlite.rendezvous", "hvdlite"),
    "hvdlite.emit": ("hvdlite.errors", "hvdlite"),
    "hvdlite.compat": NEUTRAL,
    "hvdlite.numpy": NEUTRAL,
    **{part: (*NEUTRAL, *TORCH[:i]) for i, part in enumerate(TORCH)},
    "hvdlite.torch": (*NEUTRAL, *TORCH),
    **{part: (*NEUTRAL, *TENSORFLOW[:i]) for i, part in enumerate(TENSORFLOW)},
    "hvdlite.tensorflow": (*NEUTRAL, *TENSORFLOW),
    "hvdlite.keras": (*NEUTRAL, "hvdlite.numpy"),
    "hvdlite.keras._torch": (*NEUTRAL, "hvdlite.keras", "hvdlite.torch", *TORCH),
    "hvdlite.keras._tensorflow": (*NEUTRAL, "hvdlite.keras", "hvdlite.tensorflow", *TENSORFLOW),
    "hvdlite.keras._keras2": (*NEUTRAL, "hvdlite.keras", "hvdlite.keras._tensorflow", *TENSORFLOW),
    **{
        part: (*NEUTRAL, *BELOW_LAUNCH, *LAUNCH[:i])
        for i, part in enumerate((*LAUNCH, "hvdlite.launch.command"))
    },
    "hvdlite.ray": (*NEUTRAL, *LAUNCH),
    "hvdlite.spark": (*NEUTRAL, "hvdlite.compat", "hvdlite.timeline", *LAUNCH),
}
# Files that users call and that import a higher layer: hvdlite.run (on first use), `python -m`,
# hvdlite.init() in an elastic job or under a view, and hvdlite.tensorflow's DistributedOptimizer,
# which is that of Keras.
FACES = {
    "hvdlite/__init__.py": "hvdlite.launch",
    "hvdlite/basics.py": "hvdlite.elastic",
    "hvdlite/reporting.py": "hvdlite.live",
    "hvdlite/__main__.py": "hvdlite.launch.command",
    "hvdlite/launch/__main__.py": "hvdlite.launch.command",
    "hvdlite/tensorflow/optimizer.py": "hvdlite.keras",
}
# By part: the packages that it may import besides the standard library. The longest name that fits
# a module counts.
PACKAGES_OF_PART = {
    "hvdlite.emit": {"yaml"},
    "hvdlite.launch": {"cloudpickle", "rich", "yaml"},
    "hvdlite.live": {"rich"},
    "hvdlite.numpy": {"numpy"},
    "hvdlite.ray": {"ray"},
    "hvdlite.spark": {"pyarrow", "pyspark"},
    "hvdlite.torch": {"torch", "numpy", "hvdlite_autoload"},
    "hvdlite.tensorflow": {"tensorflow", "keras", "tf_keras", "numpy"},
    "hvdlite.keras": {"keras", "numpy"},
    "hvdlite.keras._torch": {"torch", "keras"},
    "hvdlite.keras._tensorflow": {"tensorflow", "keras", "numpy"},
    "hvdlite.keras._keras2": {"tensorflow", "keras", "tf_keras"},
}

ENVIRONMENT_READERS = ("hvdlite/rendezvous/environment.py", "hvdlite/launch/")
FORBIDDEN_WORDS = re.compile(r"(?i)util|helper|manager")


@dataclass(frozen=True)
class Violation:
    """One broken rule: the path and line, the rule's name, and the offending text."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class Source:
    """One file: its path below the root, its text, and its text without comments (C++)."""

    path: str
    text: str
    code: str

    def violation(self, line: int, rule: str, text: str) -> Violation:
        return Violation(self.path, line, rule, text)


def find_violations(root: Path) -> list[Violation]:
    """List every violation below `root`, in the order of the files."""
    found: list[Violation] = []
    for path in _files(root):
        text = path.read_text(encoding="utf-8")
        relative = path.relative_to(root).as_posix()
        if path.suffix in (".cc", ".h", ".inc"):
            source = Source(relative, text, _without_comments(text))
            checks = CPP_CHECKS
        else:
            source = Source(relative, text, text)
            checks = PYTHON_CHECKS
        for check in (*COMMON_CHECKS, *checks):
            found += check(source)
    return found


def _files(root: Path) -> Iterator[Path]:
    for folder in ("csrc", "hvdlite", "tests", "tools", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cc", ".h", ".inc", ".py", ".pyi") and path.is_file():
                yield path


# Every file


def _check_length(source: Source) -> Iterator[Violation]:
    lines = source.text.count("\n")
    limit = MAX_EXAMPLE_LINES if source.path.startswith("examples/") else MAX_FILE_LINES
    if lines > limit:
        yield source.violation(lines, "file-length", f"{lines} lines, at most {limit}")


def _check_file_name(source: Source) -> Iterator[Violation]:
    if FORBIDDEN_WORDS.search(source.path):
        yield source.violation(1, "name", f"{source.path}: name the file for its content")


# C++


def _without_comments(text: str) -> str:
    """Blank out comments and the content of literals; lines keep their numbers."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'",
        re.DOTALL,
    )

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        line_start = text.rfind("\n", 0, match.start()) + 1
        if token.startswith('"') and text[line_start:].lstrip().startswith("#include"):
            return token
        kept = "\n" * token.count("\n")
        return kept if token.startswith("/") else f'""{kept}'

    return pattern.sub(blank, text)


def _cpp_folder(path: str) -> str | None:
    parts = path.split("/")
    return _in_csrc(parts[1:]) if parts[0] == "csrc" and len(parts) > 2 else None


def _in_csrc(parts: list[str]) -> str:
    """Return the folder of a file below csrc: two names if it is a part of another one."""
    both = "/".join(parts[:2])
    return both if both in CPP_LAYER_OF else parts[0]


def _matches(source: Source, pattern: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.code.splitlines(), start=1):
        if re.search(pattern, line):
            yield number, line.strip()


def _check_includes(source: Source) -> Iterator[Violation]:
    folder = _cpp_folder(source.path)
    if folder is None:
        return
    if folder not in CPP_LAYER_OF:
        yield source.violation(1, "layer", f"csrc/{folder} is not in CPP_LAYERS")
        return
    for number, line in _matches(source, r'^\s*#\s*include\s*"'):
        target = _in_csrc(line.split('"')[1].split("/"))
        if target == folder:
            continue
        if target not in CPP_LAYER_OF:
            yield source.violation(number, "layer", f"{line}: name it from csrc/")
        elif CPP_LAYER_OF[target] >= CPP_LAYER_OF[folder]:
            yield source.violation(number, "layer", f"{folder} must not include {target}: {line}")


def _check_cpp_words(source: Source) -> Iterator[Violation]:
    folder = _cpp_folder(source.path)
    path = source.path
    if path != "csrc/base/config.cc" and folder is not None:
        for number, line in _matches(source, r"\b(secure_)?getenv\b|\b(un)?setenv\b|\bputenv\b"):
            yield source.violation(number, "environment", line)
    if folder not in (None, "python"):
        for number, line in _matches(source, r"\bpybind11\b|\bPython\.h\b"):
            yield source.violation(number, "pybind11", line)
    if folder != "base":
        bare = r"\bstd::(\w+_)?mutex\b|\bstd::condition_variable|\bstd::(lock_guard|scoped_lock)\b"
        for number, line in _matches(source, bare):
            yield source.violation(number, "mutex", line)


def _may_have_conditions(path: str) -> bool:
    folder = _cpp_folder(path)
    is_kernel = folder == "kernels" and re.search(r"kernel|simd|reduce", Path(path).stem)
    return folder == "os" or path == "csrc/base/mutex.h" or bool(is_kernel)


def _check_conditions(source: Source) -> Iterator[Violation]:
    if _may_have_conditions(source.path):
        return
    for number, line in _matches(source, r"^\s*#\s*(if|ifdef|ifndef|elif)\b"):
        yield source.violation(number, "preprocessor", f"{line}: absence is a value, not an #if")


def _check_pragma_once(source: Source) -> Iterator[Violation]:
    if source.path.endswith(".h") and not re.search(r"(?m)^#pragma once$", source.code):
        yield source.violation(1, "pragma-once", "a header starts with #pragma once")


_NOT_A_FUNCTION = re.compile(
    r"^(\s*(public|private|protected)\s*:)*\s*(template\s*<[^{}]*>\s*)?"
    r"(inline\s+|static\s+|constexpr\s+|typedef\s+)*(class|struct|union|enum|namespace|extern)\b"
)


def _cpp_functions(code: str) -> Iterator[tuple[int, int]]:
    """Give (first line, number of lines) of each outermost function body, by its braces.

    This is a heuristic: a block belongs to a function if a `)` stands before its brace, unless the
    text before the brace declares a type or a namespace, or ends in `=`.
    """
    code = re.sub(r"(?m)^\s*#(?:[^\n]*\\\n)*[^\n]*", lambda m: "\n" * m.group().count("\n"), code)
    opened: list[tuple[bool, int]] = []  # (is a function's outermost block, offset)
    start = 0
    for match in re.finditer(r"[{};]", code):
        if match.group() == "{":
            before = code[start : match.start()].strip()
            is_function = (
                ")" in before and not before.endswith("=") and not _NOT_A_FUNCTION.match(before)
            )
            inside = any(function for function, _ in opened)
            opened.append((is_function and not inside, match.start()))
        elif match.group() == "}" and opened:
            is_function, offset = opened.pop()
            if is_function:
                first = code.count("\n", 0, offset) + 1
                yield first, code.count("\n", offset, match.start()) + 1
        start = match.end()


def _check_cpp_functions(source: Source) -> Iterator[Violation]:
    for line, length in _cpp_functions(source.code):
        if length > MAX_FUNCTION_LINES:
            yield source.violation(line, "function-length", f"{length} lines")


def _check_cpp_names(source: Source) -> Iterator[Violation]:
    for number, line in _matches(source, r"^\s*(class|struct|enum class)\s+\w+"):
        name = re.findall(r"\w+", line.split("{")[0].split(":")[0])
        if any(FORBIDDEN_WORDS.search(word) for word in name):
            yield source.violation(number, "name", line)


# Python


def _part_of(module: str, parts: Iterable[str] = PYTHON_PARTS) -> str:
    """Return the part that a dotted module name belongs to: the longest name that fits."""
    return max((part for part in parts if f"{module}.".startswith(f"{part}.")), key=len)


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(source: Source, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Give (line, absolute module name) of every import, wherever it stands."""
    package = source.path.rsplit("/", 1)[0].split("/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from hvdlite import launch` imports the part hvdlite.launch.
                nested = f"{module}.{alias.name}"
                yield node.lineno, nested if nested in PYTHON_PARTS else module


def _check_imports(source: Source) -> Iterator[Violation]:
    if not source.path.startswith("hvdlite/") or source.path.endswith(".pyi"):
        return
    module_of = _module_of(source.path)
    part = _part_of(module_of)
    allowed = {part, *PYTHON_PARTS[part]}
    if source.path in FACES:
        allowed.add(FACES[source.path])
    known = (*PACKAGES_OF_PART, "hvdlite")
    packages = PACKAGES_OF_PART.get(_part_of(module_of, known), set())
    for line, module in _imports(source, ast.parse(source.text)):
        top = module.split(".")[0]
        if top == "hvdlite":
            if _part_of(module) not in allowed:
                yield source.violation(line, "layer", f"{part} must not import {module}")
        elif top not in sys.stdlib_module_names and top not in packages:
            yield source.violation(line, "package", f"{part} must not import {module}")


def _check_environ(source: Source) -> Iterator[Violation]:
    readers = source.path.startswith(ENVIRONMENT_READERS)
    if readers or not source.path.startswith("hvdlite/"):
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = node.value.id == "os" and node.attr in names
        elif isinstance(node, ast.ImportFrom):
            found = node.module == "os" and any(alias.name in names for alias in node.names)
        else:
            continue
        if found:
            yield source.violation(node.lineno, "environment", ast.unparse(node))


def _check_devices(source: Source) -> Iterator[Violation]:
    # Without one, torch.set_default_device decides, and only in the thread that called it.
    if not source.path.startswith("hvdlite/"):
        return
    for node in ast.walk(ast.parse(source.text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        maker = node.func.attr if ast.unparse(node.func.value) == "torch" else ""
        if maker in TENSOR_MAKERS and not any(word.arg == "device" for word in node.keywords):
            yield source.violation(node.lineno, "device", ast.unparse(node))


def _check_python_definitions(source: Source) -> Iterator[Violation]:
    for node in ast.walk(ast.parse(source.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if FORBIDDEN_WORDS.search(node.name):
            yield source.violation(node.lineno, "name", node.name)
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES and not isinstance(node, ast.ClassDef):
            yield source.violation(node.lineno, "function-length", f"{node.name}: {length} lines")


Check = Callable[[Source], Iterator[Violation]]
COMMON_CHECKS: tuple[Check, ...] = (_check_length, _check_file_name)
CPP_CHECKS: tuple[Check, ...] = (
    _check_includes,
    _check_cpp_words,
    _check_conditions,
    _check_pragma_once,
    _check_cpp_functions,
    _check_cpp_names,
)
PYTHON_CHECKS: tuple[Check, ...] = (
    _check_imports,
    _check_environ,
    _check_devices,
    _check_python_definitions,
)
