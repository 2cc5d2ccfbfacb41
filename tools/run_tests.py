"""Run parts of the tests side by side, and sum up: `make test` and `make test-rest`.

The last part writes to the terminal while it runs. Of another one the last line follows when it
ends, or all that it wrote if it failed.
Each part is a session of its own: Ctrl-C interrupts all of them, as it would interrupt pytest
alone, waits until they have cleaned up, and kills what is left after a while.

    python tools/run_tests.py test              # C++, and pytest without the tests marked `long`
    python tools/run_tests.py rest              # the tests marked `long`, and cluster systems
    python tools/run_tests.py rest --workers 3  # so many processes of pytest
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TO_CLEAN_UP = 20.0  # seconds that the parts get after an interrupt
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|deselected|error)")
# Files in the order of their folders: tests/unit, whose files are quick, comes last.
PYTEST = (sys.executable, "-m", "pytest", "--dist", "loadfile", "--no-loadscope-reorder")
CLUSTERS = "tests/clusters"


def parts_of(name: str, workers: int) -> dict[str, list[str]]:
    """Return the commands of `make test` or `make test-rest`; the last one streams."""
    python = [*PYTEST, "-n", str(workers), f"--ignore={CLUSTERS}"]
    if name == "test":
        return {
            "C++": ["build/cpp/hvdlite_tests"],
            "Python": [*python, "-m", "not long", "tests"],
        }
    return {
        "cluster systems": [sys.executable, "-m", "pytest", CLUSTERS],  # They mostly wait.
        "long tests": [*python, "-m", "long", "tests"],
    }


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    status: int
    seconds: float
    counts: Mapping[str, int]


# Ctrl-C or SIGTERM sets it; an exception would lose a part that starts.
interrupted = threading.Event()


class Part:
    """A part that runs; a thread reads what it writes."""

    def __init__(self, name: str, command: Sequence[str], streams: bool) -> None:
        """Start the command in a session of its own."""
        # The summary calls the part `name`. With `streams` the part writes to our stdout; its last
        # lines are kept in any case.
        self.name = name
        self._begun = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it is shown)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(
            command,
            env=environment,  # Thousands of ranks need not compile the same modules.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(streams,), daemon=True)
        self._streams = streams
        self._reader.start()

    def _read(self, streams: bool) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while piece := os.read(output.fileno(), 1 << 16):
                self._output.write(piece)
                if streams:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()

    def ended(self) -> bool:
        """Return whether the command has ended."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to the command and what it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def finish(self) -> Outcome:
        """Return how the command ended; show it, too, unless the command streamed."""
        seconds = time.monotonic() - self._begun
        status = self._process.wait()
        self._reader.join(timeout=5.0)  # A process that it left may hold the pipe.
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.close()
        last = next((row for row in reversed(text.splitlines()) if COUNTED.search(row)), "")
        if not self._streams:
            print(f"\n==== {self.name}\n{text if status else last}", flush=True)
        counts = {kind: int(number) for number, kind in COUNTED.findall(last)}
        return Outcome(self.name, status, seconds, counts)


def run(commands: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """Run the parts; after Ctrl-C or SIGTERM end them, and raise KeyboardInterrupt."""
    last = list(commands)[-1]
    running: list[Part] = []
    outcomes: list[Outcome] = []
    try:
        running += [Part(name, command, name == last) for name, command in commands.items()]
        while running:
            if interrupted.is_set():
                raise KeyboardInterrupt
            for part in [part for part in running if part.ended()]:
                running.remove(part)
                outcomes.append(part.finish())
            time.sleep(0.1)
    finally:
        end(running)
    return outcomes


def end(parts: Sequence[Part]) -> None:
    """Interrupt the parts, and kill what is left of them after a while."""
    deadline = time.monotonic() + TO_CLEAN_UP
    for part in parts:
        part.signal(signal.SIGINT)
    while not all(part.ended() for part in parts) and time.monotonic() < deadline:
        time.sleep(0.1)
    for part in parts:
        part.signal(signal.SIGKILL)
        part.finish()


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Say what each part did, what was left to `make test-all`, and the sum."""
    rows = []
    for outcome in outcomes:
        counts = ", ".join(f"{number} {kind}" for kind, number in outcome.counts.items())
        end = "" if outcome.status == 0 else f", exit status {outcome.status}"
        rows.append(f"{outcome.name}: {counts or 'no test'} in {outcome.seconds:.0f} s{end}")
    total = {
        kind: sum(outcome.counts.get(kind, 0) for outcome in outcomes)
        for kind in ("passed", "failed", "error", "skipped", "deselected")
    }
    if total["deselected"]:
        rows.append(
            f"`make test-all` has besides: {total['deselected']} long tests, and cluster systems"
        )
    rows.append(f"all in {seconds // 60:.0f} min {seconds % 60:.0f} s")
    failed = total["failed"] + total["error"]
    rows.append(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return "\n".join(rows)


def main() -> int:
    """Run the parts of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=("test", "rest"))
    parser.add_argument("--workers", type=int, default=2 + (os.cpu_count() or 1))
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    begun = time.monotonic()
    try:
        outcomes = run(parts_of(options.name, options.workers))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"\n==== make {'test' if options.name == 'test' else 'test-rest'}")
    print(summary(outcomes, time.monotonic() - begun))
    return int(any(outcome.status for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
