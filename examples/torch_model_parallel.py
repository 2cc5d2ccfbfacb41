"""Train a small transformer on handwritten digits with data, tensor and pipeline parallelism.

    hvdlite-run -np 8 python examples/torch_model_parallel.py

The 8 rows of an image are 8 tokens. PyTorch's own tools do the work over hvdlite: DTensor shares
the heads and hidden units of each block among 2 ranks, a pipeline has 2 stages of 2 blocks, and
FSDP shards each stage over 2 replicas. With -np 1 one process has the same losses. It reads 97 %.
"""

import argparse
import warnings

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEAD, BLOCKS = 32, 8, 4
BATCH, MICRO_BATCHES = 128, 4  # BATCH is that of all replicas together
TEST_IMAGES = 3 * BATCH  # of 1,797; a pipeline takes batches of one size


class Block(nn.Module):
    """Attention and an MLP; a rank has all of the heads and hidden units, or some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        projected = (project(normed) for project in (self.query, self.key, self.value))
        heads = (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in projected)
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


def make_stage(stage: int, stages: int) -> nn.Sequential:
    """Make the whole model, the same on every rank, and return the layers of one stage."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Linear(16, WIDTH), *blocks, nn.Flatten(), nn.Linear(8 * WIDTH, 10))
    first, end = (1 + BLOCKS * edge // stages for edge in (stage, stage + 1))
    return model[first if stage else 0 : end if stage + 1 < stages else len(model)]


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images, whose rows also say where they are, and their digits, shuffled."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor(digits.images, dtype=torch.float32)[order] / 8 - 1
    places = torch.eye(8).expand(len(rows), 8, 8)
    return torch.cat([rows, places], dim=2), torch.tensor(digits.target)[order]


def train(epochs: int) -> None:
    dist.init_process_group("hvdlite")
    world = dist.get_world_size()
    sizes = stages, replicas, _ = (2, world // 4, 2) if world > 1 else (1, 1, 1)
    ranks = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    stage, replica, column = (ranks[axis].get_local_rank() for axis in ("pp", "dp", "tp"))
    first, last = stage == 0, stage == stages - 1
    layers = make_stage(stage, stages)
    for block in (layer for layer in layers if isinstance(layer, Block)):
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        rows = {name: RowwiseParallel() for name in ("out", "down")}
        parallelize_module(block, ranks["tp"], columns | rows)
        fully_shard(block, mesh=ranks["dp"])
    fully_shard(layers, mesh=ranks["dp"])
    part = PipelineStage(layers, stage, stages, torch.device("cpu"), group=ranks.get_group("pp"))
    schedule = Schedule1F1B(part, MICRO_BATCHES, nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.005)
    images, labels = load()
    for epoch in range(epochs + 1):  # the last one is the test
        testing, results = epoch == epochs, torch.zeros(2)
        torch.manual_seed(epoch)
        order = TEST_IMAGES + torch.randperm(len(labels) - TEST_IMAGES)
        batches = (torch.arange(TEST_IMAGES + 1) if testing else order).split(BATCH)[:-1]
        for batch in batches:
            mine, losses = batch.chunk(replicas)[replica], []
            inputs = (images[mine],) if first else ()
            targets = {"target": labels[mine], "losses": losses} if last else {}
            optimizer.zero_grad()
            outputs = (schedule.eval if testing else schedule.step)(*inputs, **targets)
            if not testing:
                optimizer.step()
            if last:
                right = (outputs.argmax(1) == labels[mine]).float().mean()
                results += torch.stack([torch.stack(losses).mean().detach(), right]) / len(batches)
        dist.all_reduce(results, dist.ReduceOp.AVG, group=ranks.get_group("dp"))
        loss, accuracy = results.tolist()
        if last and replica == column == 0:
            title = "test:" if testing else f"epoch {epoch}:"
            print(title, f"loss {loss:.4f}, accuracy {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits")
    parser.add_argument("--epochs", type=int, default=5)
    warnings.simplefilter("ignore")  # PyTorch warns of what it will rename in its own modules
    train(parser.parse_args().epochs)
