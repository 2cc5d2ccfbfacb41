"""The models of gpu_step.py: a ResNet of 50 layers and a transformer, in two sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from step_models import SEQUENCE, VOCABULARY, Transformer, make_resnet
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def images(count: int, side: int) -> Batch:
    return torch.randn(count, 3, side, side), torch.randint(1000, (count,))


def tokens(count: int) -> Batch:
    drawn = torch.randint(VOCABULARY, (count, SEQUENCE))
    return drawn, drawn.flatten()


# By name: a function that makes the model, and one that makes a batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "resnet50": (make_resnet, lambda: images(32, 224)),
    "transformer": (lambda: Transformer(256, 16), lambda: tokens(32)),
}
SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "resnet50": (lambda: make_resnet((1, 1, 1, 1), 8), lambda: images(2, 32)),
    "transformer": (lambda: Transformer(32, 2), lambda: tokens(2)),
}
