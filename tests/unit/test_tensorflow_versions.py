"""The files that `make test-tf-versions` runs on older releases of TensorFlow exist."""

from __future__ import annotations

from pathlib import Path

import tensorflow_versions

ROOT = Path(__file__).resolve().parents[2]


def test_files_for_older_releases_of_tensorflow_exist() -> None:
    assert len(list(ROOT.glob(tensorflow_versions.TESTS))) > 1
