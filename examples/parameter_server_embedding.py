"""Learn from a table that no worker could hold: only parameter servers have it.

    hvdlite-run -np 4 --servers 2 python examples/parameter_server_embedding.py --rows 10000000

Each row of the table is a word. Its target follows from its number, and words come as they do in
texts: a few are frequent. A worker pulls the rows of its batch, and pushes their gradients, so that
it needs memory for a batch. The servers divide the rows. With --memory a worker limits itself to so
many MiB more than it has at the start.
"""

import argparse
import resource

import torch

import hvdlite.torch as hvd

BATCH = 256
WIDTH = 16
FREQUENT = 200  # words on which the loss is measured


def words(count: int, rows: int, draws: torch.Generator) -> torch.Tensor:
    """Draw words by Zipf's law: word r comes about as often as 1 / r."""
    return (rows ** torch.rand(count, generator=draws)).long().clamp_(1, rows) - 1


def targets(numbers: torch.Tensor) -> torch.Tensor:
    """Return what the elements of a word's row should add up to: one of -1, 0 and 1."""
    return (numbers * 2654435761 % 3 - 1).float()


def limit_memory(mib: int) -> None:
    """Let this process have so much more address space than it has now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (mib << 20), now + (mib << 20)))


def train(group: hvd.parameter_server.Group, rows: int, steps: int) -> float:
    """Train one worker, and return the loss of the frequent words."""
    table = hvd.RemoteEmbedding(rows, WIDTH, group, std=0.0)  # zeros
    draws = torch.Generator().manual_seed(group.index)
    for _ in range(steps):
        batch = words(BATCH, rows, draws)
        loss = (table(batch).sum(1) - targets(batch)).square().mean()
        loss.backward()  # pushes the gradients of the rows, too
    with torch.no_grad():
        frequent = torch.arange(FREQUENT)
        return (table(frequent).sum(1) - targets(frequent)).square().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a table that only servers hold")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--memory", type=int, metavar="MIB", help="limit of a worker")
    parser.add_argument("--save", help="path of the servers' checkpoints")
    arguments = parser.parse_args()
    with hvd.parameter_server.connect() as group:
        if group.serves:
            # A row that is rare gets larger steps.
            group.serve(lambda rows: torch.optim.Adagrad(rows, lr=0.3), save=arguments.save)
        else:
            if arguments.memory is not None:
                limit_memory(arguments.memory)
            size = arguments.rows * WIDTH * 4 / 2**20
            loss = train(group, arguments.rows, arguments.steps)
            print(f"a table of {size:,.0f} MiB; loss of frequent words {loss:.3f}")
