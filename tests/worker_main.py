"""Be one rank of `harness.run_world`: load the test's function by path, call it, save its value.

Run as `python worker_main.py FOLDER`; FOLDER/task.pickle says what to call, and FOLDER/value.RANK
receives what it returned. SIGUSR1 makes it print the stacks of all its threads.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(module_name: str, path: str, name: str) -> Callable[..., Any]:
    """Import a test file under the name that pytest gave it, and find a function in it."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def main() -> None:
    """Run the task of this rank."""
    # Keras imports these where they are installed, which takes a third of its time.
    sys.modules.update({"sklearn": None, "matplotlib": None})  # type: ignore[dict-item]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = Path(sys.argv[1])
    rank = os.environ["HVDLITE_RANK"]
    task = pickle.loads((folder / "task.pickle").read_bytes())
    if task["source"] is not None:
        exec(compile(task["source"], "<body>", "exec"), {"__name__": "__main__"})
        value = None
    else:
        value = load_function(*task["function"])(*pickle.loads(task["args"]))
    unfinished = folder / f"unfinished.{rank}"
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(folder / f"value.{rank}")


if __name__ == "__main__":
    main()
