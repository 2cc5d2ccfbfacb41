"""The tree obeys the rules of docs/architecture.md, and the check finds planted violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture_rules import Violation, find_violations

ROOT = Path(__file__).resolve().parents[2]


def test_tree_obeys_the_rules() -> None:
    assert (ROOT / "csrc" / "base").is_dir()
    assert (ROOT / "hvdlite").is_dir()
    violations = find_violations(ROOT)
    assert not violations, "\n" + "\n".join(map(str, violations))


def plant(root: Path, path: str, text: str) -> list[Violation]:
    """Write one file into an empty tree and check the tree."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return find_violations(root)


LONG_BODY = "  work();\n" * 81

VIOLATIONS = {
    "include points up": ("layer", "csrc/base/status.cc", '#include "transport/channel.h"\n'),
    "include points sideways": ("layer", "csrc/wire/message.cc", '#include "kernels/chunks.h"\n'),
    "lowest folder includes another": ("layer", "csrc/base/log.cc", '#include "os/fd.h"\n'),
    "include without a folder": ("layer", "csrc/wire/message.cc", '#include "message.h"\n'),
    "folder in no layer": ("layer", "csrc/misc/odd.cc", "int odd();\n"),
    "getenv": ("environment", "csrc/os/cpu.cc", 'auto home = std::getenv("HOME");\n'),
    "pybind11": ("pybind11", "csrc/engine/engine.cc", "#include <pybind11/pybind11.h>\n"),
    "bare mutex": ("mutex", "csrc/engine/queue.cc", "std::mutex mutex;\n"),
    "bare mutex in a C++ test": ("mutex", "tests/cpp/queue_test.cc", "std::mutex mutex;\n"),
    "bare condition": ("mutex", "csrc/wire/a.cc", "std::condition_variable_any any;\n"),
    "#ifdef": ("preprocessor", "csrc/gpu/nccl.cc", "#ifdef __x86_64__\n#endif\n"),
    "#if in a file that is not a kernel": (
        "preprocessor",
        "csrc/kernels/ring.cc",
        "#if __AVX2__\n#endif\n",
    ),
    "no #pragma once": ("pragma-once", "csrc/base/a.h", "// comment\nint a();\n"),
    "long file": ("file-length", "csrc/base/a.cc", "int a;\n" * 501),
    "long Python file": ("file-length", "hvdlite/ops.py", "a = 1\n" * 501),
    "long example": ("file-length", "examples/digits.py", "a = 1\n" * 111),
    "long function": ("function-length", "csrc/base/a.cc", "void a() {\n" + LONG_BODY + "}\n"),
    "long function in a class": (
        "function-length",
        "csrc/base/a.cc",
        "namespace n {\ntemplate <class T>\nclass A : public B<T> {\n public:\n"
        "  A() : b_(1) {\n" + LONG_BODY + "  }\n};\n}\n",
    ),
    "long Python function": (
        "function-length",
        "tests/unit/test_a.py",
        "def test_a():\n" + "    work()\n" * 80,
    ),
    "file called util": ("name", "csrc/base/string_util.cc", "int a;\n"),
    "class called helper": ("name", "csrc/base/a.cc", "class RingHelper {};\n"),
    "Python class called manager": ("name", "hvdlite/a.py", "class RankManager: pass\n"),
    "adapter imports adapter": ("layer", "hvdlite/torch/a.py", "from hvdlite.keras import x\n"),
    "adapter imports launcher": ("layer", "hvdlite/torch/a.py", "from hvdlite import launch\n"),
    "neutral imports adapter": ("layer", "hvdlite/ops.py", "def f():\n    import hvdlite.torch\n"),
    "relative import of an adapter": ("layer", "hvdlite/ops.py", "from .torch import ops\n"),
    "rendezvous imports launcher": (
        "layer",
        "hvdlite/rendezvous/a.py",
        "from ..launch import cli\n",
    ),
    "launcher imports adapter": ("layer", "hvdlite/launch/a.py", "import hvdlite.tensorflow\n"),
    "neutral imports a framework": ("package", "hvdlite/ops.py", "import torch.nn\n"),
    "adapter imports a foreign framework": ("package", "hvdlite/torch/a.py", "import keras\n"),
    "os.environ": ("environment", "hvdlite/ops.py", "import os\na = os.environ['A']\n"),
    "tensor on the default device": ("device", "hvdlite/torch/a.py", "a = torch.zeros(3)\n"),
    "getenv by its name": ("environment", "hvdlite/torch/a.py", "from os import getenv\n"),
}


@pytest.mark.parametrize("rule, path, text", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_planted_violation_is_caught(tmp_path: Path, rule: str, path: str, text: str) -> None:
    violations = plant(tmp_path, path, text)
    assert [(v.rule, v.path) for v in violations] == [(rule, path)]


INNOCENT = {
    "include points down": ("csrc/engine/a.cc", '#include "base/status.h"\n#include <mutex>\n'),
    "include within the folder": ("csrc/wire/message.cc", '#include "wire/message.h"\n'),
    "words in comments and strings": (
        "csrc/wire/a.cc",
        '// std::mutex and getenv\n/* pybind11\n#if 0 */\nauto a = "getenv // std::mutex";\n',
    ),
    "getenv in the config file": ("csrc/base/config.cc", 'auto a = std::getenv("A");\n'),
    "#if in a SIMD kernel": ("csrc/kernels/reduce_kernels.cc", "#if __AVX2__\n#endif\n"),
    "long table": ("csrc/base/a.cc", "const Row kRows[] = {\n" + "  {f(), 1},\n" * 90 + "};\n"),
    "many short functions": (
        "csrc/base/a.cc",
        "namespace n {\n" + "int a(int b) {\n  return b;\n}\n" * 40 + "}\n",
    ),
    "environment in its module": ("hvdlite/rendezvous/environment.py", "import os\nos.environ\n"),
    "adapter imports downwards": (
        "hvdlite/torch/a.py",
        "import torch\nfrom hvdlite import basics\nfrom ..ops import Sum\nfrom . import ops\n",
    ),
}


@pytest.mark.parametrize("path, text", INNOCENT.values(), ids=INNOCENT.keys())
def test_innocent_file_is_accepted(tmp_path: Path, path: str, text: str) -> None:
    assert plant(tmp_path, path, text) == []
