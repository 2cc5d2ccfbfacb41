"""The collectives of TensorFlow tensors, and their gradients."""
