"""A training loop of hvdlite.torch sends no control message once its schedule is frozen."""

from __future__ import annotations

import pytest

from harness import run_world

PRELOAD = ("torch", "hvdlite.torch")
pytestmark = pytest.mark.long  # The core's own tests of it are quick.

# A rank that waits for long thaws the schedule, to prove or rule out a deadlock. On a machine that
# is busy enough any rank may, so nobody proves anything here.
FREEZE = {"HVDLITE_FREEZE": "3", "HVDLITE_DEADLOCK_GRACE": "0"}
NEVER = {"HVDLITE_FREEZE": "0"}


def train(frozen_steps: int) -> dict[str, object]:
    import torch

    import hvdlite.torch as hvd
    from hvdlite import basics

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters()
    )
    batches = torch.Generator().manual_seed(hvd.rank())

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, generator=batches)).square().mean()
        loss.backward()
        optimizer.step()
        return float(hvd.allreduce(loss.detach(), name="loss"))

    losses = [step() for _ in range(30)]
    before = basics.engine().counters()
    losses += [step() for _ in range(frozen_steps)]
    after = basics.engine().counters()
    hvd.barrier()  # nobody leaves before all have counted
    losses += [step() for _ in range(5)]
    result = {
        "messages": after["messages_sent"] - before["messages_sent"],
        "frozen_rounds": after["frozen_rounds"] - before["frozen_rounds"],
        "thaws": basics.engine().counters()["thaws"],
        "losses": losses,
        "weights": [value.tolist() for value in model.state_dict().values()],
    }
    hvd.shutdown()
    return result


@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0], [0, 0, 1]], ids=str)
def test_a_frozen_training_loop_sends_no_message_and_computes_the_same(hosts: list[int]) -> None:
    size = len(hosts)
    frozen = [one.value for one in run_world(size, train, 50, env=FREEZE, hosts=hosts)]
    for one in frozen:
        assert one["messages"] == 0
        assert one["frozen_rounds"] >= 50
        assert one["thaws"] == 1  # the barrier
    if hosts == [0, 0, 1]:
        plain = [one.value for one in run_world(size, train, 50, env=NEVER, hosts=hosts)]
        for a, b in zip(frozen, plain, strict=True):
            assert b["frozen_rounds"] == 0 and b["messages"] > 0
            assert (a["losses"], a["weights"]) == (b["losses"], b["weights"])
