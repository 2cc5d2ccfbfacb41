"""`hvd.distribute`: what a script computes on one device, it computes on all ranks."""

from __future__ import annotations

import functools
import os
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hvdlite import basics
from hvdlite.errors import ArgumentError
from parallel.keras.keras_worlds import (
    hvd,
    keras,
    on_backends,
    on_tensorflow,
    run_scenarios,
    tf,
)
from parallel.scenarios import Later, make_tests, raises

PRELOAD = ("keras", "tensorflow")
ROWS, BATCH = 17, 8  # On three ranks: 3, 3 and 2 rows, and in the last batch one row.
Put = Callable[[Any], Any]  # returns the model, distributed or not
torch: Any = Later("torch")


def arrays_of(rows: int = ROWS, width: int = 6) -> tuple[Any, Any]:
    inputs = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    return inputs, (0.3 * inputs.sum(1, keepdims=True) + 0.1).astype("float32")


def dense(outputs: int = 1, activation: str | None = None, **how: Any) -> Any:
    layers = [keras.layers.Dense(8, "tanh", **how), keras.layers.Dense(outputs, activation)]
    return keras.Sequential([keras.Input((6,)), *layers])


def fit(model: Any, x: Any, y: Any = None, **how: Any) -> dict[str, Any]:
    """Train a compiled model; return everything that a user sees."""
    how = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **how}
    history = model.fit(x, y, **how).history
    results = {"history": history, "weights": model.get_weights()}
    if isinstance(x, np.ndarray | list | dict):
        results["evaluate"] = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
        results["predict"] = model.predict(x, batch_size=7, verbose=0)
    return results


def train(put: Put, model: Any, x: Any = None, y: Any = None, fit_how: Any = (), **how: Any) -> Any:
    model = put(model)
    how = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **how}
    model.compile(**{"run_eagerly": on_tensorflow(), **how})
    if x is None:
        x, y = arrays_of()
    return fit(model, x, y, **dict(fit_how))


