"""The collectives on torch tensors: values, forms, gradients, and the errors of misuse."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

import hvdlite.torch as hvd
from harness import run_world
from hvdlite.torch.collectives import fast_path
from parallel.scenarios import make_tests, raises, run_all, sizes

PRELOAD = ("torch._dynamo",)
REDUCED = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of this rank's number plus one."""
    return torch.full(shape, hvd.rank() + 1, dtype=dtype)


def ranks() -> range:
    return range(1, hvd.size() + 1)


def scenario_allreduce_of_every_dtype_and_op() -> None:
    for dtype in REDUCED:
        expected = {
            hvd.Sum: sum(ranks()),
            hvd.Min: 1,
            hvd.Max: hvd.size(),
            hvd.Product: torch.tensor(list(ranks())).prod().item(),
            hvd.Average: sum(ranks()) / hvd.size(),
        }
        for op, value in expected.items():
            result = hvd.allreduce(mine(3, 2, dtype=dtype), op=op)
            assert result.dtype == dtype and result.shape == (3, 2)
            assert (result == torch.full((3, 2), value).to(dtype)).all(), (dtype, op, result)


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


def scenario_integers_average_towards_zero() -> None:
    value = -1 if hvd.rank() == 0 else 0
    assert hvd.allreduce(torch.tensor([value])).item() == (-1 if hvd.size() == 1 else 0)


def scenario_average_argument_of_older_scripts() -> None:
    assert hvd.allreduce(mine(2), False)[0] == sum(ranks())
    assert hvd.allreduce(mine(2), True)[0] == sum(ranks()) / hvd.size()
    with raises(hvd.ArgumentError, "not both"):
        hvd.allreduce(mine(2), average=True, op=hvd.Sum)


def scenario_shapes() -> None:
    for shape in [(), (0,), (3, 0, 2), (1, 1, 1), (5,), (2, 3, 4, 5)]:
        result = hvd.allreduce(mine(*shape), op=hvd.Sum)
        assert result.shape == shape and (result == sum(ranks())).all()
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(hvd.allreduce(transposed), transposed)
    large = hvd.allreduce(mine(3_000_001), op=hvd.Sum)
    assert (large == sum(ranks())).all()


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


def scenario_grouped() -> None:
    tensors = [mine(3), mine(2, 2, dtype=torch.float64), mine(4, dtype=torch.int64)]
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
    ):
        for tensor, result in zip(tensors, results, strict=True):
            assert result.dtype == tensor.dtype and (result == sum(ranks())).all()
    results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(a is b for a, b in zip(results, tensors, strict=True))
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Max))
    assert (tensors[0] == sum(ranks())).all()
    assert hvd.grouped_allreduce([]) == []


def scenario_many_in_flight_in_another_order_on_each_rank() -> None:
    count = 50
    order = [(i + 7 * hvd.rank()) % count for i in range(count)]
    handles = {}
    for i in order:
        handles[i] = hvd.allreduce_async(mine(i + 1) * i, op=hvd.Sum, name=f"tensor.{i}")
    for i in reversed(order):
        assert (hvd.synchronize(handles[i]) == i * sum(ranks())).all()
        assert hvd.poll(handles[i])


def scenario_handle_keeps_its_tensors_alive() -> None:
    handles = [hvd.allreduce_async(mine(100_000) * i, op=hvd.Sum) for i in range(8)]
    rubbish = [torch.full((100_000,), -1.0) for _ in range(8)]
    for i, handle in enumerate(handles):
        assert (hvd.synchronize(handle) == i * sum(ranks())).all()
    del rubbish
    hvd.allreduce_async(mine(100_000))  # dropped while in flight
    hvd.barrier()


def scenario_allgather() -> None:
    for dtype in [*REDUCED, torch.bool]:
        mine_here = torch.full((hvd.rank() + 1, 3), hvd.rank(), dtype=dtype)
        result = hvd.allgather(mine_here)
        expected = torch.cat([torch.full((r + 1, 3), r, dtype=dtype) for r in range(hvd.size())])
        assert result.dtype == dtype and torch.equal(result, expected)
    only_last = torch.ones(int(hvd.rank() == hvd.size() - 1), 2)
    assert hvd.allgather(only_last).shape == (1, 2)
    assert hvd.allgather(torch.ones(0, 2)).shape == (0, 2)
    result = hvd.synchronize(hvd.allgather_async(torch.tensor([hvd.rank()])))
    assert result.tolist() == list(range(hvd.size()))
    result += 1  # The tensor owns its memory.


def scenario_broadcast() -> None:
    for root in range(hvd.size()):
        for dtype in [*REDUCED, torch.bool]:
            here = torch.full((2, 3), hvd.rank() + 1, dtype=dtype)
            result = hvd.broadcast(here, root)
            assert torch.equal(result, torch.full((2, 3), root + 1, dtype=dtype))
            assert torch.equal(here, torch.full((2, 3), hvd.rank() + 1, dtype=dtype))
            assert hvd.broadcast_(here, root_rank=root) is here and torch.equal(here, result)
        assert hvd.synchronize(hvd.broadcast_async(mine(), root)).item() == root + 1
        tensor = mine(5)
        assert hvd.synchronize(hvd.broadcast_async_(tensor, root)) is tensor
        assert (tensor == root + 1).all()


def scenario_a_name_is_used_again_while_other_ranks_still_wait() -> None:
    for i in range(20):
        for root in range(hvd.size()):
            if hvd.rank() != root:
                time.sleep(0.002)  # the root is done long before the others begin
            assert hvd.broadcast(mine() + i, root, name="again").item() == root + 1 + i
        assert hvd.allreduce(mine() + i, op=hvd.Sum, name="again").item() == sum(ranks()) + (
            i * hvd.size()
        )


