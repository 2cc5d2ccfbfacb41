"""The collectives of PyTorch tensors, and their gradients."""
