"""DistributedGradientTape: its results for every kind of tape, source and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel.scenarios import make_tests, raises, sizes, tensors_sent_by
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    keras,
    ranks,
    run_scenarios,
    same,
    tf,
)

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]


def variables(count: int = 3, dtype: str = "float32") -> list[Any]:
    return [tf.Variable(tf.fill([i + 1, 2], tf.cast(i + 2, dtype))) for i in range(count)]


def loss_of(sources: list[Any]) -> Any:
    """Make a loss whose gradients are 2 * value * (rank + 1)."""
    return sum(tf.reduce_sum(source**2) for source in sources) * (hvd.rank() + 1)


def gradients(sources: Any, used: list[Any], **arguments: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(used)
    return hvd.DistributedGradientTape(tape, **arguments).gradient(loss, sources)


def assert_reduced(results: list[Any], factor: float, tolerance: float = 1e-5) -> None:
    for i, result in enumerate(results):
        assert result.shape == (i + 1, 2) and same(result, 2 * (i + 2) * factor, tolerance), result


def mean() -> float:
    return sum(ranks()) / hvd.size()


def scenario_average_and_sum(form: Form) -> None:
    sources = variables()
    assert_reduced(form(lambda: gradients(sources, sources))(), mean())
    assert_reduced(form(lambda: gradients(sources, sources, op=hvd.Sum))(), sum(ranks()))
    predivided = form(lambda: gradients(sources, sources, gradient_predivide_factor=4.0))()
    assert_reduced(predivided, mean())


def scenario_in_its_own_with_block(form: Form) -> None:
    sources = variables()

    def inside(make: Callable[[], Any]) -> Any:
        with make() as tape:
            loss = loss_of(sources)
        assert isinstance(tape, tf.GradientTape) and type(tape).__name__ == "GradientTape"
        return tape.gradient(loss, sources)

    for make in (
        lambda: hvd.DistributedGradientTape(tf.GradientTape()),
        lambda: hvd.DistributedGradientTape(),
    ):
        assert_reduced(form(lambda make=make: inside(make))(), mean())


def scenario_the_wrapped_tape_stays_plain() -> None:
    sources = variables()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(sources)
    first = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    second = hvd.DistributedGradientTape(tape)
    assert_reduced(tape.gradient(loss, sources), hvd.rank() + 1)
    assert_reduced(first.gradient(loss, sources), sum(ranks()))
    assert_reduced(second.gradient(loss, sources), mean())
    with raises(hvd.ArgumentError, "already"):
        hvd.DistributedGradientTape(first)


def scenario_persistent_and_used_up(form: Form) -> None:
    sources = variables()

    def twice() -> tuple[Any, Any]:
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            first, second = loss_of(sources), 3 * loss_of(sources)
        return tape.gradient(first, sources), tape.gradient(second, sources)

    first, second = form(twice)()
    assert_reduced(first, mean())
    assert_reduced(second, 3 * mean())
    with hvd.DistributedGradientTape() as tape:
        loss = loss_of(sources)
    tape.gradient(loss, sources)
    with raises(RuntimeError, "non-persistent"):
        tape.gradient(loss, sources)


def scenario_structures_of_sources(form: Form) -> None:
    a, b, c = variables()
    result = form(lambda: gradients({"c": c, "ab": [a, (b,)]}, [a, b, c]))()
    assert list(result) == ["ab", "c"] or list(result) == ["c", "ab"]
    assert_reduced([result["ab"][0], result["ab"][1][0], result["c"]], mean())
    assert_reduced([form(lambda: gradients(a, [a]))()], mean())


def scenario_none_stays_none(form: Form) -> None:
    a, b, c = variables()
    result = form(lambda: gradients([a, b, c], [a, c]))()
    assert result[1] is None
    assert same(result[0], 4 * mean(), 1e-5) and same(result[2], 8 * mean(), 1e-5)

    def zeros() -> Any:
        with hvd.DistributedGradientTape() as tape:
            loss = loss_of([a])
        return tape.gradient(loss, [a, b], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    assert same(form(zeros)()[1], 0)


def scenario_upstream_gradients(form: Form) -> None:
    (source,) = variables(1)

    def step() -> Any:
        with hvd.DistributedGradientTape() as tape:
            y = source**2
        return tape.gradient(y, [source], output_gradients=[tf.fill([1, 2], hvd.rank() + 1.0)])

    assert_reduced(form(step)(), mean())


def scenario_local_sources(form: Form) -> None:
    """A local source has this rank's gradient, divided by the number of ranks unless refused."""
    rank, size = hvd.rank() + 1, hvd.size()
    shared, own, unused = (tf.Variable([1.0, 2.0]) for _ in range(3))
    table = tf.Variable(tf.ones([4, 2]))
    for scale, divisor in ((True, size), (False, 1)):

        def gradients(scale: bool = scale) -> Any:
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(table, [1, 2])
                loss = tf.reduce_sum(shared * own * rank) + rank * tf.reduce_sum(rows)
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            for source in (own, unused, table):
                tape.register_local_source(source)
            found = tape.gradient(loss, [shared, own, unused, table])
            assert found[2] is None
            return found[0], found[1], tf.convert_to_tensor(found[3])

        of_shared, of_own, of_table = form(gradients)()
        mean = sum(ranks()) / size
        assert same(of_shared, [mean, 2 * mean], 1e-6)
        assert same(of_own, [rank / divisor, 2 * rank / divisor], 1e-6)
        assert same(of_table[1], [rank / divisor] * 2, 1e-6)


def scenario_local_layers(form: Form) -> None:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 1])
    shared = tf.Variable([[1.0]])
    rank, size = hvd.rank() + 1, hvd.size()

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(shared)) * rank
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
        return tape.gradient(loss, [shared, *layer.trainable_variables])

    of_shared, of_layer = form(gradients)()
    assert same(of_shared, [[sum(ranks()) / size]], 1e-6)
    assert same(of_layer, [[rank / size]], 1e-6)


