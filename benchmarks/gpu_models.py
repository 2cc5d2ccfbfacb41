"""The models of gpu_step.py: a ResNet of 50 layers that needs no torchvision, and a transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from step import SEQUENCE, VOCABULARY, Transformer
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut (He et al., 2016, CVPR, arXiv:1512.03385, figure 5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        past = [] if same else convolution(inputs, outputs, 1, stride)
        self.past = nn.Sequential(*past)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.branch(images) + self.past(images))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Make a convolution and its batch normalization."""
    padding = size // 2
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def make_resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Module:
    """Build a ResNet; the default has 25.6 M parameters in 161 tensors."""
    layers = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


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
