"""`distribute`: a model whose `fit`, `evaluate` and `predict` use all ranks, as if on one device.

The batch is split, not the data: every rank reads the same batches, and computes its rows of each.
The gradients are averaged with the numbers of rows as weights, and the states of metrics summed, so
that steps, learning rates, losses and what callbacks see are those of one process.
"""

from __future__ import annotations

import inspect
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError
from hvdlite.keras import arrays
from hvdlite.keras.backend import backend_adapter, optimizer_variables
from hvdlite.keras.fit import Callback, Logs, agree_on_end_of_epoch, begin_fit, numbers_in
from hvdlite.keras.gradients import distributed_part
from hvdlite.keras.optimizer import DistributedOptimizer
from hvdlite.objects import broadcast_object
from hvdlite.ops import next_name
from hvdlite.optimizers import subclass_in_place
from hvdlite.process_sets import global_process_set, member_id

# Rank 0 alone has these callbacks, which write. What it restores, all ranks get.
_RANK_0_CALLBACKS = {"BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint"}
_RANK_0_CALLBACKS |= {"RemoteMonitor", "TensorBoard"}


def distribute(model: Any, data: str = "same") -> Any:
    """Let `fit`, `evaluate` and `predict` of a Keras model use all ranks.

    Everything else of the script is as for one device: `batch_size` is the batch of a step over all
    ranks, of which each rank computes its rows; losses, metrics and what `predict` returns are
    those of all ranks; callbacks that write files act on rank 0. So the results are those of one
    process up to rounding, for any number of ranks.

    Args:
        model: a model of Keras 3, compiled or not; its class changes in place. `compile` wraps its
            optimizer. Files hold the plain model.
        data: "same": every rank is given the same data. "sharded": every rank is given its own
            part, in batches of its own, which are taken as they are.

    Returns:
        The model.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: the model or an argument cannot be used.

    Example:
        >>> model = hvd.distribute(build())
        >>> model.compile("adam", "mse")
        >>> model.fit(inputs, targets, batch_size=128, epochs=3)
    """
    size, version = basics.size(), [int(part) for part in keras.__version__.split(".")[:2]]
    fixed = any(one.shape[0] for one in getattr(model, "inputs", None) or [])
    refused = {
        f'data={data!r} is neither "same" nor "sharded"': data not in ("same", "sharded"),
        f"it takes a model of Keras 3, not a {type(model).__name__}; a model of tf_keras takes "
        "hvd.DistributedOptimizer and callbacks": not isinstance(model, keras.Model),
        f"it needs Keras 3.8 or newer, not {keras.__version__}; with this one use "
        "hvd.DistributedOptimizer and callbacks": version < [3, 8],
        "it does not follow the changing ranks of an elastic job; use hvd.DistributedOptimizer "
        "with hvd.elastic.KerasState": basics.in_elastic_job(),
        "this model is distributed already": isinstance(model, _OnAllRanks),
        "the model's inputs have a fixed batch size, but a rank computes a part of each batch": (
            size > 1 and data == "same" and fixed
        ),
    }
    for text, holds in refused.items():
        if holds:
            raise ArgumentError(f"hvd.distribute: {text}")
    backend_adapter().refuse_strategy()
    if size > 1:
        subclass_in_place(model, _OnAllRanks)
        seen = keras.Variable(np.zeros(2), dtype="int64", trainable=False, name="seen")
        vars(model)["_ranks"] = _Ranks(basics.rank(), size, data == "same", seen)
        # What an earlier `fit` has traced contains the steps of one process.
        model.train_function = model.test_function = model.predict_function = None
        model._wrap_optimizers()
    return model


@dataclass
class _Ranks:
    """What a distributed model knows of the ranks."""

    rank: int
    size: int
    splits: bool  # The ranks are given the same data.
    seen: Any  # a variable: a checksum of the batches of a loop, and their number
    optimizers: list[Any] = field(default_factory=list)
    alike: bool = False  # All ranks have begun with the weights of rank 0.
    told: bool = False  # what is not as in one process
    loop: str = ""  # the function of the model that runs
    random_state: Any = None  # of this rank's random layers


