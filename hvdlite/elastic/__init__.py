"""Elastic training: ranks die, join and leave, and the training function goes on.

The adapters have states that know their framework: `hvdlite.torch.elastic.TorchState`,
`hvdlite.keras.elastic.KerasState` and `hvdlite.tensorflow.elastic.TensorFlowState`. This package
has what they share, and imports no framework.
"""

from hvdlite.elastic.run import run
from hvdlite.elastic.state import ObjectState, State
from hvdlite.rendezvous.epochs import Epoch, history

__all__ = ["Epoch", "ObjectState", "State", "history", "run"]
