"""Run the tests of the TensorFlow adapter on older TensorFlow releases, from one wheel.

`make test-tf-versions` runs this program. It builds the wheel once. For each release it makes an
environment below build/tensorflow, which is kept so that a second run is quick, installs the wheel
and the release there, and runs the tests with them rather than with the package in this folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("2.16.2", "2.18.1")
TESTS = "tests/parallel/tensorflow/test_tensorflow_*.py"
NEEDS = ("pytest>=8", "pytest-timeout", "scikit-learn")


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command; if it fails, exit with its status."""
    print("+", *(str(word) for word in command), flush=True)
    status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if status:
        sys.exit(status)


def test(release: str, wheel: Path) -> None:
    """Install one release and the wheel, and run the tests with them."""
    environment = ROOT / "build" / "tensorflow" / release
    python = environment / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", environment)
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, f"tensorflow-cpu=={release}", *NEEDS, wheel)
    run(*pip, "--no-deps", "--force-reinstall", wheel)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "HVDLITE_", "HOROVOD_")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    tests = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(TESTS))
    assert tests, f"no file is {TESTS}"
    begun = time.monotonic()
    # -P keeps the working directory off the path, so that the tests import the wheel's hvdlite.
    run(python, "-P", "-m", "pytest", "-q", *tests, env=variables)
    print(f"TensorFlow {release}: passed in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    """Build the wheel once, and run the tests with every release."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdlite wheel ") as folder:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        for release in arguments.releases:
            test(release, wheel)


if __name__ == "__main__":
    main()
