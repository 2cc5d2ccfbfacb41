"""The arithmetic of the training in tests, which is exact in any order of ranks.

Weights are integers below `PRIME`. A gradient depends on the worker, the step or the samples, and
the weights before the step, so a step that is lost, done twice, done by other ranks, or computed
from other weights changes all weights after it.
"""

from __future__ import annotations

from collections.abc import Sequence

BUCKETS = 5
LARGE = 1 << 17  # elements of the last bucket
PRIME = 1_000_003
PARTS = 12  # divided by any number of ranks up to 4

# Of torch workers:
ELEMENTS = 1000  # of each parameter
SAMPLES = 203
BATCH = 4


def first_weights() -> list[int]:
    """Return the weights before the first step."""
    return [7 + number for number in range(BUCKETS)]


def contribution(worker: int, step: int, bucket: int, weight: int) -> int:
    """Return the gradient of one worker in one bucket, in every element."""
    return ((worker + 1) * 7919 + (step + 1) * 104729 + bucket * 31 + weight * weight) % PRIME


def updated(weight: int, total: int, ranks: int) -> int:
    """Apply the sum of the gradients of some ranks."""
    return (weight * 5 + total * PARTS // ranks) % PRIME


def sample_gradient(samples: Sequence[int], bucket: int, weight: int) -> int:
    """Return the gradient that a worker computes from some samples."""
    return sum((one + 1) * 7919 + bucket * 31 + weight for one in samples) % PRIME


def stepped(weight: int, total: int, ranks: int) -> int:
    """Apply the average of gradients as the torch workers' optimizer does, which rounds it."""
    return (weight * 5 + round(total / ranks * PARTS)) % PRIME
