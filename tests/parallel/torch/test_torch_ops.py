"""The collectives on torch tensors: compression, autograd, memory, and the errors of misuse.

Values are in `test_collective_table`, gradients in `test_torch_gradients`.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

import hvdlite
import hvdlite.torch as hvd
from parallel.scenarios import make_tests, raises, run_all, sizes
from parallel.torch.slow_path import slow_path

PRELOAD = ("torch._dynamo",)


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of this rank's number plus one."""
    return torch.full(shape, hvd.rank() + 1, dtype=dtype)


def ranks() -> range:
    return range(1, hvd.size() + 1)


def scenario_bool_by_what_leaves_a_bool() -> None:
    flags = torch.tensor([False, True, hvd.rank() == 0])
    alone = hvd.size() == 1
    for op, last in ((hvd.Min, alone), (hvd.Max, True), (hvd.Product, alone)):
        result = hvd.allreduce(flags, op=op)
        assert result.dtype == torch.bool and result.tolist() == [False, True, last], op
        rows = torch.cat([flags] * hvd.size())
        assert hvd.reducescatter(rows, op=op).tolist() == [False, True, last], op
    for op in (hvd.Average, hvd.Sum):
        with raises(hvd.ArgumentError, "bool cannot be reduced; convert it"):
            hvd.allreduce(flags, op=op)
    with raises(hvd.ArgumentError, "bool takes no factors"):
        hvd.allreduce(flags, op=hvd.Max, prescale_factor=2.0)


def scenario_a_bad_call_leaves_the_world_usable() -> None:
    with raises(hvd.ArgumentError, "'huge', of dtype float32, has dimensions that multiply to"):
        hvd.allreduce(torch.empty((0, 1 << 57)), name="huge")
    with raises(hvd.ArgumentError, "this name is that of join"):
        hvd.allreduce(mine(2), name="#join")
    assert hvd.allreduce(mine(2), op=hvd.Sum)[0] == sum(ranks())


def scenario_average_argument_of_older_scripts() -> None:
    assert hvd.allreduce(mine(2), False)[0] == sum(ranks())
    assert hvd.allreduce(mine(2), True)[0] == sum(ranks()) / hvd.size()
    with raises(hvd.ArgumentError, "not both"):
        hvd.allreduce(mine(2), average=True, op=hvd.Sum)


def scenario_input_is_left_alone_and_in_place_is_not() -> None:
    tensor = mine(4)
    hvd.allreduce(tensor)
    assert (tensor == hvd.rank() + 1).all()
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert (tensor == sum(ranks())).all()
    handle = hvd.allreduce_async_(tensor, op=hvd.Max)
    assert hvd.synchronize(handle) is tensor and hvd.synchronize(handle) is tensor


