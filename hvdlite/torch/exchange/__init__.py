"""How gradients travel between ranks: the buckets, their plan and memory, and who owns which."""