class _OnAllRanks:
    """Put before the class of a model."""

    _wrapped_class: Any
    _ranks: _Ranks
    built: Any
    jit_compile: Any

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._wrapped_class

    def compile(self, *args: Any, **options: Any) -> None:
        super().compile(*args, **options)  # type: ignore[misc]
        self._wrap_optimizers()

    def _wrap_optimizers(self) -> None:
        """Distribute the optimizer of `compile`, and those that are attributes of layers."""
        ranks, values = self._ranks, []
        for value in [one for layer in self._flatten_layers() for one in vars(layer).values()]:  # type: ignore[attr-defined]
            values.append(value)
            if isinstance(value, dict | list | tuple):
                values += value.values() if isinstance(value, dict) else value
        found = [one for one in values if isinstance(one, keras.optimizers.Optimizer)]
        parts = [distributed_part(one) or DistributedOptimizer(one) for one in found]
        ranks.alike, ranks.optimizers = False, list({id(one): one for one in parts}.values())
        for reduction in (one._reduction for one in ranks.optimizers):
            for_some = reduction.process_set is not global_process_set or reduction.local
            if reduction.options["op"] != ops.Average or for_some:
                raise ArgumentError(
                    "hvd.distribute averages every gradient over all ranks; give its model a plain "
                    "optimizer, or a DistributedOptimizer without op, process_set and local layers"
                )
        for one in keras.tree.flatten(getattr(self, "loss", None)):
            reduction = getattr(one, "reduction", "mean")
            if reduction not in ("sum_over_batch_size", "mean"):
                raise ArgumentError(
                    f"hvd.distribute: {type(one).__name__}(reduction={reduction!r}) is no mean "
                    "over the rows of a batch, which the ranks could average; take "
                    '"sum_over_batch_size"'
                )

    def fit(self, *args: Any, **options: Any) -> Any:
        given = self._given("fit", args, options)
        self._wrap_optimizers()  # also those that have become attributes after `compile`
        ranks, adapter = self._ranks, backend_adapter()
        if ranks.splits:  # What shuffles the data draws the same numbers on all ranks.
            states = random.getstate(), np.random.get_state(), adapter.random_state()
            states = broadcast_object(states, 0, _name("random"))
            random.setstate(states[0])
            np.random.set_state(states[1])
            adapter.swap_random(states[2])
            adapter.shuffle_alike(given, states[2])
        if ranks.random_state is None:
            ranks.random_state = adapter.random_state(basics.rank())
        given["callbacks"].append(_Watch())
        return super().fit(**given)  # type: ignore[misc]

    def evaluate(self, *args: Any, **options: Any) -> Any:
        if not options.get("_use_cached_eval_dataset"):  # `fit` gives its own callbacks.
            args, options = (), self._given("evaluate", args, options)
        self._ranks.loop = "evaluate"
        return super().evaluate(*args, **options)  # type: ignore[misc]

    def predict(self, *args: Any, **options: Any) -> Any:
        outputs = super().predict(**self._given("predict", args, options))  # type: ignore[misc]
        self._compare()
        return outputs

    def predict_on_batch(self, x: Any) -> Any:
        self._ranks.loop, outputs = "predict_on_batch", super().predict_on_batch(x)  # type: ignore[misc]
        self._compare()
        return outputs

    def train_on_batch(self, *args: Any, **options: Any) -> Any:
        return self._on_batch(super().train_on_batch, args, options)  # type: ignore[misc]

    def test_on_batch(self, *args: Any, **options: Any) -> Any:
        return self._on_batch(super().test_on_batch, args, options)  # type: ignore[misc]

    def _on_batch(self, method: Any, args: Any, options: Any) -> Any:
        given = inspect.signature(method).bind(*args, **options).arguments
        as_dictionary = given.pop("return_dict", False)
        logs = method(**given, return_dict=True)
        self._ranks.loop = method.__name__
        self._compare()
        logs = self._logs_of_all(logs)
        return logs if as_dictionary else self._flatten_metrics_in_order(logs)  # type: ignore[attr-defined]

    def _given(self, method: str, args: Any, options: Any) -> dict[str, Any]:
        """Return the arguments of a call by name; what rank 0 alone does is left to it."""
        self._ranks.alike, self._ranks.loop = False, method
        self._ranks.seen.assign(np.zeros(2))  # An earlier call may have raised.
        bound = inspect.signature(getattr(keras.Model, method)).bind(self, *args, **options)
        bound.apply_defaults()
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        del given["self"]
        given.pop("kwargs", None)
        callbacks = given["callbacks"]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            raise ArgumentError("hvd.distribute: give a list of callbacks, no CallbackList")
        given["callbacks"] = [] if callbacks is None else keras.tree.flatten(callbacks)
        if basics.rank() != 0:
            for one in [*given["callbacks"]]:
                if _RANK_0_CALLBACKS & {base.__name__ for base in type(one).__mro__}:
                    given["callbacks"].remove(one)
            given["verbose"] = 0
        elif given["verbose"] == "auto":
            # hvdlite-run sets COLUMNS where its output is a terminal; a log has a line an epoch.
            given["verbose"] = 1 if shutil.get_terminal_size((0, 0)).columns else 2
        return given

    def train_step(self, data: Any) -> Any:
        return self._step(super().train_step, data)  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        return self._step(super().test_step, data)  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        step: Callable[[Any], Any] = super().predict_step  # type: ignore[misc]
        if not self._ranks.splits:
            return step(data)
        rows, begin, end, _ = self._rows(data)
        return keras.tree.map_structure(
            lambda one: backend_adapter().allgather(one[: end - begin]), step(rows)
        )

    def _rows(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        """Return this rank's rows of a batch, where they begin and end, and the number of all."""
        # Where begin and end are the same, as there are more ranks than rows, it is another rank's.
        ranks = self._ranks
        leaves = [one for one in keras.tree.flatten(batch) if len(getattr(one, "shape", ()))]
        if any(hasattr(one, "dense_shape") or hasattr(one, "row_splits") for one in leaves):
            raise ArgumentError("hvd.distribute does not split sparse or ragged tensors")
        if len({one.shape[0] for one in leaves} - {None}) > 1:
            shapes = ", ".join(str(tuple(one.shape)) for one in leaves)
            raise ArgumentError(f"hvd.distribute splits the rows of a batch, but it has {shapes}")
        total = keras.ops.shape(leaves[0])[0]
        begin, end = (total * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        maximum = max if isinstance(total, int) else keras.ops.maximum
        rows = slice(begin, maximum(end, begin + 1))
        # As many rows as ranks, or one more, show whether all ranks read the same batches.
        compared, check = slice(None, None, maximum(total // ranks.size, 1)), ranks.seen[0] * 31
        for one in leaves:
            if "string" not in str(one.dtype):
                check += backend_adapter().checksum(one[compared])
        ranks.seen.assign(keras.ops.stack([check, ranks.seen[1] + 1]))

        def taken(one: Any) -> Any:
            return one[rows] if len(getattr(one, "shape", ())) else one

        return keras.tree.map_structure(taken, batch), begin, end, total

    def _step(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Compute the rows of this rank with their weight in the gradients and the metrics."""
        ranks = self._ranks
        if not ranks.splits:
            ranks.seen.assign(keras.ops.stack([ranks.seen[0], ranks.seen[1] + 1]))
            return step(data)
        rows, begin, end, total = self._rows(data)
        if isinstance(total, int) and (end - begin) * ranks.size == total:
            return step(rows)
        share = keras.ops.cast((end - begin) * ranks.size / total, "float32")
        before = {id(one): (one, keras.ops.copy(one)) for one in self.metrics_variables}  # type: ignore[attr-defined]
        reductions = [one._reduction for one in ranks.optimizers]
        try:
            for one in reductions:
                one.share = share
            logs = step(rows)
        finally:
            for one in reductions:
                one.share = None
        # A row that another rank counts does not count here.
        factors = dict.fromkeys(before, keras.ops.cast(end > begin, "float32"))
        if not step.__module__.startswith("keras."):
            means = [one for one in self.metrics if type(one) is keras.metrics.Mean]  # type: ignore[attr-defined]
        else:  # Keras counts the rows for the losses of several outputs only where it knows them.
            means = [] if isinstance(total, int) else getattr(self._compile_loss, "metrics", [])  # type: ignore[attr-defined]
        for metric in means:  # which may count a batch as one, whatever its rows
            old = before[id(metric.count)][1]
            batches = keras.ops.cast(ranks.seen[1], old.dtype)  # with this one
            # Otherwise it has counted one row, as it has counted more in earlier batches.
            as_one = (metric.count - old < 1.5) & (old < 1.9 * (batches - 1) + 0.1)
            weight = keras.ops.where(as_one, share, factors[id(metric.count)])
            factors[id(metric.total)] = factors[id(metric.count)] = weight
        for key, (variable, old) in before.items():
            added = factors[key] * keras.ops.cast(variable - old, "float32")
            variable.assign(old + keras.ops.cast(added, variable.dtype))
        return logs

    def make_predict_function(self, force: bool = False) -> Any:
        self._begin_alike()
        compiles, self.jit_compile = self.jit_compile, False  # XLA compiles no allgather.
        made = super().make_predict_function(force)  # type: ignore[misc]
        self.jit_compile = compiles
        return made

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # On TensorFlow the first batch would build the model, too late for the same weights.
        if iterator is not None:
            data_batch = backend_adapter().first_of(iterator)
        try:
            super()._symbolic_build(data_batch=data_batch)  # type: ignore[misc]
        except (RuntimeError, ValueError):  # It may have no `call`, as some GANs.
            if not all(one.built for one in self._flatten_layers(include_self=False)):  # type: ignore[attr-defined]
                raise
        self._begin_alike()

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)  # type: ignore[misc]
        self._begin_alike()

    def _begin_alike(self) -> None:
        """Give all ranks the variables of rank 0, once in a call."""
        ranks = self._ranks
        if ranks.alike:
            return
        layers = self._flatten_layers(include_self=False)  # type: ignore[attr-defined]
        if not (self.built or all(one.built for one in layers)):
            raise ArgumentError(
                "hvd.distribute: layers of this model have no weights yet; build it before, with "
                "a keras.Input or model.build(shape)"
            )
        variables = list(self.weights)  # type: ignore[attr-defined]
        main = distributed_part(getattr(self, "optimizer", None))
        for optimizer in ranks.optimizers:
            variables += (
                optimizer_variables(optimizer, self) if optimizer is main else optimizer.variables
            )
        arrays.broadcast_variables(variables, 0)
        ranks.alike = True
        if not ranks.told:
            ranks.told = True
            _let_seeds_differ(self)
            _tell(self)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return the metrics of all ranks; `fit` and `evaluate` call it after their last batch."""
        ranks = self._ranks
        if ranks.loop == "fit":
            agree_on_end_of_epoch(self.optimizer, int(ranks.seen[1]))  # type: ignore[attr-defined]
            arrays.allreduce_buffers(self)
        self._compare()
        ranks.loop = "fit"  # which may have called `evaluate`
        return self._logs_of_all(logs)

    def _compare(self, ends: bool = True) -> None:
        """Raise on every rank unless all have read the same batches."""
        ranks, what = self._ranks, self._ranks.loop
        seen = [int(one) for one in keras.ops.convert_to_numpy(ranks.seen)]
        if ends:
            ranks.seen.assign(np.zeros(2))
        if not ranks.splits:
            return
        everyone = arrays.exchange(seen, _name(what), global_process_set)
        for rank, other in enumerate(everyone):
            found = "other batches than rank 0"
            if other == everyone[0]:
                continue
            if other[1] != everyone[0][1]:
                found = f"{other[1]} batches, and rank 0 reads {everyone[0][1]}"
            raise ArgumentError(
                f"{what}: rank {rank} reads {found}, but every rank is to read the same data, of "
                "which it computes its rows; make and shuffle them by the same seed on all ranks "
                "(keras.utils.set_random_seed), or where each rank has its own part write "
                'hvd.distribute(model, data="sharded")'
            )

    def _logs_of_all(self, logs: Any) -> dict[str, Any]:
        """Sum the states of metrics over all ranks, and return their results."""
        variables = list({id(one): one for one in self.metrics_variables}.values())  # type: ignore[attr-defined]
        own = [np.array(keras.ops.convert_to_numpy(one)) for one in variables]
        weights = {"mean": 1 / basics.size(), "only_first_replica": float(basics.rank() == 0)}
        hows = [weights.get(getattr(one, "aggregation", "sum"), 1.0) for one in variables]
        parts = [one.ravel() * weight for one, weight in zip(own, hows, strict=True)]
        total = np.concatenate([np.zeros(0), *parts])
        total = arrays.allreduce(total, op=ops.Sum, name=_name("metrics"))
        parts = np.split(total, np.cumsum([one.size for one in own])[:-1])
        for variable, value, part in zip(variables, own, parts, strict=False):
            variable.assign(part.reshape(value.shape).astype(value.dtype))
        sums, result = self.get_metrics_result(), {}  # type: ignore[attr-defined]
        for key, log in super()._get_metrics_result_or_logs(logs).items():  # type: ignore[misc]
            result.update(log if isinstance(log, dict) else {key: log})
        for key in sums.keys() & result:
            result[key] = np.array(keras.ops.convert_to_numpy(sums[key]))
        # Batches may follow, and are added to what this rank has counted.
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
        # What a custom `train_step` returns besides is of this rank's last batch.
        others = {key: one for key, one in numbers_in(result).items() if key not in sums}
        everyone = arrays.exchange(others, _name("logs"), global_process_set)
        return result | {key: float(np.mean([one[key] for one in everyone])) for key in others}

    def save(self, *args: Any, **options: Any) -> None:
        if basics.rank() == 0:
            super().save(*args, **options)  # type: ignore[misc]

    def save_weights(self, *args: Any, **options: Any) -> None:
        if basics.rank() == 0:
            super().save_weights(*args, **options)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Pickle a plain model, as Keras pickles them."""
        parts: Any = super().__reduce__()
        return getattr(self._wrapped_class, parts[0].__name__), *parts[1:]


class _Watch(Callback):
    """Lets the ranks begin and end a `fit` together; comes after the user's callbacks."""

    process_set = global_process_set
    _compared = False

    def on_train_begin(self, logs: Logs = None) -> None:
        begin_fit(self, epochs=True)
        model = self.model
        # BackupAndRestore of rank 0 may have set it, and the weights.
        first = arrays.exchange(model._initial_epoch, _name("epoch"), global_process_set)[0]
        model._initial_epoch, model._ranks.alike = first, False
        model._begin_alike()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        ranks = self.model._ranks
        ranks.random_state = backend_adapter().swap_random(ranks.random_state)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.on_train_batch_begin(batch)
        if not self._compared:
            self._compared = True
            self.model._compare(ends=False)


def _name(what: str) -> str:
    return next_name(f"keras.distribute.{what}", member_id(global_process_set))


def _let_seeds_differ(model: Any) -> None:
    """Let random layers, such as Dropout, draw other numbers on each rank."""
    shared = {id(one) for one in model.weights}
    for state in model.variables:
        if id(state) not in shared and "seed_generator" in str(state.path):
            value = keras.ops.convert_to_numpy(state).copy()
            value[0] = (int(value[0]) + 1_000_003 * basics.rank()) % (1 << 31)
            state.assign(value)


def _tell(model: Any) -> None:
    """Say on rank 0 what is not as in one process."""
    layers, new = list(model._flatten_layers()), keras.layers
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    masks = [getattr(one, "_keras_mask", None) is not None for one in outputs] or [
        getattr(one, "mask_zero", isinstance(one, new.Masking)) for one in layers
    ]
    losses = keras.tree.flatten(getattr(model, "loss", None))
    names = {str(getattr(one, "name", one)).lower() for one in losses}
    texts = []
    if any(type(one) is new.BatchNormalization for one in layers):
        texts.append(
            "BatchNormalization takes the statistics of each rank's rows, and all ranks' mean for "
            "its moving statistics after each epoch; on TensorFlow "
            "hvdlite.tensorflow.SyncBatchNormalization takes those of whole batches"
        )
    if any(masks) or names & {"dice", "tversky"}:
        texts.append(
            "the loss of a masked output, Dice and Tversky are no means over rows: the ranks' mean "
            "is another number than that of one process"
        )
    for text in texts if basics.rank() == 0 else ():
        print(f"hvdlite: {text}", file=sys.stderr)
