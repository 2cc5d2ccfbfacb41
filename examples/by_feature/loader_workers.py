"""DataLoader workers: they load and augment; what they draw differs between ranks and workers.

hvdlite-run -np 2 python examples/by_feature/loader_workers.py
"""

import torch
from digits import load_datasets, make_loader  # beside this file
from torch.utils.data import Dataset

import hvdlite.torch as hvd


class Noisy(Dataset):
    """Adds noise to each image; it runs in the workers, which never call hvdlite."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        noise = torch.randn_like(image)
        return image + 0.1 * noise, label, noise[0]


def main():
    hvd.init()
    training, _ = load_datasets()
    # Workers are seeded from this generator: with one seed, all ranks would draw the same noise.
    generator = torch.Generator().manual_seed(1000 + hvd.rank())
    loader = make_loader(Noisy(training), num_workers=2, generator=generator)
    noises = torch.cat([noise for _, _, noise in loader])
    everyone = hvd.allgather(noises)
    if hvd.rank() == 0:
        print(f"{len(everyone)} samples, {len(everyone.unique())} different noises")
    assert len(everyone) == len(training)
    assert len(everyone.unique()) > 0.99 * len(training)


if __name__ == "__main__":  # Workers that are spawned, not forked, import this file.
    main()
