"""Build the wheel as a user's pip would, and use it in an empty environment.

`make wheel` runs this program. It builds the sdist, and the wheel from the sdist, both with build
isolation, in build/wheel. Then it runs a world of one and two ranks of hvdlite-run, without torch.
With `--installed` it only runs these, in the environment of its own Python: cibuildwheel tests so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 3000  # only a hang reaches it

TRAIN = """\
from array import array

from hvdlite import _core, basics

basics.init()
rank, size = basics.rank(), basics.size()
data = array("f", [rank + 1.0] * 1000)
address, count = data.buffer_info()
tensor = _core.Tensor("x", _core.DTYPES["float32"], [count], address, address)
basics.engine().allreduce("x", [tensor], _core.REDUCE_OPS["sum"], keep=data).wait(30)
assert data.tolist() == [size * (size + 1) / 2] * 1000, data[:4]
basics.shutdown()
print(f"sum over {size} ranks is right")
"""

# A wheel is compiled file by file, so that a source that lacks an #include of pybind11 shows here.
UNCONVERTED = """\
from hvdlite import _core

owners = [_core, *(it for it in vars(_core).values() if isinstance(it, type))]
docs = [str(it.__doc__) for owner in owners for it in vars(owner).values()]
wrong = [doc.splitlines()[0] for doc in docs if "std::" in doc]
assert not wrong, f"pybind11 converts no such type: {wrong}"
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this environment's paths; return its output, or exit if it fails."""
    print("+", *(str(word) for word in command), flush=True)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "HVDLITE_", "HOROVOD_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    if result.returncode:
        sys.exit(f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result.stdout


def build_wheel(folder: Path) -> Path:
    """Build sdist and wheel into `folder`, and check the content of the wheel."""
    start = time.monotonic()
    # With the build folder as deep as in a working copy, the compiler cache finds its entries.
    deep = "-Cbuild-dir=build/{wheel_tag}"
    run(sys.executable, "-m", "build", deep, "--outdir", folder, ROOT, cwd=ROOT)
    print(f"  {time.monotonic() - start:.0f} s for sdist and wheel, with build isolation")
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "hvdlite/py.typed",
        "hvdlite/_core.pyi",
        "hvdlite/basics.py",
        "hvdlite/compat/horovod/__init__.py",
        "hvdlite/live/report.css",
        "hvdlite/live/report.js",
        "hvdlite_autoload/__init__.py",
        "hvdlite/tensorflow/libhvdlite_tensorflow.so",
    ):
        assert wanted in names, f"{wanted} is missing in {wheel.name}"
    assert any(name.endswith("licenses/LICENSE") for name in names), "no LICENSE in the wheel"
    ours = ("hvdlite/", "hvdlite-", "hvdlite_autoload/")
    strangers = [name for name in names if not name.startswith(ours)]
    assert not strangers, f"the wheel would also install {strangers}"
    print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def use_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel into an empty environment; run one rank there, then two."""
    environment = folder / "an empty environment"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    programs = environment / "bin"
    constraints = ROOT / "constraints.txt"
    run(programs / "python", "-m", "pip", "install", "-q", "-c", constraints, wheel, cwd=folder)
    show = "import hvdlite, hvdlite._core as c; print(hvdlite.__version__, c.__version__)"
    versions = run(programs / "python", "-c", show, cwd=folder).split()
    assert versions[0] == versions[1] == wheel.name.split("-")[1], versions
    use_installed(programs, folder)


def use_installed(programs: Path, folder: Path) -> None:
    """Run one rank, then two, with the programs of an environment that has hvdlite."""
    run(programs / "python", "-c", UNCONVERTED, cwd=folder)
    script = folder / "train.py"
    script.write_text(TRAIN)
    assert "sum over 1 ranks is right" in run(programs / "python", script, cwd=folder)
    output = run(programs / "hvdlite-run", "-np", "2", programs / "python", script, cwd=folder)
    assert output.count("sum over 2 ranks is right") == 2, output


def main() -> None:
    """Build, install and use the wheel."""
    with tempfile.TemporaryDirectory(prefix="hvdlite wheel ") as name:
        folder = Path(name)
        if sys.argv[1:] == ["--installed"]:
            use_installed(Path(sys.executable).parent, folder)
            return
        use_wheel(build_wheel(ROOT / "build/wheel"), folder)
    print("wheel: it installs into an empty environment and runs there")


if __name__ == "__main__":
    main()
