"""Evaluation on all ranks: every sample counts once, also where ranks have different numbers.

    hvdlite-run -np 2 python examples/by_feature/evaluation.py

It needs a launcher: init_process_group reads the rank from the variables that a launcher sets.
"""

import torch
import torch.distributed as dist
from digits import load_datasets, make_model  # beside this file
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

import hvdlite.torch as hvd


def main():
    hvd.init()
    dist.init_process_group("hvdlite")  # for torchmetrics, which asks torch.distributed
    model, (_, test) = make_model(), load_datasets()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    mine = Subset(test, range(hvd.rank(), len(test), hvd.size()))  # no padding: 179 and 178

    counts = torch.zeros(3, dtype=torch.float64)  # sum of losses, right answers, samples
    metric = MulticlassAccuracy(10, average="micro")
    answers = []
    with torch.inference_mode():
        for images, labels in DataLoader(mine, batch_size=50):
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
            right = (outputs.argmax(1) == labels).sum()
            counts += torch.tensor([loss.item(), right.item(), len(labels)])
            metric.update(outputs, labels)
            answers.append(outputs.argmax(1))
    loss, right, samples = hvd.allreduce(counts, op=hvd.Sum).tolist()
    everything = hvd.allgather(torch.cat(answers))  # rank 0's rows, rank 1's, ...
    if hvd.rank() == 0:
        print(f"loss {loss / samples:.4f}, accuracy {right / samples:.1%} of {samples:.0f} samples")
    assert samples == len(everything) == len(test)
    assert abs(metric.compute().item() - right / samples) < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