def scenario_gradient_of_allreduce() -> None:
    for op, factor in [(hvd.Sum, hvd.size()), (hvd.Average, 1)]:
        x = mine(3).requires_grad_()
        hvd.allreduce(x, op=op, prescale_factor=0.5).sum().backward()
        assert x.grad is not None and torch.allclose(x.grad, torch.full((3,), 0.5 * factor))
        x = mine(3).requires_grad_()
        hvd.synchronize(hvd.allreduce_async(x, op=op)).sum().backward()
        assert x.grad is not None and (x.grad == factor).all()
    x = mine(3).requires_grad_()
    results = hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)
    sum(result.sum() for result in results).backward()
    assert x.grad is not None and (x.grad == 3 * hvd.size()).all()


def scenario_gradient_of_weighted_average() -> None:
    x = mine(3).requires_grad_()
    hvd.allreduce(x, weight=hvd.rank() + 1).sum().backward()
    share = (hvd.rank() + 1) / sum(ranks())
    assert x.grad is not None and torch.allclose(x.grad, torch.full((3,), share * hvd.size()))


def scenario_gradient_through_compression_and_twice() -> None:
    x = mine(3).requires_grad_()
    hvd.allreduce(x, compression=hvd.Compression.bf16, op=hvd.Sum).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32 and (x.grad == hvd.size()).all()
    x = mine(2).requires_grad_()
    (slope,) = torch.autograd.grad(hvd.allreduce(x**3, op=hvd.Sum).sum(), x, create_graph=True)
    slope.sum().backward()
    assert x.grad is not None and (x.grad == hvd.size() * 6 * x).all()


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


def scenario_gradient_of_allgather() -> None:
    rows = hvd.rank() + 1
    x = torch.ones(rows, 2, requires_grad=True)
    gathered = hvd.allgather(x)
    factors = torch.arange(1.0, len(gathered) + 1).unsqueeze(1) * (hvd.rank() + 1)
    (gathered * factors).sum().backward()
    start = sum(range(1, rows))
    expected = torch.arange(start + 1.0, start + rows + 1).unsqueeze(1) * (
        sum(ranks()) / hvd.size()
    )
    torch.testing.assert_close(x.grad, expected.expand(-1, 2))


def scenario_gradient_of_broadcast() -> None:
    root = hvd.size() - 1
    x = mine(3).requires_grad_()
    (hvd.broadcast(x, root) * (hvd.rank() + 1)).sum().backward()
    expected = sum(ranks()) / hvd.size() if hvd.rank() == root else 0
    assert x.grad is not None and (x.grad == expected).all()


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
    x = mine(3).requires_grad_()
    with raises(hvd.ArgumentError, "op=hvd.Max has no gradient; use hvd.Average or hvd.Sum"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def scenario_misuse_says_what_to_do() -> None:
    with raises(hvd.ArgumentError, r"not contiguous .*use allreduce\(\), or tensor.contiguous"):
        hvd.allreduce_(torch.ones(3, 2).t())
    with raises(hvd.ArgumentError, r"not contiguous .*use broadcast\(\)"):
        hvd.broadcast_(torch.ones(3, 2).t(), 0)
    with raises(hvd.ArgumentError, r"sparse tensor; use .to_dense\(\).*sparse_as_dense=True"):
        hvd.allreduce(torch.ones(3).to_sparse())
    with raises(hvd.ArgumentError, r"is on meta.*\.cpu\(\)"):
        hvd.allreduce(torch.ones(3, device="meta"))
    with raises(hvd.ArgumentError, "bool.*convert it"):
        hvd.allreduce(torch.ones(3, dtype=torch.bool))
    with raises(hvd.ArgumentError, f"root_rank={hvd.size()} is not a rank.*it has {hvd.size()}"):
        hvd.broadcast(torch.ones(3), hvd.size())
    with raises(hvd.ArgumentError, "Adasum takes floating-point tensors"):
        hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum)
    with raises(hvd.ArgumentError, "op=9 is not a reduce operation"):
        hvd.allreduce(torch.ones(3), op=9)
    with raises(hvd.ArgumentError, "is a float, not a tensor"):
        hvd.allreduce(3.0)
    with raises(hvd.ArgumentError, r"reshape it to \[1\]"):
        hvd.allgather(torch.tensor(3.0))


def scenario_mismatch_is_an_error_and_the_world_goes_on() -> None:
    if hvd.size() == 1:
        return
    with raises(hvd.MismatchError, "broken"):
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="broken")
    with raises(hvd.MismatchError, "root"):
        hvd.broadcast(torch.ones(3), hvd.rank() % 2, name="root")
    assert hvd.allreduce(mine(2), op=hvd.Sum)[0] == sum(ranks())


def scenario_duplicate_name() -> None:
    if hvd.size() == 1:
        return
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine(2), name="twice", op=hvd.Sum)
        with raises(hvd.DuplicateNameError, "twice"):
            hvd.allreduce_async(mine(2), name="twice", op=hvd.Sum)
    hvd.barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(mine(2), name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle)[0] == sum(ranks())


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
    with fast_path.off():
        return run_all(globals())


test_ops = make_tests(body, sizes(1, 3))
test_ops_without_the_fast_path = make_tests(body_without_fast_path, sizes(2))


def alone() -> list[float]:
    values = []
    for _ in range(3):
        hvd.init()
        values.append(hvd.allreduce(torch.tensor(2.0), op=hvd.Sum).item())
        hvd.shutdown()
        with raises(hvd.NotInitializedError, "init"):
            hvd.allreduce(torch.tensor(1.0))
    return values


def test_init_and_shutdown_again() -> None:
    assert run_world(1, alone)[0].value == [2.0, 2.0, 2.0]
