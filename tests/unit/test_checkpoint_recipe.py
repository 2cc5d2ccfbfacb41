"""A process that is killed while it saves, as docs/checkpoints.md does, leaves the old file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unit.test_docs_snippets import ROOT, snippets_of

# The process kills itself at the call of `os.<moment>`, while it replaces 1 by 2.
SAVE = """
import os, pickle, signal, sys
from saving import save
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
save("state", lambda file: pickle.dump(1, file))
setattr(os, sys.argv[1], die)
save("state", lambda file: pickle.dump([2] * 100_000, file))
"""
LOAD = "import pickle; print(pickle.load(open('state', 'rb')))"


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_old_file_is_whole_if_the_process_dies_before_the_new_one_has_its_name(
    moment: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    [saving] = [one.text for one in snippets_of(page) if one.mark == "file saving.py"]
    (tmp_path / "saving.py").write_text(saving)
    (tmp_path / "script.py").write_text(SAVE)
    script = [sys.executable, "script.py", moment]
    assert subprocess.run(script, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    assert load(tmp_path) == "1"
    assert (tmp_path / "state.new").exists()


def load(folder: Path) -> str:
    code = [sys.executable, "-c", LOAD]
    done = subprocess.run(code, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
