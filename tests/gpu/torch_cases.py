"""Scenarios of hvdlite.torch that run on any device.

Each scenario takes the device. On a GPU they show what the doubles cannot: torch's own tensors and
streams, the real NCCL, the real kernels. On CPUs they show that the scenarios themselves are right.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from parallel.scenarios import run_all
from parallel.torch.test_torch_adasum import adasum, array_of, close
from patience import Stopwatch, wait_until
from references import virtual_ranks

REDUCED = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
OF_ADASUM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
BATCH = 24  # of all ranks together


def mine(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of this rank's number plus one."""
    return torch.full(shape, hvd.rank() + 1, dtype=dtype, device=device)


def total() -> int:
    return sum(range(1, hvd.size() + 1))


def is_all(tensor: torch.Tensor, value: float, device: torch.device) -> bool:
    """Return whether a tensor is on the device and all of its elements have this value."""
    expected = torch.full_like(tensor, value)
    return tensor.device.type == device.type and torch.equal(tensor, expected)


def stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which work is queued on another stream, if the device has streams."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return contextlib.nullcontext()


def delay(device: torch.device, cycles: int = 100_000_000) -> None:
    """Pause the current stream for about 50 ms, so that code that does not wait for it is wrong."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def scenario_allreduce_of_every_dtype_and_op(device: torch.device) -> None:
    values = range(1, hvd.size() + 1)
    expected = {
        hvd.Sum: sum(values),
        hvd.Min: 1,
        hvd.Max: hvd.size(),
        hvd.Product: torch.tensor(list(values)).prod().item(),
        hvd.Average: sum(values) / hvd.size(),
    }
    for dtype in REDUCED:
        for op, value in expected.items():
            result = hvd.allreduce(mine(device, 3, 2, dtype=dtype), op=op)
            rounded = torch.tensor(value).to(dtype).item()
            assert result.dtype == dtype and is_all(result, rounded, device), (dtype, op, result)


def scenario_scales_and_weights(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        given = mine(device, 5, dtype=dtype)
        scaled = hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert is_all(scaled, 2 * total(), device), dtype
        assert is_all(given, hvd.rank() + 1, device)
        chosen = hvd.allreduce(given, weight=float(hvd.rank() == hvd.size() - 1))
        assert is_all(chosen, hvd.size(), device), dtype


def scenario_many_tensors_are_fused(device: torch.device) -> None:
    for dtypes in ([torch.float32], [torch.float32, torch.bfloat16, torch.float16, torch.int64]):
        tensors = [
            mine(device, 1 + 37 * i % 1000, dtype=dtypes[i % len(dtypes)]) for i in range(300)
        ]
        for result in hvd.grouped_allreduce(tensors, op=hvd.Sum):
            assert is_all(result, total(), device), (result.dtype, result.shape)
        handles = [
            hvd.allreduce_async_(tensor, op=hvd.Sum, prescale_factor=2.0, name=f"fused.{i}")
            for i, tensor in enumerate(tensors)
            if tensor.is_floating_point()
        ]
        for handle in handles:
            assert is_all(hvd.synchronize(handle), 2 * total(), device)


def scenario_sizes_and_places(device: torch.device) -> None:
    for shape in [(), (0,), (3, 0, 2), (1,), (5,), (3_000_001,)]:
        assert is_all(hvd.allreduce(mine(device, *shape), op=hvd.Sum), total(), device)
    for start in range(1, 8):  # These parts are not aligned to 16 bytes.
        part = mine(device, 1000, dtype=torch.bfloat16)[start:]
        hvd.grouped_allreduce_([part, mine(device, 3, dtype=torch.bfloat16)], op=hvd.Sum)
        assert is_all(part, total(), device)
    transposed = torch.arange(6.0, device=device).reshape(2, 3).t()
    assert torch.equal(hvd.allreduce(transposed), transposed)


def scenario_allgather(device: torch.device) -> None:
    for dtype in [*REDUCED, torch.bool]:
        rows = torch.full((hvd.rank() + 1, 3), hvd.rank(), dtype=dtype, device=device)
        expected = [torch.full((r + 1, 3), r, dtype=dtype) for r in range(hvd.size())]
        result = hvd.allgather(rows)
        assert result.device.type == device.type and torch.equal(result.cpu(), torch.cat(expected))
    empty = hvd.allgather(torch.ones(int(hvd.rank() == 0), 2, device=device))
    assert empty.shape == (1, 2)


def scenario_broadcast(device: torch.device) -> None:
    for root in range(hvd.size()):
        for dtype in [*REDUCED, torch.bool]:
            here = mine(device, 2, 3, dtype=dtype)
            assert is_all(hvd.broadcast(here, root), root + 1, device)
            assert hvd.broadcast_(here, root) is here and is_all(here, root + 1, device)


def scenario_reducescatter(device: torch.device) -> None:
    for dtype in REDUCED:
        rows = torch.arange(7, device=device).unsqueeze(1).expand(7, 3).to(dtype)
        share = hvd.reducescatter(rows * (hvd.rank() + 1), op=hvd.Sum)
        everything = hvd.allgather(share)
        assert share.device.type == device.type and torch.equal(everything, rows * total()), dtype
        splits = [0] * (hvd.size() - 1) + [7]
        last = hvd.reducescatter(rows * (hvd.rank() + 1), op=hvd.Sum, splits=splits)
        assert torch.equal(hvd.allgather(last), rows * total()), dtype


def scenario_alltoall(device: torch.device) -> None:
    for dtype in [*REDUCED, torch.bool]:
        splits = torch.arange(1, hvd.size() + 1)  # rank r gets r + 1 rows of each
        rows = mine(device, int(splits.sum()), 2, dtype=dtype)
        received, sizes = hvd.alltoall(rows, splits)
        expected = [torch.full((hvd.rank() + 1, 2), r + 1, dtype=dtype) for r in range(hvd.size())]
        assert received.device.type == device.type and torch.equal(
            received.cpu(), torch.cat(expected)
        )
        assert sizes.tolist() == [hvd.rank() + 1] * hvd.size()


def scenario_streams_wait_for_each_other(device: torch.device) -> None:
    for count in (1000, 4_000_000):
        for in_place in (True, False):
            tensors = [torch.zeros(count, device=device) for _ in range(3)]
            if device.type == "cuda":
                torch.cuda.synchronize()
            with stream(device):
                delay(device)
                for tensor in tensors:
                    tensor.add_(hvd.rank() + 1)
                start = hvd.grouped_allreduce_async_ if in_place else hvd.grouped_allreduce_async
                handle = start(tensors, op=hvd.Sum)
            with stream(device):
                for result in hvd.synchronize(handle):
                    assert is_all(result, total(), device)


def scenario_memory_in_flight_is_not_reused(device: torch.device) -> None:
    with stream(device):
        delay(device)
        handles = [
            hvd.allreduce_async(mine(device, 100_000) * i, op=hvd.Sum, name=f"reuse.{i}")
            for i in range(8)
        ]
    rubbish = [torch.full((100_000,), -1.0, device=device) for _ in range(16)]
    for i, handle in enumerate(handles):
        assert is_all(hvd.synchronize(handle), i * total(), device)
    del rubbish
    hvd.allreduce_async(mine(device, 100_000), name="dropped")
    hvd.barrier()


def scenario_the_host_does_not_wait(device: torch.device) -> None:
    tensor = mine(device, 1000)
    hvd.allreduce_(tensor, op=hvd.Sum)  # This loads the kernels.
    if device.type == "cuda":
        torch.cuda.synchronize()
        delay(device, 2_000_000_000)
        hvd.allreduce_(tensor, op=hvd.Max)
        assert not torch.cuda.current_stream().query(), "the host waited for the device"
    assert is_all(tensor, total(), device)


def scenario_poll_becomes_true(device: torch.device) -> None:
    handle = hvd.allreduce_async(mine(device, 10), op=hvd.Sum)
    wait_until(lambda: hvd.poll(handle), "the end of the operation")
    assert is_all(hvd.synchronize(handle), total(), device)


def scenario_host_and_device_in_one_operation(device: torch.device) -> None:
    host = torch.device("cpu")
    handles = {
        (place, i): hvd.allreduce_async(mine(place, 100 + i), op=hvd.Sum, name=f"mixed.{n}.{i}")
        for i in range(20)
        for n, place in enumerate((host, device))
    }
    for (place, _), handle in handles.items():
        assert is_all(hvd.synchronize(handle), total(), place)
    places = [device, host, device]
    results = hvd.grouped_allreduce([mine(place, 7) for place in places], op=hvd.Sum)
    for place, result in zip(places, results, strict=True):
        assert is_all(result, total(), place)


def scenario_adasum(device: torch.device) -> None:
    shapes = [(7,), (), (3, 0), (40, 50), (300_001,)]
    for dtype, tolerance in OF_ADASUM.items():
        given = [
            torch.from_numpy(array_of(hvd.rank(), shape, seed)).to(device, dtype)
            for seed, shape in enumerate(shapes)
        ]
        given.append(mine(device, 5, dtype=dtype) * int(hvd.rank() == 0))  # zero on the others
        kept = [tensor.clone() for tensor in given]
        results = hvd.grouped_allreduce(given, op=hvd.Adasum, postscale_factor=2.0)
        again = hvd.grouped_allreduce(given, op=hvd.Adasum, postscale_factor=2.0)
        assert is_all(results[-1], 2, device)
        for seed, (shape, result) in enumerate(zip(shapes, results[:-1], strict=True)):
            wanted = 2 * adasum([array_of(rank, shape, seed) for rank in range(hvd.size())])
            assert result.device.type == device.type and close(result.cpu(), wanted, 2 * tolerance)
            for bits in (again[seed], hvd.broadcast(result, 0)):
                assert torch.equal(result, bits), (dtype, shape)
        assert all(torch.equal(*pair) for pair in zip(given, kept, strict=True))


def scenario_adasum_of_what_a_stream_computes_late(device: torch.device) -> None:
    with stream(device):
        values = torch.ones(20_000, device=device)
        delay(device)
        values.mul_(hvd.rank() + 1)
        hvd.allreduce_(values, op=hvd.Adasum)
        assert is_all(values, total() / hvd.size(), device)


def scenario_adasum_while_others_have_joined(device: torch.device) -> None:
    for step in range(hvd.rank() + 1):
        tensor = torch.from_numpy(array_of(hvd.rank(), (600,), step)).to(device)
        wanted = adasum([array_of(rank, (600,), step) for rank in range(step, hvd.size())])
        result = hvd.allreduce(tensor, op=hvd.Adasum, name="who is left")
        assert close(result.cpu(), wanted, 1e-12)
    hvd.join()


def scenario_process_sets(device: torch.device) -> None:
    if hvd.size() == 1:  # whose only set is the world
        with pytest.raises(hvd.ArgumentError, match="the world"):
            hvd.add_process_set([0])
        return
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    own = sets[hvd.rank()]
    for _ in range(2):
        alone = hvd.allreduce_async(mine(device, 50), op=hvd.Sum, name="both", process_set=own)
        together = hvd.allreduce_async(mine(device, 50), op=hvd.Sum, name="both")
        assert is_all(hvd.synchronize(together), total(), device)
        assert is_all(hvd.synchronize(alone), hvd.rank() + 1, device)
    assert hvd.allgather(mine(device, 2), process_set=own).tolist() == [hvd.rank() + 1.0] * 2
    for each in sets:
        hvd.remove_process_set(each)


def scenario_gradients(device: torch.device) -> None:
    x = mine(device, 3).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    assert x.grad is not None and is_all(x.grad, hvd.size(), device)
    x = mine(device, 2, 3).requires_grad_()
    (hvd.allgather(x) * (hvd.rank() + 1)).sum().backward()
    assert x.grad is not None and is_all(x.grad, total() / hvd.size(), device)


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    return nn.Sequential(*layers).to(device, torch.float64)


def train(
    model: nn.Module, optimizer: Any, part: slice, device: torch.device, set_to_none: bool = True
) -> list[Any]:
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
        targets = torch.stack([inputs.sum(1).sin(), inputs.prod(1)], dim=1)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = nn.functional.mse_loss(model(inputs[part].to(device)), targets[part].to(device))
        loss.backward()
        optimizer.step()
    return list(model.parameters())


def scenario_training_equals_one_process(device: torch.device) -> None:
    part = slice(hvd.rank() * BATCH // hvd.size(), (hvd.rank() + 1) * BATCH // hvd.size())
    alone = make_model(device)
    whole = train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), slice(None), device)
    for compression, tolerance in ((hvd.Compression.none, 1e-10), (hvd.Compression.bf16, 0.1)):
        model = make_model(device)
        if hvd.rank() != 0:
            for param in model.parameters():
                param.data.fill_(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            adam, model.named_parameters(), compression=compression, bucket_cap_mb=0.0005
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for one, other in zip(train(model, optimizer, part, device), whole, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=tolerance), (one - other).abs().max()


def scenario_gradients_are_views_of_buckets(device: torch.device) -> None:
    part = slice(hvd.rank() * BATCH // hvd.size(), (hvd.rank() + 1) * BATCH // hvd.size())
    alone = make_model(device)
    whole = train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), slice(None), device)
    for set_to_none in (True, False):
        model = make_model(device)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            adam, model.named_parameters(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True
        )
        ours = train(model, optimizer, part, device, set_to_none)
        for one, other in zip(ours, whole, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-10), (one - other).abs().max()
        views = [param.grad for param in model.parameters()]
        assert len({view.untyped_storage().data_ptr() for view in views}) == 1
        train(model, optimizer, part, device, set_to_none)
        assert all(p.grad is view for p, view in zip(model.parameters(), views, strict=True))
        del optimizer, model, views  # The release waits until the device has finished with them.
    assert is_all(hvd.allreduce(mine(device, 1000), op=hvd.Sum), total(), device)


def scenario_sharded_training_equals_one_process(device: torch.device) -> None:
    part = slice(hvd.rank() * BATCH // hvd.size(), (hvd.rank() + 1) * BATCH // hvd.size())
    alone = make_model(device)
    whole = train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), slice(None), device)
    model = make_model(device)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.ShardedOptimizer(adam, model.named_parameters())
    for one, other in zip(train(model, optimizer, part, device), whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10), (one - other).abs().max()


def scenario_virtual_ranks_equal_one_process(device: torch.device) -> None:
    torch.manual_seed(1)
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    model = nn.Sequential(*layers).to(device)
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), virtual_size=4)
    samples = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))
    sampler = hvd.VirtualBatchSampler(samples, batch_size=4, virtual_size=4, seed=7)
    loader = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
    if device.type == "cuda" and hvd.size() > 1:
        with pytest.raises(hvd.ArgumentError, match="in an order of its own"):
            next(optimizer.virtual_steps(loader, 0, model))
        return
    for step in optimizer.virtual_steps(loader, 0, model):
        optimizer.zero_grad()
        for batch in step:
            loss = model(batch.to(device)).square().mean()
            loss.backward()
            step.record(loss)
        optimizer.step()
        batches = [samples[sampler.batch(0, step.number, one)].to(device) for one in range(4)]
        expected = virtual_ranks.step(
            alone, lambda batch: alone(batch).square().mean(), batches, 7, 0, step.number
        )
        plain.step()
        assert step.loss == expected
        states = model.state_dict().values(), alone.state_dict().values()
        assert all(map(torch.equal, *states))


def scenario_shared_parameters_are_refused_on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        return
    model = make_model(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hvd.ArgumentError, match="needs parameters on CPUs"):
        hvd.ShardedOptimizer(sgd, model.named_parameters(), share_parameters=True)


def scenario_training_does_not_wait_for_the_device(device: torch.device) -> None:
    inputs = torch.ones(4, 6, dtype=torch.float64, device=device)
    for options in ({}, {"gradient_as_bucket_view": True}, {"compression": hvd.Compression.bf16}):
        model = make_model(device)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
        kept = model[0].weight.clone()
        try:
            for step in range(6):
                if step == 3 and device.type == "cuda":
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # "a prototype feature"
                        torch.cuda.set_sync_debug_mode("error")
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        assert not torch.equal(model[0].weight, kept), options


def scenario_ranks_at_different_steps_are_noticed(device: torch.device) -> None:
    if hvd.size() == 1:
        return
    model = make_model(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    inputs = torch.ones(4, 6, dtype=torch.float64, device=device)
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    if hvd.rank() == 0:  # It leaves out a step.
        optimizer.synchronize()
        optimizer.zero_grad()
    else:
        optimizer.step()
    with pytest.raises(HvdliteError, match="met those of another step"):
        for _ in range(5):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def scenario_a_scaler_skips_the_same_step_on_all_ranks(device: torch.device) -> None:
    model, scaler = nn.Linear(3, 1).to(device), torch.amp.GradScaler(device.type, init_scale=8.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(3):
        before = model.weight.clone()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, device=device)).sum()
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (step == 1), step
    assert scaler.get_scale() == 4.0


def scenario_batch_norm_of_all_ranks(device: torch.device) -> None:
    everything = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1)).to(device)
    share = everything.chunk(hvd.size())[hvd.rank()]
    ours, theirs = hvd.SyncBatchNorm(3).to(device), nn.BatchNorm1d(3).to(device)
    expected = theirs(everything).chunk(hvd.size())[hvd.rank()]
    assert torch.allclose(ours(share), expected, atol=1e-5)
    assert torch.allclose(ours.running_var, theirs.running_var, atol=1e-5)


def scenario_disagreement_is_an_error_and_the_world_goes_on(device: torch.device) -> None:
    if hvd.size() == 1:
        return
    with pytest.raises(hvd.MismatchError, match="shapes"):
        hvd.allreduce(mine(device, 3 + hvd.rank()), name="shapes")
    if device.type == "cuda":
        place = device if hvd.rank() == 0 else torch.device("cpu")
        with pytest.raises(hvd.MismatchError, match="places"):
            hvd.allreduce(mine(place, 3), name="places")
    assert is_all(hvd.allreduce(mine(device, 2), op=hvd.Sum), total(), device)


def conformance(device_name: str) -> dict[str, str]:
    """Run one rank, with every scenario on the device; see `run_all`."""
    torch.set_num_threads(1)
    return run_all(globals(), forms=[torch.device(device_name)])


def lose_a_peer(device_name: str) -> tuple[str, float]:
    """Run one rank of two, of which rank 1 is killed; return rank 0's error and its delay in s."""
    device = torch.device(device_name)
    hvd.init()
    hvd.allreduce(mine(device, 1000))
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(mine(device, 1_000_000), name="lost")
        signal.raise_signal(signal.SIGKILL)
    watch = Stopwatch()
    try:
        while True:
            handle = hvd.allreduce_async(mine(device, 1_000_000), name="lost")
            hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        return str(error), watch.seconds()
