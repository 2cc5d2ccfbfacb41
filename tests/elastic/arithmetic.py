"""The arithmetic of core workers, which is exact in any order of ranks.

Weights are integers below `PRIME`. A gradient depends on the worker, the step, and the weights
before the step, so a step that is lost, done twice, done by other ranks, or computed from other
weights changes all weights after it.
"""

from __future__ import annotations

BUCKETS = 5
LARGE = 1 << 17  # elements of the last bucket
PRIME = 1_000_003
PARTS = 12  # divided by any number of ranks up to 4


def first_weights() -> list[int]:
    """Return the weights before the first step."""
    return [7 + number for number in range(BUCKETS)]


def contribution(worker: int, step: int, bucket: int, weight: int) -> int:
    """Return the gradient of one worker in one bucket, in every element."""
    return ((worker + 1) * 7919 + (step + 1) * 104729 + bucket * 31 + weight * weight) % PRIME


def updated(weight: int, total: int, ranks: int) -> int:
    """Apply the sum of the gradients of some ranks."""
    return (weight * 5 + total * PARTS // ranks) % PRIME
