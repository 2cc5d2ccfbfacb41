"""Draw the rows of step.py as a picture: bars, with one group for each model.

    python benchmarks/plot.py rows.jsonl picture.png
    python benchmarks/plot.py docs/performance.md docs/performance.svg  # its table of steps

Each number of ranks has a panel. Of a page the table below "A training step" is drawn.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

# Text stays text, and the same rows make the same file.
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "hvdlite"}

STEPS = {
    "compute_ms": "compute and a barrier",
    "one_copy_ms": "share_parameters=True",
    "hvdlite_ms": "hvdlite",
    "ddp_ms": "DistributedDataParallel, gloo",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON lines, as step.py prints them, or a page")
    parser.add_argument("picture", type=Path, help="the PNG or SVG to write")
    arguments = parser.parse_args()
    text = arguments.rows.read_text(encoding="utf-8")
    if arguments.rows.suffix == ".md":
        rows = list(rows_of_page(text))
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not rows:
        parser.error(f"{arguments.rows} holds no row")
    draw(rows, arguments.picture)
    return 0


def rows_of_page(page: str) -> Iterator[dict[str, Any]]:
    """Give the rows of steps in a page, whose table has what contestants add to the compute."""
    section = page.partition("\n## A training step\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    columns = [name.strip() for name in table[0]]
    for cells in table[2:]:
        row = dict(zip(columns, map(str.strip, cells), strict=True))
        compute = float(row["compute"])
        yield {
            "np": int(re.findall(r"--np (\d+)", section)[0]),
            "model": row["model"],
            "compute_ms": compute,
            "one_copy_ms": compute + float(row["one copy adds"]),
            "hvdlite_ms": compute + float(row["hvdlite adds"]),
            "ddp_ms": compute + float(row["DistributedDataParallel adds"]),
        }


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw one panel for each number of ranks."""
    panels = sorted({row["np"] for row in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.8 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for axis, ranks in zip(axes[0], panels, strict=True):
        draw_step(axis, [row for row in rows if row["np"] == ranks])
        axis.set_title(f"step, {ranks} ranks")
        axis.legend()
    metadata = {"Date": None} if picture.suffix == ".svg" else None
    figure.savefig(picture, dpi=120, metadata=metadata)
    pyplot.close(figure)


def draw_step(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw one group of bars for each model, with the range over the turns."""
    labels = {column: label for column, label in STEPS.items() if column in rows[0]}
    width = 0.8 / len(labels)
    for index, (column, label) in enumerate(labels.items()):
        medians = [row[column] for row in rows]
        ranges = [row.get(column.replace("_ms", "_range_ms"), (row[column],) * 2) for row in rows]
        below = [max(0.0, median - low) for median, (low, _) in zip(medians, ranges, strict=True)]
        above = [max(0.0, high - median) for median, (_, high) in zip(medians, ranges, strict=True)]
        positions = [row + (index - (len(labels) - 1) / 2) * width for row in range(len(rows))]
        errors = [below, above] if any(below + above) else None
        bars = axis.bar(positions, medians, width, yerr=errors, capsize=3, label=label)
        axis.bar_label(bars, fmt="%.0f")
    axis.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axis.set_ylabel("median step, ms")
    axis.set_ylim(top=1.3 * axis.get_ylim()[1])  # The legend needs room.


if __name__ == "__main__":
    sys.exit(main())
