"""Scale factors in every form of allreduce and reducescatter, against the arithmetic in float64.

`test_collective_table` checks the bits without factors; here an input is scaled, all are reduced,
an average is divided, and the result is scaled. Narrow floats use float32, and are rounded.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

import hvdlite.torch as hvd
from parallel.core.test_collective_table import ALLREDUCE_FORMS, SCATTER_FORMS
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCALES = [(0.5, 1.0), (1.0, 0.25), (-2.0, 3.0), (1 / 3, 3.0)]
SHAPES = [(7, 3), (5000,)]
OPS = {
    "Sum": lambda stack: stack.sum(0),
    "Average": lambda stack: stack.mean(0),
    "Min": lambda stack: stack.amin(0),
    "Max": lambda stack: stack.amax(0),
    "Product": lambda stack: stack.prod(0),
}


def given(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * rank + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def compare(forms: dict[str, Any], share: Any) -> None:
    for dtype, op, (pre, post), shape in itertools.product(DTYPES, OPS, SCALES, SHAPES):
        inputs = [given(rank, dtype, shape).double() * pre for rank in range(hvd.size())]
        expected = share(OPS[op](torch.stack(inputs)) * post)
        scales = {"prescale_factor": pre, "postscale_factor": post}
        bound = 8 * torch.finfo(dtype).eps * max(1.0, abs(post), abs(pre * post) ** hvd.size())
        for name, form in forms.items():
            mine = given(hvd.rank(), dtype, shape)
            (result,) = form([mine], op=getattr(hvd, op), **scales)
            assert result.dtype == dtype, name
            close = torch.allclose(result.double(), expected, rtol=bound, atol=bound)
            assert close, (name, dtype, op, pre, post, shape)
            assert torch.equal(mine, given(hvd.rank(), dtype, shape)), name


def scenario_allreduce() -> None:
    compare(ALLREDUCE_FORMS, lambda whole: whole)


def scenario_reducescatter() -> None:
    compare(SCATTER_FORMS, lambda whole: whole.tensor_split(hvd.size())[hvd.rank()])


def scenario_a_scaled_sum_of_narrow_floats_is_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        inputs = torch.stack([given(rank, dtype, (5000,)) for rank in range(hvd.size())])
        once = (inputs.float().sum(0) * 0.3).to(dtype)
        assert not torch.equal(once, (inputs.float().sum(0).to(dtype).float() * 0.3).to(dtype))
        mine = inputs[hvd.rank()]
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.3), once)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_arithmetic = make_tests(body, sizes(2, 3))
