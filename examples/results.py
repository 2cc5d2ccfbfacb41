"""Keep what runs of an example measured, and set them side by side, without hvdlite."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median


@dataclass
class Result:
    """What one run of an example measured."""

    ranks: int
    losses: list[float]
    seconds: list[float]  # that each epoch took
    accuracy: float  # on the test images, from 0 to 1

    @property
    def epoch(self) -> float:
        """Return the seconds of an epoch: the median, since the first one also warms up."""
        return median(self.seconds)


def save(result: Result, folder: Path, name: str) -> list[Result]:
    """Write a result to its file; return it with those that runs on other ranks have left there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-{result.ranks}.json").write_text(json.dumps(asdict(result)))
    kept = []
    for file in folder.glob(f"{name}-*.json"):
        with contextlib.suppress(TypeError, ValueError):  # Another version wrote it.
            kept.append(Result(**json.loads(file.read_text())))
    alike = [one for one in kept if len(one.losses) == len(result.losses)]
    return sorted(alike, key=lambda one: one.ranks)


def sentence(result: Result, results: list[Result]) -> str:
    """Say how well and how fast a run learned, and how much faster than one rank."""
    text = (
        f"test accuracy {result.accuracy:.1%}, {result.epoch:.2f} s an epoch on {result.ranks} rank"
    )
    text += "s" * (result.ranks > 1)
    if results[0].ranks == 1 < result.ranks:
        cores = len(os.sched_getaffinity(0))
        limit = min(cores, result.ranks)
        times = f"{results[0].epoch / result.epoch:.2f} times as fast as 1 rank"
        text += f": {times} ({limit} is the limit with {cores} core{'s' * (cores > 1)})"
    return text


def draw(results: list[Result], picture: Path) -> None:
    """Draw the losses of runs, smoothed before their noise, their accuracies and their speeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "accuracy"], ["loss", "speed"]], width_ratios=(2, 1))
    names = [f"{one.ranks} rank{'s' * (one.ranks > 1)}" for one in results]
    colours = [f"C{number}" for number in range(len(results))]
    styles = ["-", "--", ":", "-."]
    for number, (one, name) in enumerate(zip(results, names, strict=True)):
        smooth = [fmean(one.losses[max(0, i - 10) : i + 11]) for i in range(len(one.losses))]
        axes["loss"].plot(one.losses, color=colours[number], alpha=0.2)
        axes["loss"].plot(smooth, styles[number % 4], color=colours[number], label=name)
    axes["loss"].set(xlabel="step", ylabel="loss", yscale="log", title="handwritten digits")
    axes["loss"].legend()
    bars = {
        "accuracy": ("test accuracy", [one.accuracy for one in results], "{:.1%}"),
        "speed": ("times as fast", [results[0].epoch / one.epoch for one in results], "{:.2f}"),
    }
    for part, (title, values, text) in bars.items():
        drawn = axes[part].barh(names, values, color=colours)
        axes[part].bar_label(drawn, [text.format(value) for value in values], padding=3)
        axes[part].set(title=title, xlim=(0, 1.3 * max(values)))
        axes[part].invert_yaxis()
    figure.savefig(picture, dpi=120)
