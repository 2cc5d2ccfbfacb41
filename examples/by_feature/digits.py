"""Handwritten digits, and a small network for them: what the examples beside this file share."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd


def load_datasets():
    """Return 1,440 images for training and 357 for the test, the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in order.split([1440, 357])]


def make_loader(dataset, batch_size=32, **options):
    """Return a loader of this rank's part of a data set."""
    sampler = hvd.DistributedSampler(dataset)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(model, dataset):
    """Return the share of a data set that the model recognises; all ranks count their part."""
    images, labels = dataset[hvd.rank() :: hvd.size()]
    with torch.inference_mode():
        right = (model(images).argmax(1) == labels).sum()
    return hvd.allreduce(right, op=hvd.Sum).item() / len(dataset)
