"""Elastic training with PyTorch."""

from hvdlite.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
