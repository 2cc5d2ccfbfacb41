"""Process sets of `init` in the worlds of an elastic job."""

from __future__ import annotations

from launcher import run_launcher
from pythons import python_with

# Worker 0 dies; so worker 2, which was rank 2, becomes rank 1 and a member of the set of ranks 0
# and 1. Nobody calls zero_grad(). The job ends when three ranks have met again.
SCRIPT = """
import os, signal, time, torch
import hvdlite.torch as hvd
from hvdlite.rendezvous import epochs

PAIR, OUTER = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])
torch.set_num_threads(1)
hvd.init(process_sets=[PAIR, OUTER])
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weight], lr=0.0), [("weight", weight)], op=hvd.Sum, process_set=PAIR
)

@hvd.elastic.run
def train(state):
    sets = f"sets {PAIR.process_set_id} {OUTER.process_set_id}"
    print(f"{hvd.size()} ranks, {sets}, member: {PAIR.included()}", flush=True)
    while state.step < 10 or hvd.size() < 3:
        weight.grad = None
        weight.sum().backward()
        optimizer.step()
        assert weight.grad.tolist() == 3 * [2.0 if PAIR.included() else 1.0]
        state.step += 1
        if epochs.history()[-1].worker == 0 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        time.sleep(0.02)
    if OUTER.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=OUTER) == 2

train(hvd.elastic.TorchState(step=0))
"""


def test_sets_keep_their_ids_and_an_optimizer_follows_its_members() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "2", "--max-np", "3"),
        *(python_with("torch._dynamo"), "-c", SCRIPT),
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line for line in result.stdout.splitlines() if "member" in line]
    three = [f"[{rank}] 3 ranks, sets 1 2, member: {rank < 2}" for rank in range(3)]
    assert sorted(lines[:3]) == sorted(lines[-3:]) == three
    assert sorted(lines[3:5]) == [f"[{rank}] 2 ranks, sets 1 None, member: True" for rank in (0, 1)]
