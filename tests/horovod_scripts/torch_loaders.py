"""Samplers, loaders, training and validation, as scripts for image data have them."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=24, help="of all ranks together")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = hvd.SyncBatchNorm(4)
        self.output = torch.nn.Linear(4 * 6 * 6, 4)

    def forward(self, images):
        return self.output(F.relu(self.norm(self.conv(images))).flatten(1))


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def loader_of(dataset, batch_size, shuffle):
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def main():
    args = parser.parse_args([])
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images = torch.randn(96, 1, 8, 8)
    labels = images.mean((1, 2, 3)).mul(40).long().clamp(0, 3)
    mine = args.batch_size // hvd.size()
    train_loader, train_sampler = loader_of(TensorDataset(images, labels), mine, shuffle=True)
    test_loader, _ = loader_of(TensorDataset(images[:48], labels[:48]), mine, shuffle=False)

    model = Net()
    factor = hvd.local_size() if args.use_adasum and hvd.nccl_built() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * factor, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=2.0,
    )
    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss, right = 0.0, 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.cross_entropy(output, target).item() / len(test_loader)
                right += (output.argmax(1) == target).float().mean().item() / len(test_loader)
        test_loss = metric_average(test_loss, "avg_loss")
        right = metric_average(right, "avg_accuracy")
        if hvd.rank() == 0:
            print("loss", test_loss, right)


if __name__ == "__main__":
    main()
