"""What callbacks for models of Keras 3 and of Keras 2 (`tf_keras`) have in common."""

from __future__ import annotations

from typing import Any

import keras

Logs = dict[str, Any] | None


class HasBatchHooks:
    """Tells `fit` of Keras 2 (`tf_keras`) which batches the callback wants to see."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class Callback(HasBatchHooks, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback for models of Keras 3 and of Keras 2."""
