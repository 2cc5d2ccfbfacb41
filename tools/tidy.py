"""Run clang-tidy with -Wthread-safety over the sources of a build folder, in parallel."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path


def tidy(build: Path, source: str) -> tuple[str, str]:
    """Check one source; return its name and clang-tidy's complaints ("" if there are none)."""
    command = [
        "clang-tidy",
        "--quiet",
        f"-p={build}",
        "--extra-arg=-Wthread-safety",
        "--extra-arg=-Wno-unknown-warning-option",
        "--extra-arg=-Wno-unknown-pragmas",  # GCC's target pragmas
        source,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return source, (result.stdout + result.stderr) if result.returncode else ""


def main() -> int:
    """Check every source of the build folder; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="folder of compile_commands.json")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--without", help="leave out paths that hold this text")
    options = parser.parse_args()

    commands = json.loads((options.build / "compile_commands.json").read_text())
    files = {entry["file"] for entry in commands}
    sources = sorted(one for one in files if not options.without or options.without not in one)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for source, complaint in pool.map(lambda name: tidy(options.build, name), sources):
            if complaint:
                failed += 1
                print(f"{source}:\n{complaint}")
    print(f"clang-tidy: {len(sources)} files, {failed} with findings")
    return 1 if failed or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
