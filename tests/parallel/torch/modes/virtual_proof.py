"""A long test of virtual ranks: `python tests/parallel/torch/modes/virtual_proof.py`.

Nine trainings on real digits have, after 200 steps, the SHA-256 of plain torch in one process, on
any number of ranks and hosts. It prints a JSON line for each placement of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from harness import run_world
from parallel.torch.modes.test_virtual_ranks import PLACEMENTS, hashes, hashes_alone

_DEADLINE = 1800.0  # seconds, which only a hang meets


def main() -> int:
    """Compare all placements, and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each training (200)")
    steps = parser.parse_args().steps
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    given = steps, images.float().reshape(-1, 1, 8, 8) / 16, labels
    (result,) = run_world(1, hashes_alone, *given, timeout=_DEADLINE)
    expected = dict(result.value)
    assert len({*expected.values()}) == len(expected)
    short = {kind: one[:16] for kind, one in expected.items()}
    print(json.dumps({"proof": "virtual ranks", "steps": steps, "alone": short}), flush=True)
    for hosts in PLACEMENTS:
        for result in run_world(len(hosts), hashes, *given, hosts=hosts, timeout=_DEADLINE):
            assert result.value == expected, (hosts, result.rank)
        print(json.dumps({"hosts": hosts, "same": len(expected)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