def scenario_scales_and_weights() -> None:
    result = hvd.allreduce(mine(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert (result == 2 * sum(ranks())).all()
    weighted = hvd.allreduce(mine(2, dtype=torch.float64), weight=hvd.rank())
    weights = range(hvd.size())
    total = sum(weights)
    expected = sum(w * (w + 1) for w in weights) / total if total else 0
    assert torch.allclose(weighted, torch.full_like(weighted, expected), rtol=1e-14)
    poisoned = mine(2) if hvd.rank() == 0 else torch.full((2,), torch.nan)
    assert (hvd.allreduce(poisoned, weight=float(hvd.rank() == 0)) == 1).all()
    with raises(hvd.ArgumentError, "weight"):
        hvd.allreduce(mine(2), op=hvd.Sum, weight=1.0)


def scenario_a_scaled_sum_of_narrow_floats_is_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [torch.sin(torch.arange(5000.0) + rank).to(dtype) for rank in ranks()]
        total = torch.stack(inputs).float().sum(0)
        once = (total * 0.3).to(dtype)
        assert hvd.size() == 1 or not torch.equal(once, (total.to(dtype).float() * 0.3).to(dtype))
        mine_here = inputs[hvd.rank()]
        assert torch.equal(hvd.allreduce(mine_here, op=hvd.Sum, postscale_factor=0.3), once)


def scenario_compression() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(mine(3), compression=compression, op=hvd.Sum)
        assert result.dtype == torch.float32 and (result == sum(ranks())).all()
        integers = hvd.allreduce(mine(3, dtype=torch.int32), compression=compression)
        assert integers.dtype == torch.int32

    class Halving(hvd.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
            return tensor / 2, 2

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: int) -> torch.Tensor:
            return tensor * ctx

    assert (hvd.allreduce(mine(3), compression=Halving, op=hvd.Sum) == sum(ranks())).all()


def scenario_compression_gives_the_bits_of_casting_by_hand() -> None:
    for compression, narrow in (
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16(), torch.bfloat16),
    ):
        for dtype, op in ((torch.float32, hvd.Average), (torch.float64, hvd.Max)):
            for size in (3, 100_000):
                tensor = torch.sin(torch.arange(size, dtype=dtype) + hvd.rank()) * 3
                hand = hvd.allreduce(tensor.to(narrow), op=op).to(dtype)
                result = hvd.allreduce(tensor, compression=compression, op=op)
                assert result.dtype == dtype and torch.equal(result, hand)
    # Scales are applied in the tensor's own type: 1e6 would overflow float16.
    large = hvd.allreduce(
        mine(3) * 1e6, op=hvd.Sum, compression=hvd.Compression.fp16,
        prescale_factor=2.0**-12, postscale_factor=2.0**12,
    )  # fmt: skip
    assert torch.allclose(large, torch.full((3,), 1e6 * sum(ranks())), rtol=1e-3)
    if hvd.size() == 1:
        return
    compression = hvd.Compression.fp16 if hvd.rank() else hvd.Compression.bf16
    with raises(hvd.MismatchError, "wire dtype"):
        hvd.allreduce(mine(3), name="mixed", compression=compression)


def scenario_a_subclass_of_a_built_in_compressor_is_asked() -> None:
    class Loud(hvd.Compression.fp16):
        @classmethod
        def compress(cls, tensor: torch.Tensor) -> Any:
            wire, context = super().compress(tensor)
            return wire * 2, context

    assert (hvd.allreduce(mine(3), compression=Loud, op=hvd.Sum) == 2 * sum(ranks())).all()


def scenario_a_name_is_used_again_while_other_ranks_still_wait() -> None:
    for i in range(20):
        for root in range(hvd.size()):
            if hvd.rank() != root:
                time.sleep(0.002)  # the root is done long before the others begin
            assert hvd.broadcast(mine() + i, root, name="again").item() == root + 1 + i
        assert hvd.allreduce(mine() + i, op=hvd.Sum, name="again").item() == sum(ranks()) + (
            i * hvd.size()
        )


def scenario_gradient_of_weighted_average() -> None:
    x = mine(3).requires_grad_()
    hvd.allreduce(x, weight=hvd.rank() + 1).sum().backward()
    share = (hvd.rank() + 1) / sum(ranks())
    assert x.grad is not None and torch.allclose(x.grad, torch.full((3,), share * hvd.size()))


def scenario_gradient_through_compression() -> None:
    x = mine(3).requires_grad_()
    hvd.allreduce(x, compression=hvd.Compression.bf16, op=hvd.Sum).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32 and (x.grad == hvd.size()).all()


def scenario_gradient_of_in_place() -> None:
    x = mine(3).requires_grad_()
    y = x * 2
    assert hvd.allreduce_(y, op=hvd.Sum).grad_fn is not None
    y.sum().backward()
    assert x.grad is not None and (x.grad == 2 * hvd.size()).all()
    leaf = mine(3).requires_grad_()
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf and leaf.is_leaf  # data, as scripts do
    y = x.exp()  # keeps its result for backward
    hvd.broadcast_(y.detach(), 0)
    with raises(RuntimeError, "modified by an inplace operation"):
        y.sum().backward()


def scenario_subnormals_where_this_thread_flushes_them() -> None:
    bits = torch.arange(1, 5001, dtype=torch.int32)  # of subnormal numbers, whose sums are exact
    expected = bits * hvd.size()
    torch.set_flush_denormal(hvd.rank() != 1)
    try:
        for count in (1000, 5000):
            for step in range(40):
                tensor = bits[:count].clone().view(torch.float32)
                if step % 2 == hvd.rank() % 2:
                    hvd.allreduce_(tensor, op=hvd.Sum, name=f"subnormal.{count}")
                else:
                    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"subnormal.{count}")
                    while not hvd.poll(handle):
                        pass
                    hvd.synchronize(handle)
                assert torch.equal(tensor.view(torch.int32), expected[:count]), (count, step)
    finally:
        torch.set_flush_denormal(False)


