"""Run torch's own tests of gloo's process group, which its wheel has, with the backend hvdlite.

    python tests/torch_own_tests.py > own.jsonl
    python tests/torch_own_tests.py --backend gloo --only all_reduce
    HVDLITE_REPLACE_GLOO=1 python tests/torch_own_tests.py --backend gloo > replaced.jsonl

The tests ask torch.distributed for gloo, and get a group of hvdlite.
One JSON line per test: passed, skipped or failed, with the last line of the error. Tests that need
a GPU skip themselves. docs/torch_distributed.md says which of them fail, and why. The
tests need the package expecttest, and some minutes, so they are not part of `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import unittest
from typing import Any

WORLD = 3


class Report(unittest.TestResult):
    """Prints a line for each test, as it ends."""

    def addSuccess(self, test: Any) -> None:
        self.tell(test, "passed" if test.started else "skipped")

    def addSkip(self, test: Any, reason: str) -> None:
        self.tell(test, "skipped", reason)

    def addFailure(self, test: Any, error: Any) -> None:
        self.tell(test, "failed", str(error[1]))

    addError = addFailure

    def tell(self, test: Any, outcome: str, text: str = "") -> None:
        lines = [line.strip() for line in text.splitlines() if "Error" in line] or [text.strip()]
        print(json.dumps({"test": name_of(test), "outcome": outcome, "why": lines[-1][:300]}))
        sys.stdout.flush()


def name_of(test: Any) -> str:
    return str(test.id()).rpartition(".")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="hvdlite")
    parser.add_argument("--only", default="", help="a part of the tests' names")
    arguments = parser.parse_args()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD), TEMP_DIR="/tmp")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as theirs

    if "HVDLITE_REPLACE_GLOO" in os.environ:
        # They would look for events of the profiler that have the shapes of the tensors.
        theirs.PROFILING_SUPPORTED_BACKENDS.remove("gloo")
        theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.remove("gloo")
    original = dist.init_process_group

    def init_process_group(*given: Any, **named: Any) -> None:
        original(*given, **{**named, "backend": arguments.backend})

    class Own(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        """Ranks are forked, because importing torch takes longer than most of the tests."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            self.started = bool(self.processes)

        @classmethod
        def _run(cls, *given: Any, **named: Any) -> None:
            torch.set_num_threads(1)
            dist.init_process_group = init_process_group
            super()._run(*given, **named)

    Own.__name__ = "TestDistBackendWithFork"
    names = unittest.TestLoader().getTestCaseNames(Own)
    suite = unittest.TestSuite(Own(name) for name in names if arguments.only in name)
    suite.run(Report())


if __name__ == "__main__":
    main()
