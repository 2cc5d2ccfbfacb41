"""Find phrases that docs/style.md rules out, in comments, messages and pages.

    python tools/words.py [FILE...]

Without files it reads every tracked file of the right type. It prints one line for each phrase that
it finds, with what to write instead, and exits with status 1 if it found one. It cannot judge
grammar; people must check the other rules of the page.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDINGS = {".cc", ".cu", ".h", ".inc", ".md", ".py", ".pyi", ".sh", ".toml"}
# These files name the phrases, or have texts that are not to be changed.
EXEMPT = {"docs/style.md", "tools/words.py", "tests/unit/test_words.py", "CHANGELOG.md"}

# By pattern: what to write instead. A space also matches a line break with a comment mark.
PHRASES = {
    r"\b(is|are|was|were) no (?!(longer|more|less|fewer)\b)": "say 'is not a', or 'there is no'",
    r"\b(Who|who)ever\b": "name who it is",
    r"\bhears? of (it|this|that|them)\b": "say 'gets this error', 'is told'",
    r"\bnone too\b": "say 'may be empty'",
    r"\bby the way\b": "say how it happens, or leave it out",
    r"\bthe ranks' to (refuse|say|decide)\b": "say who refuses, says, decides",
}
# "there is no X" and "if X is no longer" are English.
ALLOWED = re.compile(r"\b([Tt]here|[Ii]t) (is|are|was|were) no ")
# How a comment begins that is not a sentence: its subject is in the code, or nowhere.
FRAGMENT = re.compile(
    r"((?:of|by|so that|that|which|whose|[Ll]ikewise)\b|[Nn](?:one|ull):|(?:Of|By)\b[^.,]*:)"
)


def phrases_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Give (line, phrase, advice) of each phrase in a text."""
    for pattern, advice in PHRASES.items():
        for match in re.finditer(pattern.replace(" ", r"\s(?:\s*(?://|#)\s*)?"), text):
            before = text[max(0, match.start() - 8) : match.end()]
            if ALLOWED.search(" ".join(before.split()) + " "):
                continue
            line = text.count("\n", 0, match.start()) + 1
            yield line, match.group(), advice


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Give (line, comment) of each comment of a Python text, but not the lines that go on."""
    continued = (0, 0)  # A comment here, (line, column), goes on from the line before.
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            if token.start != continued:
                yield line, token.string.removeprefix("#").lstrip()
            alone = not token.line[:column].strip()
            continued = (line + 1, column) if alone else (0, 0)


def cpp_comments(text: str) -> Iterator[tuple[int, str]]:
    """Give (line, comment) of each comment of a C++ text, but not the lines that go on."""
    follows = False
    for number, line in enumerate(text.splitlines(), 1):
        code, mark, comment = line.partition("// ")
        alone = bool(mark) and not code.strip()
        if mark and not (alone and follows):
            yield number, comment
        follows = alone


def fragments_in(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Give (line, begin, advice) of each comment of a file that begins as a fragment."""
    if name.startswith("csrc/"):
        comments = cpp_comments(text)
    elif name.startswith("hvdlite/") and name.endswith(".py"):
        comments = python_comments(text)
    else:
        return
    for line, comment in comments:
        if match := FRAGMENT.match(comment):
            yield line, match[1], "write a whole sentence, with a subject and a verb"


def own_files() -> Iterator[str]:
    """Give the files that may have sentences to check: what git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        if Path(name).suffix in ENDINGS and name not in EXEMPT and (ROOT / name).is_file():
            yield name


def main(names: Iterable[str]) -> int:
    """Print the phrases and fragments in these files, or in all; return the exit status."""
    found = 0
    for name in names or own_files():
        text = (ROOT / name).read_text(encoding="utf-8")
        if text.startswith("// Made by tools/"):
            continue
        for line, phrase, advice in sorted([*phrases_in(text), *fragments_in(name, text)]):
            found += 1
            print(f"{name}:{line}: '{' '.join(phrase.split())}': {advice} (docs/style.md)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