def scenario_no_gradient_of_max() -> None:
    x = mine(hvd.size()).requires_grad_()
    for verb in (hvd.allreduce, hvd.reducescatter):
        with raises(hvd.ArgumentError, "op=hvd.Max has no gradient; use hvd.Average or hvd.Sum"):
            verb(x, op=hvd.Max).sum().backward()


def share_by(splits: list[int]) -> slice:
    """Return the rows that this rank gets by these splits."""
    begin = sum(splits[: hvd.rank()])
    return slice(begin, begin + splits[hvd.rank()])


def alike(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare what two operations have scaled: on GPUs they round at different places."""
    if wanted.is_cuda:
        return torch.allclose(result, wanted, rtol=1e-3)
    return torch.equal(result, wanted)


def scenario_reducescatter_by_splits_is_a_part_of_an_allreduce() -> None:
    splits = [2 * r for r in range(hvd.size())]
    tensor = torch.sin(torch.arange(2.0 * sum(splits)) + hvd.rank()).reshape(-1, 2)
    own = share_by(splits)
    arguments = {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7}
    wanted = hvd.allreduce(tensor, **arguments)[own]
    for each in (splits, torch.tensor(splits), tuple(splits), (one for one in splits)):
        assert alike(hvd.reducescatter(tensor, splits=each, **arguments), wanted)
    handle = hvd.reducescatter_async(tensor, splits=splits, **arguments)
    assert alike(hvd.synchronize(handle), wanted)
    fp16 = hvd.Compression.fp16
    mean = hvd.reducescatter(tensor, compression=fp16, splits=splits)
    assert alike(mean, hvd.allreduce(tensor, compression=fp16)[own])
    tensor.requires_grad_()
    part = hvd.reducescatter(tensor, op=hvd.Average, splits=splits)
    (part * (hvd.rank() + 1)).sum().backward()
    factors = torch.repeat_interleave(torch.arange(1.0, hvd.size() + 1), torch.tensor(splits))
    assert torch.equal(tensor.grad, factors.unsqueeze(1).expand_as(tensor))


def scenario_wrong_splits_of_a_reducescatter() -> None:
    size = hvd.size()
    if size == 1:
        return
    tensor = torch.ones(2 * size)
    ones = [1] * size
    cases = [
        (ones, f"which add up to {size}, but {2 * size} rows"),
        ([2] * (size + 1), f"has {size + 1} splits in a process set of {size}; give one for each"),
        ([-1, 2 * size + 1] + [0] * (size - 2), "has a negative split"),
    ]
    for splits, text in cases:
        with raises(hvd.ArgumentError, f"reducescatter 'x': rank .*{text}"):
            hvd.reducescatter(tensor, name="x", splits=splits)
    other = [2] * size
    other[0], other[1] = other[1] + hvd.rank() // (size - 1), other[0] - hvd.rank() // (size - 1)
    text = rf"'x': ranks disagree about the splits: .*rank {size - 1} has \[3, 1"
    with raises(hvd.MismatchError, text):
        hvd.reducescatter(tensor, name="x", splits=other)
    for splits in ([], [1.5] * size):
        with raises(hvd.ArgumentError, "give one whole number of rows for each rank"):
            hvd.reducescatter(tensor, name="x", splits=splits)
    assert len(hvd.reducescatter(tensor, name="x", splits=[2] * size)) == 2


def scenario_misuse_says_what_to_do() -> None:
    with raises(hvd.ArgumentError, r"not contiguous .*use allreduce\(\), or tensor.contiguous"):
        hvd.allreduce_(torch.ones(3, 2).t())
    with raises(hvd.ArgumentError, r"not contiguous .*use broadcast\(\)"):
        hvd.broadcast_(torch.ones(3, 2).t(), 0)
    with raises(hvd.ArgumentError, r"sparse tensor; use .to_dense\(\).*sparse_as_dense=True"):
        hvd.allreduce(torch.ones(3).to_sparse())
    with raises(hvd.ArgumentError, r"is on meta.*\.cpu\(\)"):
        hvd.allreduce(torch.ones(3, device="meta"))
    with raises(hvd.ArgumentError, f"root_rank={hvd.size()} is not a rank.*it has {hvd.size()}"):
        hvd.broadcast(torch.ones(3), hvd.size())
    with raises(hvd.ArgumentError, "Adasum takes floating-point tensors"):
        hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum)
    with raises(hvd.ArgumentError, "'f', of dtype float8_e5m2, cannot be reduced by average"):
        hvd.allreduce(torch.ones(3, dtype=torch.float8_e5m2), name="f")
    with raises(hvd.ArgumentError, "'c.0', of dtype complex64, has no min"):
        complex_ones = torch.ones(3, dtype=torch.complex64)
        hvd.grouped_allreduce([complex_ones], op=hvd.Min, name="c")
    with raises(hvd.ArgumentError, "'q': tensors of dtype bits8 cannot be sent"):
        hvd.broadcast(torch.zeros(2, dtype=torch.uint8).view(torch.bits8), 0, name="q")
    with raises(hvd.ArgumentError, "op=9 is not a reduce operation"):
        hvd.allreduce(torch.ones(3), op=9)
    for verb in (hvd.allreduce, hvd.alltoall, hvd.reducescatter):
        with raises(hvd.ArgumentError, "is a float, not a tensor.* It is 3.0"):
            verb(3.0)
    for verb in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with raises(hvd.ArgumentError, r"without dimensions has no rows; reshape it to \[1\]"):
            verb(torch.tensor(3.0))
    for splits in ([0.5], torch.ones(1, 1, dtype=torch.int64)):
        with raises(hvd.ArgumentError, "give one whole number of rows for each rank"):
            hvd.alltoall(torch.ones(2), splits)
    assert hvd.allreduce(mine(2), op=hvd.Sum)[0] == sum(ranks())


def scenario_a_name_that_is_not_text() -> None:
    bad = "layer\udc80"
    param = torch.nn.Parameter(torch.ones(3))
    calls = [
        lambda: hvd.allreduce(mine(2), name=bad),
        lambda: hvd.grouped_allreduce([mine(2), mine(3)], name=bad),
        lambda: hvd.allgather(mine(2), name=bad),
        lambda: hvd.broadcast(mine(2), 0, name=bad),
        lambda: hvd.alltoall(mine(hvd.size()), name=bad),
        lambda: hvd.reducescatter(mine(hvd.size()), name=bad),
        lambda: hvd.broadcast_object(3, 0, name=bad),
        lambda: hvd.broadcast_parameters({bad: mine(2)}, 0),
        lambda: hvd.check_replicas([(bad, torch.ones(2))]),
        lambda: _step(hvd.DistributedOptimizer(torch.optim.SGD([param]), [(bad, param)]), param),
    ]
    for call in calls[:7] if hvd.size() == 1 else calls:
        with raises(hvd.ArgumentError, "udc80.* has a character that UTF-8 cannot hold"):
            call()
    with raises(TypeError, "a name is a str, and not of type int"):
        hvd.allreduce(mine(2), name=3)  # type: ignore[arg-type]
    assert hvd.allreduce(mine(2), name="Schicht \u00e9", op=hvd.Sum)[0] == sum(ranks())


def _step(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    param.sum().backward()
    optimizer.step()


def scenario_buffers_are_averaged() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).double()
    )
    with torch.no_grad():
        for part in (model[1], model[2]):
            part.running_mean.fill_(hvd.rank())
            part.num_batches_tracked.fill_(hvd.rank())
            part.weight.fill_(hvd.rank())
    hvd.allreduce_buffers(model)
    mean = (hvd.size() - 1) / 2
    for part in (model[1], model[2]):
        assert torch.equal(part.running_mean, torch.full_like(part.running_mean, mean))
        assert torch.equal(part.running_var, torch.ones_like(part.running_var))
        assert part.num_batches_tracked == hvd.rank()
        assert bool((part.weight == hvd.rank()).all())
    hvd.allreduce_buffers(torch.nn.Linear(3, 4))
    if hvd.rank() == 0:
        hvd.allreduce_buffers(torch.nn.Linear(3, 4))  # sends nothing
    with raises(hvd.HvdliteError, "takes a model, not a OrderedDict"):
        bad: Any = model.state_dict()
        hvd.allreduce_buffers(bad)


def scenario_mpi_ops() -> None:
    ops = {"SUM": hvd.mpi_ops.Sum, "AVERAGE": hvd.mpi_ops.Average, "ADASUM": hvd.mpi_ops.Adasum}
    assert list(ops.values()) == [hvd.Sum, hvd.Average, hvd.Adasum]
    assert hvd.mpi_ops.allreduce(torch.ones(1), op=ops["SUM"]) == hvd.size()


def scenario_slips() -> None:
    model: Any = torch.nn.Linear(3, 2)
    with raises(hvd.HvdliteError, "takes an optimizer, not a Linear: pass an optimizer"):
        hvd.DistributedOptimizer(model)
    with raises(hvd.HvdliteError, "pass model.state_dict()"):
        hvd.broadcast_parameters(model)
    whole: Any = hvdlite
    with raises(AttributeError, "use import hvdlite.torch as hvd"):
        whole.init()
    with raises(AttributeError, "'__wrapped__'$"):
        assert whole.__wrapped__


def scenario_allreduce_in_one_graph() -> None:
    def mean_of_squares(x: torch.Tensor, name: str | None) -> torch.Tensor:
        shares = hvd.allreduce((x * x).t(), name=name, prescale_factor=2.0)
        return shares.sum() + hvd.allreduce(x, op=hvd.Max, name=name and "max").amax().detach()

    compiled = torch.compile(mean_of_squares, backend="aot_eager", fullgraph=True)
    for name in (None, "squares"):
        for _ in range(2):
            whole, own = (mine(2, 3).requires_grad_() for _ in range(2))
            expected, result = mean_of_squares(whole, name), compiled(own, name)
            expected.backward()
            result.backward()
            assert torch.equal(result, expected) and torch.equal(own.grad, whole.grad)
    with raises(hvd.ArgumentError, "average, the second argument"):
        torch.compile(lambda x: hvd.allreduce(x, hvd.Sum), backend="eager")(mine(2))
    strided = mine(4, 6)[:, ::2].requires_grad_()
    arguments = (strided, "checked", int(hvd.Sum), 1.0, 0.5, 0)
    torch.library.opcheck(torch.ops.hvdlite.allreduce.default, arguments)


def scenario_other_collectives_in_a_compiled_function() -> None:
    def several(x: torch.Tensor) -> torch.Tensor:
        total = hvd.allreduce_(x * 2, op=hvd.Sum)
        compressed = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
        first, second = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
        handle = hvd.broadcast_async(x + 1, root_rank=0)
        rows = hvd.allgather(x).sum() + hvd.reducescatter(total, op=hvd.Sum).sum()
        return total + compressed + first + second + rows + hvd.synchronize(handle)

    compiled = torch.compile(several, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(compiled(mine(4)), several(mine(4)))


def body() -> dict[str, str]:
    return run_all(globals())


def body_without_fast_path() -> dict[str, str]:
    with slow_path():
        return run_all(globals())


test_ops = make_tests(body, sizes(1, 3))
test_ops_without_the_fast_path = make_tests(body_without_fast_path, sizes(2))
