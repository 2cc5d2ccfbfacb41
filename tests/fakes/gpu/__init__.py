"""The fake libcuda.so.1 and libnccl.so.2 for tests in Python (README.md says what they do).

run_world(1, body, env=fake_gpu.environment())
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "build" / "cpp" / "fake_gpu"


def environment(folder: Path = FOLDER, **options: str | int) -> dict[str, str]:
    """Give the variables under which a process loads the fakes, with options of README.md.

    Args:
        folder: where libnccl.so.2 is; libcuda.so.1 may be there, too.
        options: other variables.
    """
    if not (FOLDER / "libnccl.so.2").exists():
        raise FileNotFoundError(f"{FOLDER} lacks the fakes: run `make build/cpp/hvdlite_tests`")
    return {
        "LD_LIBRARY_PATH": f"{folder}:{FOLDER}",
        **{name: str(value) for name, value in options.items()},
    }
