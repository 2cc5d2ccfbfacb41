"""Warn if a group of pages has more words than its budget; `make test` shows it at its end.

    python tools/word_budget.py

The groups are the sections of docs/index.md. A warning is not an error: the exit status is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs_site.staging import ROOT, sections_of

# Words, as `wc -w` counts them; 30,000 in all.
BUDGETS = {"Start": 4_400, "How-to": 15_800, "Reference": 7_500, "Internals": 2_300}


def words_of(index: Path) -> dict[str, dict[str, int]]:
    """Return the words of README.md and the pages of docs/, by the groups of docs/index.md."""
    return {
        title: {
            file: len((index.parent / file).read_text(encoding="utf-8").split())
            for _, file in links
            if file == "../README.md" or not file.startswith("..")
        }
        for title, links in sections_of(index.read_text(encoding="utf-8"))
    }


def warnings(groups: dict[str, dict[str, int]]) -> Iterator[str]:
    """Give a line for each group over its budget, with its longest pages."""
    for title, pages in groups.items():
        words = sum(pages.values())
        if words > BUDGETS[title]:
            longest = sorted(pages, key=lambda page: -pages[page])[:3]
            yield (
                f"warning: the pages under {title} in docs/index.md have {words:,} words, more "
                f"than {BUDGETS[title]:,}; the longest are "
                + ", ".join(f"{page} ({pages[page]:,})" for page in longest)
            )


def main() -> None:
    """Print the warnings."""
    for line in warnings(words_of(ROOT / "docs" / "index.md")):
        print(line)


if __name__ == "__main__":
    main()
