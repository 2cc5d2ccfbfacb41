"""Layers that ranks share, by hand and with DTensor, train as in one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.mesh import Mesh
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.distributed.distributed_worlds import start
from parallel.torch.models.references import (
    STEPS,
    descent,
    distance,
    inputs_and_targets,
    train,
    trained_alone,
)

pytestmark = pytest.mark.long

PRELOAD = ("torch._dynamo",)
WIDTH = 8
WORDS = 24
LENGTH = 12
MLP = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def body() -> dict[str, str]:
    # torch warns of what it will rename, and of unused features of its own.
    outcomes = run_all(globals(), start, lambda: warnings.simplefilter("ignore"))
    dist.destroy_process_group()
    return outcomes


class Network(nn.Module):
    """Two layers, of which ranks can share the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class SharedByHand(nn.Module):
    """Holds this rank's hidden units of a Network."""

    def __init__(self, network: Network, shared: hvd.ProcessSet) -> None:
        super().__init__()
        self.shared = shared
        units = torch.arange(16).chunk(len(shared.ranks))[shared.ranks.index(hvd.rank())]
        self.up = nn.Parameter(network.up.weight.detach()[units].clone())
        self.up_bias = nn.Parameter(network.up.bias.detach()[units].clone())
        self.down = nn.Parameter(network.down.weight.detach()[:, units].clone())
        self.down_bias = nn.Parameter(network.down.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = hvd.copy_to(x, self.shared)
        hidden = functional.gelu(functional.linear(entered, self.up, self.up_bias))
        left = hvd.reduce_from(functional.linear(hidden, self.down), self.shared)
        return x + left + self.down_bias


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = inputs_and_targets(step, WIDTH)
    return functional.mse_loss(model(x), y)


def loss_of_replica(model: nn.Module, step: int, replica: int, replicas: int) -> torch.Tensor:
    x, y = (part.chunk(replicas)[replica] for part in inputs_and_targets(step, WIDTH))
    return functional.mse_loss(model(x), y)


def meshes() -> list[Mesh]:
    """Return the meshes of this world that share layers."""
    size = hvd.size()
    return [hvd.mesh(tp=tp) for tp in {2, size}]


def scenario_by_hand() -> None:
    network = Network()
    expected = trained_alone(network, loss_of)
    for mesh in meshes():
        model = SharedByHand(network, mesh.tp)
        optimizer = hvd.DistributedOptimizer(
            descent(model.parameters()), model.named_parameters(), process_set=mesh.dp
        )
        replica, replicas = mesh.coordinates.dp, len(mesh.dp.ranks)
        train(model, lambda m, s, r=replica, n=replicas: loss_of_replica(m, s, r, n), optimizer)
        assert distance(model, SharedByHand(expected, mesh.tp)) < 1e-6


def scenario_by_hand_the_input_has_its_gradient() -> None:
    network = Network()
    for mesh in meshes():
        gradients, penalties = [], []
        for model in (network, SharedByHand(network, mesh.tp)):
            x = inputs_and_targets(0, WIDTH)[0].requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradients.append(gradient)
            penalties.append(torch.autograd.grad(gradient.square().sum(), x)[0])
        assert torch.allclose(*gradients, atol=1e-5)
        assert torch.allclose(*penalties, rtol=1e-4, atol=1e-4)


def scenario_no_gradient_is_needed_and_the_copy_is_not_overwritten() -> None:
    everyone = hvd.global_process_set
    x = torch.ones(3)
    assert torch.equal(hvd.copy_to(x, everyone), x)
    assert not hvd.reduce_from(x, everyone).requires_grad
    assert torch.equal(hvd.reduce_from(x, everyone, name="again"), x * hvd.size())
    copied = hvd.copy_to(x.clone().requires_grad_(), everyone)
    try:
        copied += 1
    except RuntimeError as error:
        assert "view" in str(error)
    else:
        raise AssertionError("the input was overwritten")


def scenario_device_mesh_has_the_same_ranks() -> None:
    mesh = hvd.mesh(tp=2)
    device_mesh = init_device_mesh(
        "cpu", (1, hvd.size() // 2, 2), mesh_dim_names=("pp", "dp", "tp")
    )
    for axis in ("dp", "tp", "pp"):
        ours = getattr(mesh, axis)
        assert dist.get_process_group_ranks(device_mesh[axis].get_group()) == ours.ranks
        assert device_mesh[axis].get_local_rank() == ours.rank()


def scenario_plain_collectives_refuse_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    split = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for call in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allgather,
        lambda tensor: hvd.send(tensor, to=(hvd.rank() + 1) % hvd.size()),
        lambda tensor: hvd.copy_to(tensor, hvd.global_process_set),
        lambda tensor: hvd.broadcast_parameters({"split": tensor}, root_rank=0),
    ):
        with pytest.raises(hvd.ArgumentError, match="is a DTensor, which has no memory of its own"):
            call(split)
    model = parallelize_module(Network(), mesh, MLP)
    optimizer = hvd.DistributedOptimizer(descent(model.parameters()), model.named_parameters())
    with pytest.raises(hvd.ArgumentError, match="is a DTensor, which has no memory of its own"):
        train(model, loss_of, optimizer)
    assert hvd.allgather(split.to_local()).tolist() == list(range(8))


def scenario_columns_and_rows() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    model = Network()
    expected = trained_alone(model, loss_of)
    train(parallelize_module(model, mesh, MLP), loss_of)
    assert distance(model, expected) < 1e-6


class Language(nn.Module):
    """Embeds words, and says what the next word may be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.network = Network()
        self.last_norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(words))
        return self.output(self.last_norm(self.network(hidden)))


SEQUENCE_PARALLEL: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "network.up": ColwiseParallel(input_layouts=Shard(1)),
    "network.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "network": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False
    ),
    "last_norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def words_loss(model: nn.Module, step: int) -> torch.Tensor:
    words = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    logits = model(words)
    return functional.cross_entropy(logits.flatten(0, 1), (words * 5 + 1).flatten() % WORDS)


def scenario_sequence_parallel_words_and_loss_parallel() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),))
    model = Language()
    expected = trained_alone(model, words_loss)
    parallelize_module(model, mesh, SEQUENCE_PARALLEL)
    with loss_parallel():
        train(model, words_loss)
    assert model.embedding.weight.to_local().shape == (WORDS // hvd.size(), WIDTH)
    assert distance(model, expected) < 1e-5


def scenario_sharded_and_tensor_parallel() -> None:
    size = hvd.size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Network(), Network(), Network())
    expected = trained_alone(model, loss_of)
    for layer in model:
        parallelize_module(layer, mesh["tp"], MLP)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    replica = mesh["dp"].get_local_rank()
    train(model, lambda m, s: loss_of_replica(m, s, replica, size // 2))
    assert distance(model, expected) < 1e-6


def scenario_sharded_optimizer_state() -> None:
    # Its import warns of what torch itself uses.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Network()
    alone = copy.deepcopy(model)
    adam = torch.optim.Adam(alone.parameters(), lr=0.01)
    train(alone, loss_of, adam)
    replicas = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(replicas, lambda m, s: loss_of_replica(m, s, hvd.rank(), hvd.size()), optimizer)
    assert distance(model, alone) < 1e-5
    optimizer.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        states = optimizer.state_dict()["state"]
        for number, state in adam.state_dict()["state"].items():
            assert states[number]["step"] == STEPS
            assert torch.allclose(states[number]["exp_avg"], state["exp_avg"], atol=1e-6)


test_tensor_parallel = make_tests(body, sizes(2, 4))