def scenario_groups_change_nothing(form: Form) -> None:
    sources = variables(3)
    for arguments in ({"num_groups": 2}, {"groups": [[sources[2], sources[0]]]}):
        assert_reduced(form(lambda a=arguments: gradients(sources, sources, **a))(), mean())


def scenario_mixed_dtypes(form: Form) -> None:
    sources = [*variables(2), tf.Variable(tf.fill([3, 2], tf.constant(4.0, tf.float64)))]

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.cast(loss_of(sources[:2]), tf.float64) + loss_of(sources[2:])
        return hvd.DistributedGradientTape(tape).gradient(loss, sources)

    results = form(step)()
    assert [result.dtype for result in results] == ["float32", "float32", "float64"]
    assert_reduced(results, mean())


def scenario_compression(form: Form) -> None:
    sources = variables()
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        results = form(lambda c=compression: gradients(sources, sources, compression=c))()
        assert all(result.dtype == tf.float32 for result in results)
        assert_reduced(results, mean(), 0.2)


def scenario_weight(form: Form) -> None:
    sources = variables()
    weighted = sum(rank * rank for rank in ranks()) / sum(ranks())
    for weight in (hvd.rank() + 1, tf.constant(hvd.rank() + 1)):
        results = form(lambda w=weight: gradients(sources, sources, weight=w))()
        assert_reduced(results, weighted)


def scenario_jacobian_is_this_ranks(form: Form) -> None:
    source = tf.Variable([1.0, 2.0])

    def step() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            y = source**2 * (hvd.rank() + 1.0)
        return tape.jacobian(y, source), tape.gradient(y, source)

    jacobian, gradient = form(step)()
    diagonal = [[2.0, 0.0], [0.0, 4.0]]
    assert same(jacobian, tf.constant(diagonal) * (hvd.rank() + 1.0))
    assert same(gradient, [2 * mean(), 4 * mean()], 1e-6)


def scenario_two_tapes_of_one_step(form: Form) -> None:
    """Two tapes with equal shapes are in flight together in a function, as a GAN's may be."""
    generator, discriminator = variables(4), variables(4)

    def step() -> tuple[Any, Any]:
        with tf.GradientTape() as one, tf.GradientTape() as other:
            first, second = loss_of(generator), 10 * loss_of(discriminator)
        one = hvd.DistributedGradientTape(one)
        other = hvd.DistributedGradientTape(other)
        return one.gradient(first, generator), other.gradient(second, discriminator)

    compiled = form(step)
    for _ in range(5):
        first, second = compiled()
        assert_reduced(first, mean())
        assert_reduced(second, 10 * mean(), 1e-4)


def scenario_accumulation_in_a_loop() -> None:
    """Iterations that only add up their gradients, and rows of a table, could overlap."""
    sources = variables()
    table = tf.Variable(tf.ones([4, 2]))

    @tf.function  # type: ignore[untyped-decorator]
    def step(count: Any) -> Any:
        totals = [tf.zeros_like(source) for source in [*sources, table]]
        for _ in tf.range(count):
            with tf.GradientTape() as tape:
                loss = loss_of(sources) + tf.reduce_sum(tf.gather(table, [hvd.rank()]))
            tape = hvd.DistributedGradientTape(tape)
            reduced = tape.gradient(loss, [*sources, table])
            totals = [a + tf.convert_to_tensor(b) for a, b in zip(totals, reduced, strict=True)]
        return totals

    *totals, rows = step(20)
    assert_reduced(totals, 20 * mean(), 1e-3)
    expected = [[20 / hvd.size() * (row < hvd.size())] * 2 for row in range(4)]
    assert same(rows, expected, 1e-5)


def scenario_one_operation_per_gradient_and_step() -> None:
    sources = variables(4)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        for source, gradient in zip(sources, gradients(sources, sources), strict=True):
            source.assign_sub(0.01 * gradient)

    step()
    assert tensors_sent_by(lambda: [step() for _ in range(5)]) == 5 * 4
    first = tf.concat([tf.reshape(source, [-1]) for source in sources], axis=0)
    assert same(hvd.broadcast(first, 0), first)


def scenario_compiled_by_xla() -> None:
    generator, discriminator = variables(3), variables(3, "float64")
    unused = tf.Variable([1.0])

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def step() -> tuple[Any, Any]:
        with tf.GradientTape() as one, tf.GradientTape() as other:
            first, second = loss_of(generator), 10 * loss_of(discriminator)
        one = hvd.DistributedGradientTape(one, gradient_predivide_factor=2.0)
        other = hvd.DistributedGradientTape(other, compression=hvd.Compression.bf16)
        return (
            one.gradient(first, [*generator, unused]),
            other.gradient(second, discriminator),
        )

    for _ in range(3):
        first, second = step()
        assert first[-1] is None
        assert_reduced(first[:-1], mean())
        assert_reduced(second, 10 * mean(), 0.5)
    assert tensors_sent_by(step) == 6


def scenario_misuse_says_what_to_do() -> None:
    for arguments, text in [
        ({"op": hvd.Max}, "op=hvd.Max makes no gradient"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "cannot be combined with op=hvd.Sum"),
        ({"op": hvd.Sum, "weight": 2}, "cannot be combined with op=hvd.Sum"),
        ({"gradient_predivide_factor": 0.0}, "positive"),
    ]:
        with raises(hvd.ArgumentError, text):
            hvd.DistributedGradientTape(tf.GradientTape(), **arguments)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tape = make_tests(body, sizes(3), env=ENVIRONMENT)
