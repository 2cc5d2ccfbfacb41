"""The models that step.py, gpu_step.py and others train, and batches for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 1500
SEQUENCE = 32
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and labels


class Transformer(nn.Module):
    """A small language model: 200 parameter tensors, 2.5 M parameters."""

    def __init__(self, width: int = 128, layers: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(tokens) + self.positions.weight
        logits = self.head(self.norm(self.layers(embedded)))
        return logits.flatten(0, 1)


def tokens(count: int) -> Batch:
    drawn = torch.randint(VOCABULARY, (count, SEQUENCE))
    return drawn, drawn.flatten()


def make_mlp() -> nn.Module:
    """Build five linear layers: 10 tensors, 25 M parameters."""
    widths = [1024, 2560, 2560, 2560, 2560, 1000]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


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


def mlp_batch() -> Batch:
    return torch.randn(32, 1024), torch.randint(1000, (32,))


# By name: a function that makes the model, and one that makes a batch.
Models = dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]]
MODELS: Models = {
    "mlp": (make_mlp, mlp_batch),
    "resnet": (make_resnet, lambda: images(4, 64)),
    "transformer": (Transformer, lambda: tokens(8)),
}
GPU_MODELS: Models = {
    "resnet50": (make_resnet, lambda: images(32, 224)),
    "transformer": (lambda: Transformer(256, 16), lambda: tokens(32)),
}
SMALL_MODELS: Models = {
    "resnet50": (lambda: make_resnet((1, 1, 1, 1), 8), lambda: images(2, 32)),
    "transformer": (lambda: Transformer(32, 2), lambda: tokens(2)),
}
