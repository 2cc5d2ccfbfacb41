"""What callbacks for models of Keras 3 and of Keras 2 (`tf_keras`) have in common."""

from __future__ import annotations

import functools
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


_HOOKS = ("on_epoch_begin", "on_train_batch_end", "on_test_begin", "on_epoch_end")


def last_callbacks(callback: Any) -> list[Any] | None:
    """Return callbacks that `fit` calls after all of the user's, to add to; None outside of `fit`.

    Of their hooks it calls those for the begin and the end of epochs, the end of training batches
    and the begin of validation, until the training ends.
    """
    # `fit` puts its History, which it keeps in `model.history`, behind the user's callbacks. The
    # hooks of this object call the others.
    history = getattr(callback.model, "history", None)
    if history is None or callback.params is None or history.params is not callback.params:
        return None  # The script calls the hooks itself.
    kept = vars(history).get("_hvdlite_last")
    if kept is None or kept[0] is not callback.params:  # An earlier `fit` may have raised.
        for hook in _HOOKS:
            vars(history).pop(hook, None)
        last: list[Any] = []
        kept = vars(history)["_hvdlite_last"] = (callback.params, last)
        for hook in _HOOKS:
            vars(history)[hook] = functools.partial(_call_all, getattr(history, hook), last, hook)
        vars(history)["on_train_end"] = functools.partial(_end, history)
    return kept[1]  # type: ignore[no-any-return]


def _call_all(own: Any, last: list[Any], hook: str, *args: Any, **options: Any) -> None:
    own(*args, **options)
    for one in last:
        getattr(one, hook)(*args, **options)


def _end(history: Any, logs: Logs = None) -> None:
    """Make the History an ordinary one again."""
    for name in (*_HOOKS, "_hvdlite_last", "on_train_end"):
        vars(history).pop(name, None)
    history.on_train_end(logs)
