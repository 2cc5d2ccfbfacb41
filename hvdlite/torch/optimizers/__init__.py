"""Behind DistributedOptimizer: the reducer of gradients, its buckets, and Adasum."""