def leaves(results: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(results, dict | list | tuple):
        pairs = results.items() if isinstance(results, dict) else enumerate(results)
        for key, one in pairs:
            yield from leaves(one, f"{path}/{key}")
    else:
        yield path, np.asarray(results, float)


def same(ours: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    mine, others = dict(leaves(ours)), dict(leaves(theirs))
    assert mine.keys() == others.keys()
    for path, value in mine.items():
        assert np.allclose(value, others[path], tolerance, tolerance), (path, value, others[path])


def check(case: Callable[[Put], Any]) -> None:
    """Every rank computes by itself what one process does, and compares."""
    for text in ("Your input ran out of data", "The .grad attribute"):  # also of plain Keras
        warnings.filterwarnings("ignore", text)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    alone = case(lambda model: model)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    same(case(hvd.distribute), alone)


def of_many_layers(put: Put) -> Any:
    """Convolution, embedding, LSTM, losses of layers, two outputs: in one model."""

    class AddLoss(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(keras.ops.square(x)) * 0.1)
            return x

    new = keras.layers
    image, tokens, series = keras.Input((6, 6, 2)), keras.Input((3,)), keras.Input((4, 2))
    parts = [
        new.Flatten()(new.MaxPooling2D()(new.Conv2D(2, 3, activation="relu")(image))),
        new.Flatten()(new.Embedding(20, 3)(tokens)),
        new.LSTM(4)(series),
    ]
    hidden = new.Dense(6, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(
        new.Concatenate()(parts)
    )
    outputs = [new.Dense(1, name="a")(AddLoss()(hidden)), new.Dense(3, name="b")(hidden)]
    draw = np.random.default_rng(1)
    x = [draw.normal(size=(ROWS, 6, 6, 2)), draw.integers(0, 20, (ROWS, 3))]
    x = [one.astype("float32") for one in (*x, draw.normal(size=(ROWS, 4, 2)))]
    y = [draw.normal(size=(ROWS, 1)).astype("float32"), draw.integers(0, 3, ROWS)]
    loss = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    how = {"loss": loss, "loss_weights": [1.0, 0.5], "metrics": [["mae"], ["accuracy"]]}
    return train(put, keras.Model([image, tokens, series], outputs), x, y, **how)


def of_two_outputs_in_a_graph(put: Put) -> Any:
    """There Keras counts a batch of unknown size as one in the losses of the outputs."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {"a": keras.layers.Dense(1, name="a")(inputs), "b": inputs})
    x, y = arrays_of()
    y = {"a": y, "b": x}
    return train(put, model, x, y, {"epochs": 1}, loss={"a": "mse", "b": "mse"}, run_eagerly=False)


def of_weights(put: Put) -> Any:
    x, y = arrays_of()
    y = (y > 0.1).astype("float32")
    weights = np.random.default_rng(2).uniform(size=ROWS).astype("float32")
    how: dict[str, Any] = {"loss": "binary_crossentropy", "weighted_metrics": ["accuracy"]}
    classes = train(put, dense(1, "sigmoid"), x, y, {"class_weight": {0: 0.5, 1: 2.0}}, **how)
    return classes, train(put, dense(1, "sigmoid"), x, y, {"sample_weight": weights}, **how)


def of_metrics(put: Put) -> Any:
    class Own(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="own")
            self.a = self.add_weight(name="a", initializer="zeros")
            self.b = self.add_weight(name="b", initializer="zeros")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.a.assign_add(keras.ops.sum(y * p))
            self.b.assign_add(keras.ops.sum(p))

        def result(self) -> Any:
            return keras.ops.square(self.a) / self.b

    def function(y: Any, p: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y - p), axis=-1)

    new = keras.metrics
    metrics = [new.AUC(), new.Precision(), new.F1Score(threshold=0.5), new.BinaryIoU(), Own()]
    x, y = arrays_of()
    y = (y > 0.1).astype("float32")
    how = {"loss": "binary_crossentropy", "metrics": [*metrics, function, new.R2Score()]}
    return train(put, dense(1, "sigmoid"), x, y, {"validation_data": (x[:5], y[:5])}, **how)


def of_options(put: Put) -> Any:
    """Rows fewer than ranks, validation, steps and epochs."""
    x, y = arrays_of()
    split = {"validation_split": 0.3, "validation_freq": 2, "epochs": 4, "validation_steps": 1}
    hows = [{"batch_size": 2}, split, {"initial_epoch": 1, "steps_per_epoch": 2, "epochs": 3}]
    return [train(put, dense(), x, y, how, metrics=["mae"]) for how in hows]


def of_graphs(put: Put) -> Any:
    """Compiled functions; on TensorFlow also several steps in one, and XLA."""
    hows: list[dict[str, Any]] = [{}]
    if on_tensorflow():
        hows = [{"steps_per_execution": 2}, {"jit_compile": True}]
    return [train(put, dense(), metrics=["mae"], run_eagerly=False, **how) for how in hows]


def of_models_that_the_first_batch_builds(put: Put) -> Any:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.last(self.hidden(x))

    frozen = dense()
    frozen.layers[0].trainable = False
    return train(put, Own(), optimizer="adam"), train(put, frozen)


def gradients_of(loss_of: Callable[[], Any], variables: list[Any], scale: Any) -> Any:
    if on_tensorflow():
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled = scale(loss)
        return loss, tape.gradient(scaled, variables)
    for one in variables:
        one.value.grad = None
    loss = loss_of()
    scale(loss).backward()
    return loss.detach(), [one.value.grad for one in variables]


def of_custom_steps(put: Put) -> Any:
    """Two optimizers, of which one is asked to scale the loss, and logs that are no metrics."""

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self, tracks: bool) -> None:
            super().__init__()
            self.tracks = tracks
            self.first, self.second = dense(6), dense(1)
            self.mean = keras.metrics.Mean(name="mean")

        def compile(self, first: Any, second: Any) -> None:
            super().compile(run_eagerly=on_tensorflow())
            self.optimizers = [first, second]

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, data: Any) -> Any:
            def loss_of() -> Any:
                return keras.ops.mean(keras.ops.square(self(x) - y))

            x, y = data
            for part, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
                scale = optimizer.scale_loss if part is self.first else lambda loss: loss
                for _ in range(2):
                    loss, found = gradients_of(loss_of, part.trainable_variables, scale)
                    optimizer.apply(found, part.trainable_variables)
            self.mean.update_state(loss)
            return {"mean": self.mean.result()} if self.tracks else {"last": loss}

    results = []
    for tracks in (True, False):
        model = put(Own(tracks))
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
        x, y = arrays_of()
        history = model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0).history
        results.append((history, model.first.get_weights(), model.second.get_weights()))
    return results


def of_calls_one_after_the_other(put: Put) -> Any:
    """A model that was trained before; fit() twice; compile() anew; single batches."""
    x, y = arrays_of()
    model = dense()
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=on_tensorflow())
    fit(model, x, y)
    model = put(model)
    results = [fit(model, x, y, epochs=1) for _ in range(2)]
    model.compile("sgd", "mae", run_eagerly=on_tensorflow())
    batches = [model.train_on_batch(x[i : i + 6], y[i : i + 6]) for i in range(0, ROWS, 6)]
    return results, batches, model.test_on_batch(x, y), model.predict_on_batch(x)


def of_callbacks(put: Put) -> Any:
    seen: list[Any] = []
    model = put(dense())
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=on_tensorflow())
    x, y = arrays_of()

    def look(epoch: int, logs: Any) -> None:
        seen.append([*logs.values(), model.evaluate(x[:5], y[:5], verbose=0)])

    new = keras.callbacks
    callbacks = [
        new.EarlyStopping(patience=1, restore_best_weights=True, min_delta=0.02),
        new.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.03),
        new.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        new.TerminateOnNaN(),
        new.LambdaCallback(on_epoch_end=look),
        new.LambdaCallback(
            on_train_batch_end=lambda batch, logs: model.evaluate(x[5:], y[5:], verbose=0)
        ),
    ]
    return fit(model, x, y, epochs=12, validation_split=0.2, callbacks=callbacks), seen


for _name, _case in [*globals().items()]:
    if _name.startswith("of_"):
        globals()[f"scenario_{_name[3:]}"] = functools.partial(check, _case)


def sources(x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    pairs = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        num_batches = len(pairs)

        def __getitem__(self, index: int) -> Any:
            return pairs[index]

    def generated() -> Any:
        yield from pairs

    def slices() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y))

    found = {
        "pydataset": Batches,
        "pydataset of threads": lambda: Batches(workers=2),
        "generator": generated,
        "tf.data": lambda: slices().batch(BATCH),
        "tf.data, unknown length": lambda: slices().filter(lambda x, y: True).batch(BATCH),
        "tf.data, repeated": lambda: slices().batch(BATCH).repeat(),
        "tensors": lambda: keras.ops.convert_to_tensor(x),
        "float64": lambda: x.astype("float64"),
    }
    if not on_tensorflow():
        whole = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        found["loader"] = lambda: torch.utils.data.DataLoader(whole, BATCH)
    return found


def scenario_sources() -> None:
    """Each kind of source gives the weights that arrays give in one process."""
    x, y = arrays_of()
    alone, model = dense(), dense()
    first = alone.get_weights()
    for one in (alone, hvd.distribute(model)):
        one.compile("sgd", "mse")
    theirs = fit(alone, x, y, epochs=1)["weights"]
    for name, make in sources(x, y).items():
        of_arrays = name in ("tensors", "float64")
        targets = {"y": y, "batch_size": BATCH} if of_arrays else {}
        model.set_weights(first)
        model.fit(make(), **targets, steps_per_epoch=3, shuffle=False, verbose=0)
        same(model.get_weights(), theirs)
    validation = model.fit(x, y, validation_data=sources(x, y)["pydataset"](), verbose=0)
    same(validation.history["val_loss"][-1], model.evaluate(x, y, verbose=0))


def scenario_shuffles_have_one_order_and_dropout_has_none() -> None:
    """Each weight moves by the gradient of one row: once in an epoch, whatever the order."""
    masks: list[Any] = []

    class Looking(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            if hasattr(x, "numpy"):  # no symbol
                masks.append(keras.ops.convert_to_numpy(x))
            return x

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        num_batches = ROWS

        def __getitem__(self, index: int) -> Any:
            return rows[index : index + 1], np.zeros((1, 1))

    keras.utils.set_random_seed(7)
    new, rows = keras.layers, np.eye(ROWS, dtype="float32")
    model = hvd.distribute(keras.Sequential([keras.Input((ROWS,)), new.Dense(1)]))
    layers = [keras.Input((ROWS,)), new.Dropout(0.5), Looking(), new.Dense(1)]
    noisy = hvd.distribute(keras.Sequential(layers))
    for one in (noisy, model):
        one.compile(keras.optimizers.SGD(1.0), "mae", run_eagerly=on_tensorflow())
    noisy.fit(rows + 1, np.zeros(ROWS), ROWS, verbose=0)
    kept = hvd.allgather(masks[-1][None, : ROWS // hvd.size()] > 0)
    assert len({one.tobytes() for one in kept}) == hvd.size()

    random.seed(hvd.rank())
    np.random.seed(hvd.rank())
    sources: list[Any] = [Batches(), Batches(workers=2)]
    if not on_tensorflow():
        torch.manual_seed(hvd.rank())
        whole = torch.utils.data.TensorDataset(torch.tensor(rows), torch.zeros(ROWS, 1))
        sources += [torch.utils.data.DataLoader(whole, 1, True, num_workers=n) for n in (0, 1)]
    for source in sources:
        model.set_weights([np.zeros((ROWS, 1)), np.full(1, -100.0)])
        model.fit(source, shuffle=isinstance(source, Batches), epochs=2, verbose=0)
        same(model.get_weights()[0], np.full((ROWS, 1), 2.0))
    for shuffle in (True, "batch"):
        model.set_weights([np.zeros((ROWS, 1)), np.full(1, -100.0)])
        model.fit(rows, np.zeros(ROWS), ROWS, shuffle=shuffle, epochs=2, verbose=0)
        same(model.get_weights()[0], np.full((ROWS, 1), 2 / ROWS))


def scenario_files_are_those_of_rank_0() -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        new = keras.callbacks
        model = hvd.distribute(dense())
        model.compile("adam", "mse", run_eagerly=on_tensorflow())
        x, y = arrays_of()
        callbacks = [
            new.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
            new.ModelCheckpoint(folder / "step.weights.h5", save_weights_only=True, save_freq=2),
            new.CSVLogger(folder / "log.csv"),
        ]
        history = model.fit(
            *(x, y, BATCH, 3), validation_split=0.2, verbose=0, callbacks=callbacks
        ).history
        model.save(folder / "last.keras")
        model.save_weights(folder / "last.weights.h5")
        assert type(pickle.loads(pickle.dumps(model))) is keras.Sequential
        names = {0: ["best.keras", "last.keras", "last.weights.h5", "log.csv", "step.weights.h5"]}
        assert sorted(os.listdir(folder)) == names.get(hvd.rank(), [])
        if hvd.rank() == 0:
            lines = np.genfromtxt(folder / "log.csv", delimiter=",", names=True)
            same([*lines["val_loss"]], history["val_loss"])
            best = keras.models.load_model(folder / "best.keras")
            assert type(best) is keras.Sequential
            assert not hasattr(best.optimizer, "_wrapped_class")
            same(best.evaluate(x[13:], y[13:], verbose=0), min(history["val_loss"]), 1e-5)


def scenario_one_rank_stops_all() -> None:
    model = hvd.distribute(dense())
    model.compile("sgd", "mse", run_eagerly=on_tensorflow())
    begun: list[int] = []

    def stop(batch: int, logs: Any) -> None:
        begun.append(batch)
        if len(begun) == 5 and hvd.rank() == hvd.size() - 1:
            model.stop_training = True

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    history = model.fit(*arrays_of(), BATCH, epochs=9, verbose=0, callbacks=[callback])
    assert len(begun) == 5 and len(history.history["loss"]) == 2


def scenario_each_rank_has_its_part() -> None:
    """With data="sharded" a rank's batches are its own, as they are."""
    x, y = arrays_of(4 * hvd.size())
    alone, model = dense(), hvd.distribute(dense(), data="sharded")
    model.set_weights(alone.get_weights())
    for one in (alone, model):
        one.compile("sgd", "mse", metrics=["mae"], run_eagerly=on_tensorflow())
    mine = slice(hvd.rank(), None, hvd.size())
    history = model.fit(x[mine], y[mine], 4, 2, shuffle=False, verbose=0).history
    same(history, alone.fit(x, y, len(x), 2, shuffle=False, verbose=0).history)
    same(model.get_weights(), alone.get_weights())
    same(model.evaluate(x[mine], y[mine], verbose=0), alone.evaluate(x, y, verbose=0))
    assert len(model.predict(x[mine], verbose=0)) == 4


def scenario_ranks_that_read_other_data_are_an_error() -> None:
    x, y = arrays_of()
    model = hvd.distribute(dense())
    model.compile("sgd", "mse", run_eagerly=on_tensorflow())
    other = x + hvd.rank()
    text = "rank 1 reads other batches than rank 0.*sharded"
    with raises(ArgumentError, f"fit: {text}"):
        model.fit(other, y, verbose=0)
    with raises(ArgumentError, f"evaluate: {text}"):
        model.fit(x, y, validation_data=(other, y), verbose=0)
    with raises(ArgumentError, f"evaluate: {text}"):
        model.evaluate(other, y, verbose=0)
    with raises(ArgumentError, f"predict: {text}"):
        model.predict(other, verbose=0)
    with raises(ArgumentError, "different numbers of batches"):
        model.fit(x[: 8 + hvd.rank()], y[: 8 + hvd.rank()], BATCH, verbose=0)

    def generated() -> Any:
        for _ in range(4 + hvd.rank() % 2):
            yield x[:8], y[:8]

    with raises(ArgumentError, "evaluate: rank 1 reads 5 batches, and rank 0 reads 4"):
        model.evaluate(generated(), verbose=0)


def scenario_what_is_refused() -> None:
    def compiled(*arguments: Any, **options: Any) -> Any:
        return hvd.distribute(dense()).compile(*arguments, **options)

    with raises(ArgumentError, "distributed already"):
        hvd.distribute(hvd.distribute(dense()))
    with raises(ArgumentError, "neither"):
        hvd.distribute(dense(), data="both")
    with raises(ArgumentError, r"rows of a batch, but it has \(9, 6\), \(4, 1\)"):
        hvd.distribute(dense()).predict_on_batch([np.zeros((9, 6)), np.zeros((4, 1))])
    with raises(ArgumentError, "fixed batch size"):
        hvd.distribute(keras.Sequential([keras.Input((6,), batch_size=4), keras.layers.Dense(1)]))
    with raises(ArgumentError, "reduction='sum'.* is no mean over the rows"):
        compiled("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    with raises(ArgumentError, "without op, process_set and local layers"):
        compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Sum), "mse")
    with raises(ArgumentError, "no weights yet; build it before"):
        hvd.distribute(keras.Sequential([keras.layers.Dense(1)])).predict(arrays_of()[0])
    with mock.patch("keras.__version__", "3.7.0"), raises(ArgumentError, "needs Keras 3.8"):
        hvd.distribute(dense())
    elastic = mock.patch.object(basics, "in_elastic_job", lambda: True)
    with elastic, raises(ArgumentError, "elastic job.*hvd.elastic.KerasState"):
        hvd.distribute(dense())


def body() -> dict[str, str]:
    return run_scenarios(globals())


# The second world computes for a minute, and for many on a crowded machine.
test_distribute = make_tests(
    body, on_backends((3, "torch"), (2, "tensorflow")), quick=["3-torch"], timeout=540
)
