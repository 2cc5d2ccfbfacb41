"""A worker that reduces in a process set of `init`, through deaths and joins.

It prints a line with its process sets at each entry of the training function, and dies where its
arguments, numbers of workers and steps, say so.
"""

from __future__ import annotations

import array
import os
import signal
import sys
import time

from hvdlite import _core, basics
from hvdlite.elastic import epochs, run
from hvdlite.elastic.state import ObjectState
from hvdlite.objects import broadcast_object
from hvdlite.process_sets import ProcessSet

DEATHS = dict(map(int, pair.split(":")) for pair in sys.argv[1:])
PAIR, OUTER = ProcessSet([0, 1]), ProcessSet([0, 2])


def total(name: str, process_set: int) -> int:
    """Return how many ranks take part in an allreduce."""
    cell = array.array("q", [1])
    tensor = _core.Tensor(name, _core.DTYPES["int64"], [1], *2 * [cell.buffer_info()[0]])
    sums = _core.REDUCE_OPS["sum"]
    basics.engine().allreduce(name, [tensor], sums, process_set=process_set, keep=cell).wait()
    return cell[0]


@run
def train(state: ObjectState) -> None:
    """Reduce in all ranks and in the pair until three ranks have met again."""
    worker = epochs.history()[-1].worker
    print(f"sets {basics.size()}: {PAIR.process_set_id} {OUTER.process_set_id}", flush=True)
    while state.step < 30 or basics.size() < 3:
        if PAIR.process_set_id is not None and PAIR.included():
            assert total("pair", PAIR.process_set_id) == 2
        assert total("all", 0) in (1, 2, 3)
        state.step += 1
        if DEATHS.get(worker) == state.step:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step % 5 == 0:
            state.commit()
        time.sleep(0.02)
    if OUTER.included():
        assert total("outer", OUTER.process_set_id or 0) == 2


basics.init(process_sets=[PAIR, OUTER])
train(ObjectState(bcast_object=broadcast_object, get_rank=basics.rank, step=0))
