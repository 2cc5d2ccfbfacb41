"""Elastic training with PyTorch: `hvd.elastic.run`, `TorchState` and `ElasticSampler`.

Example:
    >>> sampler = hvd.elastic.ElasticSampler(dataset)
    >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    >>> @hvd.elastic.run
    ... def train(state):
    ...     while state.epoch < 10:
    ...         train_one_epoch(state)
    ...         state.epoch += 1
    ...         state.commit()
    >>> train(state)
"""

from __future__ import annotations

from hvdlite.elastic import history, run
from hvdlite.torch.data import ElasticSampler
from hvdlite.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "history", "run"]
