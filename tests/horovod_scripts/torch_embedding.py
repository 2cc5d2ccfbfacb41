"""A sparse embedding, whose gradient travels as rows first, and as a dense tensor then."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F

WORDS, BATCH = 40, 12


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 4, sparse=True)
        self.output = torch.nn.Linear(4, 2)

    def forward(self, words):
        return self.output(self.embedding(words).mean(dim=1))


def train(sparse_as_dense):
    torch.manual_seed(1)
    model = Bag()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (BATCH, 5), generator=generator)
        labels = (words.sum(1) % 2)[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[hvd.rank() :: hvd.size()]), labels)
        loss.backward()
        optimizer.step()
        loss = hvd.allreduce(loss.detach())
        if hvd.rank() == 0:
            print("loss", loss.item())


if __name__ == "__main__":
    hvd.init()
    train(sparse_as_dense=False)
    train(sparse_as_dense=True)
