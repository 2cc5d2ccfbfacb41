"""How gradients travel between ranks: the buckets, their plan and their memory."""
