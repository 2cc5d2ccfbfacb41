"""What suspicions say when a worker has several."""

from __future__ import annotations

from hvdlite.launch.elastic.suspicions import Suspicions


def test_later_suspicion_leaves_a_silent_way_with_both_of_its_ends() -> None:
    suspicions = Suspicions()
    suspicions.add(1, 2, "timed out", 0.0, mutual=True)
    suspicions.add(1, 0, "hung up", 0.1)
    assert suspicions.worst({0, 1, 2}) == (2, "worker 1 reported: timed out")
