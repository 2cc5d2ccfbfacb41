"""The examples for Ray learn the digits, and the snippets of docs/ray.md run."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.ray_clusters import cluster

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"<!-- snippet: file (\S+) -->\n```python\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    """A cluster with room for two workers of each of two trials; its temporary folder."""
    with cluster(cpus=4) as folder:
        yield folder


def run_example(name: str, *arguments: str) -> None:
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        sys.argv = before


def test_digits_are_learnt_by_the_workers_of_ray_train(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("ray_digits.py", "--output", str(folder / "train"))
    found = re.search(r"test accuracy ([\d.]+)% with 2 workers", capsys.readouterr().out)
    assert found is not None and float(found[1]) >= 97.0


@pytest.mark.parametrize(
    ("name", "text"), SNIPPET.findall((ROOT / "docs" / "ray.md").read_text(encoding="utf-8"))
)
def test_snippet_of_the_page_runs(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
