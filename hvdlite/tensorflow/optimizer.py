"""`DistributedOptimizer` under the name that Horovod has for it in `horovod.tensorflow`."""

from __future__ import annotations

from typing import Any

from hvdlite import ops
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.ops import Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras apply the gradients of all ranks.

    Args:
        optimizer: of Keras 3 or of `tf_keras`.
        use_locking, device_dense, device_sparse: without effect, for scripts written for Horovod.
        name, compression, op, process_set: as for `hvdlite.keras.DistributedOptimizer`.
        sparse_as_dense, backward_passes_per_step, average_aggregated_gradients: likewise.
        gradient_predivide_factor, num_groups, groups, scale_local_gradients: likewise.

    Returns:
        The optimizer itself.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 * hvd.size()))
    """
    arguments = dict(locals())  # All but one have the names that they have in hvdlite.keras.
    del arguments["use_locking"]
    from hvdlite import keras

    return keras.DistributedOptimizer(**arguments)
