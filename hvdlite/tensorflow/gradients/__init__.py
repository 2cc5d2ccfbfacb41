"""Gradients of the user's model: the tape, lists of gradients, accumulation."""
