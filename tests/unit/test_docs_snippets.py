"""Every python and bash snippet of README.md, CONTRIBUTING.md and docs/ runs without an error.

The snippets of one page run in order, each in a process of its own, in one temporary folder. An
HTML comment on the line before a fence changes that:

    <!-- snippet: compile-only -->    only compiled (python) or parsed (bash -n)
    <!-- snippet: file train.py -->   saved under that name, for a later bash snippet to start
    <!-- snippet: continues -->       run after the code of the python snippets before it

Importing a framework takes most of the time of the programs. So the `python` of those that use one
forks from a process that has done so (see `forking_python`). The first bash and the first python
snippet of some pages (AS_A_READER) start as the reader would start them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from api_doc import LIST as DOCSTRINGS
from pythons import python_with

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^[ \t]*<!--\s*snippet:\s*(?P<mark>.*?)\s*-->\n)?"
    r"^(?P<indent>[ \t]*)```(?P<language>[^\s`]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
MISNAMED = {"sh": "bash", "shell": "bash", "console": "bash", "py": "python", "python3": "python"}
SECONDS = 240
# The pages that `make test` runs. The others start dozens of programs that import a framework.
MAIN = ("README.md", "docs/quickstart.md")
# A page on each adapter, or on another way to start programs. (On the page on Keras, a command of
# the backend torch starts as the reader's, too.)
AS_A_READER = ("README.md", "docs/tensorflow.md", "docs/elastic.md")
TRAINERS = ("pytorch_lightning", "accelerate", "transformers.trainer")
# By words of a program: what is imported before it. The first pattern that is found decides.
PRELOAD_OF = {
    r"\bhvdlite\.(tensorflow|keras)\b": ("tensorflow",),
    r"\b(pytorch_lightning|accelerate|transformers)\b": TRAINERS,
    r"\b(hvdlite\.torch|import torch)\b": ("torch._dynamo",),
}


@dataclass(frozen=True)
class Snippet:
    line: int
    language: str
    mark: str
    text: str


def snippets_of(page: str) -> Iterator[Snippet]:
    """List the python and bash snippets of a page.

    Raises:
        ValueError: a snippet would not be tested, because its language or mark is not known.
    """
    # Code in a docstring goes on from code that its reader has.
    page = DOCSTRINGS.sub(lambda found: "\n" * found[0].count("\n"), page)
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start("text"))
        language, mark = match["language"], match["mark"] or ""
        if language in MISNAMED:
            raise ValueError(f"line {line}: call it {MISNAMED[language]}, or text for output")
        if language not in ("python", "bash"):
            continue
        if not re.fullmatch(r"|compile-only|continues|file [\w.-]+", mark):
            raise ValueError(f"line {line}: unknown mark {mark!r}")
        indent = len(match["indent"])
        text = "".join(row[indent:] or "\n" for row in match["text"].splitlines(keepends=True))
        yield Snippet(line, language, mark, text)


class PageRun:
    """Runs the snippets of one page in one folder; the first ones may be as a reader's."""

    def __init__(self, folder: Path, as_a_reader: bool) -> None:
        self.folder = folder
        self.program = ""  # the python text so far, for `continues`
        self.forks = set() if as_a_reader else {"bash", "python"}  # the languages that may
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def do(self, snippet: Snippet) -> None:
        if snippet.language == "bash":
            if snippet.mark == "compile-only":
                self._start(["bash", "-n", "-c", snippet.text])
            else:
                self._run_commands(snippet.text)
            return
        compile(snippet.text, f"<line {snippet.line}>", "exec")
        if snippet.mark.startswith("file "):
            (self.folder / snippet.mark.removeprefix("file ")).write_text(snippet.text)
        elif snippet.mark != "compile-only":
            before = self.program if snippet.mark == "continues" else ""
            self.program = before + snippet.text
            script = self.folder / f"snippet_line_{snippet.line}.py"
            script.write_text(self.program)
            python = self._forking_python("python", self.program)
            self._start([python or sys.executable, str(script)], python)

    def _run_commands(self, text: str) -> None:
        scripts = [self.folder / name for name in re.findall(r"[\w-]+\.py\b", text)]
        programs = "".join(script.read_text() for script in scripts if script.exists())
        python = self._forking_python("bash", programs)
        self._start(["bash", "-euo", "pipefail", "-c", text], python)

    def _forking_python(self, language: str, programs: str) -> str | None:
        """Return a `python` that forks, or None; the next ones of this language may fork."""
        found = [modules for words, modules in PRELOAD_OF.items() if re.search(words, programs)]
        if not found or language not in self.forks:
            self.forks.add(language)
            return None
        return python_with(*found[0])

    def _start(self, command: list[str], python: str | None = None) -> None:
        """Run a command to its end, with this `python` in its PATH."""
        environment = self.environment
        if python is not None:
            path = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
            environment = {**environment, "PATH": path, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if result.returncode:
            raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")


def run_page(text: str, folder: Path, as_a_reader: bool = True) -> int:
    """Run the snippets of a page; return their number.

    Raises:
        AssertionError: a snippet failed; the message names its line.
    """
    run = PageRun(folder, as_a_reader)
    count = 0
    for snippet in snippets_of(text):
        count += 1
        try:
            run.do(snippet)
        except (AssertionError, SyntaxError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"snippet at line {snippet.line}: {error}") from error
    return count


def page_of(path: Path) -> Any:
    """Make the parameter of a page, marked `long` if its snippets run and it is not a main one."""
    name = str(path.relative_to(ROOT))
    runs = any(s.mark != "compile-only" for s in snippets_of(path.read_text(encoding="utf-8")))
    return pytest.param(path, id=name, marks=pytest.mark.long if runs and name not in MAIN else ())


@pytest.mark.parametrize("page", [page_of(page) for page in PAGES])
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    as_a_reader = str(page.relative_to(ROOT)) in AS_A_READER
    run_page(page.read_text(encoding="utf-8"), tmp_path, as_a_reader)


def test_readme_shows_how_to_train() -> None:
    languages = [s.language for s in snippets_of((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert {"python", "bash"} <= set(languages)
