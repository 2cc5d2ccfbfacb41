"""Find phrases that docs/style.md rules out, in comments, messages and pages.

    python tools/words.py [FILE...]

Without files it reads all that git knows. It prints one line for each phrase, with what to write
instead, and exits with status 1 if there is one. It cannot judge grammar: the rest of the page is
for readers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDINGS = {".cc", ".cu", ".h", ".inc", ".md", ".py", ".pyi", ".sh", ".toml"}
# They name the phrases, or are not ours to reword.
EXEMPT = {"docs/style.md", "tools/words.py", "tests/unit/test_words.py", "CHANGELOG.md"}

# By phrase: what to write instead. Spaces also match line breaks with comment marks.
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


def phrases_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Give (line, phrase, advice) of each phrase in a text.

    Example:
        >>> list(phrases_in("rank 3 is no member"))
        [(1, 'is no ', "say 'is not a', or 'there is no'")]
        >>> list(phrases_in("there is no driver; it is no longer there"))
        []
    """
    for pattern, advice in PHRASES.items():
        for match in re.finditer(pattern.replace(" ", r"\s(?:\s*(?://|#)\s*)?"), text):
            before = text[max(0, match.start() - 8) : match.end()]
            if ALLOWED.search(before):
                continue
            line = text.count("\n", 0, match.start()) + 1
            yield line, match.group(), advice


def tracked_files() -> Iterator[str]:
    """Name the files that git knows and that hold sentences of ours."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.splitlines():
        if Path(name).suffix in ENDINGS and name not in EXEMPT and (ROOT / name).is_file():
            yield name


def main(names: Iterable[str]) -> int:
    """Print what is found; return the exit status."""
    found = 0
    for name in names or tracked_files():
        text = (ROOT / name).read_text(encoding="utf-8")
        if text.startswith("// Made by tools/"):
            continue
        for line, phrase, advice in sorted(phrases_in(text)):
            found += 1
            print(f"{name}:{line}: '{' '.join(phrase.split())}': {advice} (docs/style.md)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
