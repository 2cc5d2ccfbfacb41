"""Behind DistributedOptimizer: the reducer of gradients, its modes, and Adasum."""
