"""`ShardedOptimizer`: the optimizer's state divided among ranks, and what keeps them together."""

from hvdlite.torch.sharded.optimizer import Sharded as Sharded
from hvdlite.torch.sharded.optimizer import ShardedOptimizer as ShardedOptimizer
