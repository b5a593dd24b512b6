"""The pointwise GELU kernels against float64, and what their launchers owe the caller."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_within

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp.kernels.gelu import gelu_bwd, gelu_fwd

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = {torch.float32: 1024, torch.float16: 2048, torch.bfloat16: 2048}

pytestmark = pytest.mark.interpreter
in_both_forms = pytest.mark.parametrize("approximate", ["none", "tanh"])
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gelu_grad(dy, x, approximate):
    return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)


def check(x, dy, approximate):
    y, dx = gelu_fwd(x, approximate), gelu_bwd(dy, x, approximate)
    assert_within(y, F.gelu(x.double(), approximate=approximate), F.gelu(x, approximate=approximate), "y")
    expected = gelu_grad(dy.double(), x.double(), approximate)
    assert_within(dx, expected, gelu_grad(dy, x, approximate), "dx", dy.abs().max().item() if dy.numel() else 1.0)
    return y, dx


@in_both_forms
@in_all_dtypes
@pytest.mark.parametrize("spread", [1.0, 20.0, 1e4])
def test_equals_float64_for_small_and_large_values(device, dtype, approximate, spread):
    x = (torch.randn(3001, device=device) * spread).to(dtype)
    check(x, torch.randn_like(x), approximate)


@in_all_dtypes
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_last_program_is_full_or_not(device, dtype, difference, poisoned):
    """One element less than two blocks, exactly two, one more; and `torch.empty` shows what is not written."""
    x = torch.randn(2 * BLOCK[dtype] + difference, device=device).to(dtype)
    check(x, torch.randn_like(x), "none")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 5)])
def test_any_shape(device, shape):
    x = torch.randn(shape, device=device)
    check(x, torch.randn_like(x), "tanh")


@in_both_forms
def test_fp32_is_accurate_to_a_few_units_in_the_last_place(device, approximate):
    """Also for negative x, where 1 + erf and 1 + tanh cancel and lose all digits from -5 on."""
    x = torch.linspace(-12.0, 12.0, 20011, device=device)
    y = gelu_fwd(x, approximate).double()
    expected = float64_without_cancellation(x.double(), approximate)
    relative = ((y - expected) / expected).abs()
    unit = torch.finfo(torch.float32).eps
    assert relative[x.abs() <= 1].max() <= 8 * unit
    assert relative[x > 1].max() <= 4 * unit
    # The exponent, x^2 / 2 or more, carries its own rounding into the tail. Below 1e-35 fp32 runs out.
    tail = (x < -1) & (expected < -1e-35)
    assert (relative / (1 + x.double() ** 2))[tail].max() <= 8 * unit


def float64_without_cancellation(x, approximate):
    if approximate == "none":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@in_both_forms
def test_infinities_and_nan_as_in_torch(device, approximate):
    """In float64: torch's own fp32 erf form gives NaN for +inf on some CPUs and +inf on a GPU."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e4, -1e4, 1e18, -1e18], device=device)
    y, dx = gelu_fwd(x, approximate), gelu_bwd(torch.ones_like(x), x, approximate)
    assert_same(y, F.gelu(x.double(), approximate=approximate))
    assert_same(dx, gelu_grad(torch.ones_like(x).double(), x.double(), approximate))


def assert_same(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 3:],
        lambda x: x[:, :1].expand(-1, 7),
        lambda x: x.view(6, 4, 10).permute(2, 0, 1),
        lambda x: x.view(-1)[1:],
    ],
    ids=["transposed", "every other", "inner", "expanded", "permuted", "unaligned"],
)
def test_layouts_of_input_and_gradient(device, layout):
    x = layout(torch.randn(6, 40, device=device))
    y, dx = check(x, layout(torch.randn(6, 40, device=device)), "none")
    expected = torch.empty_like(x).stride()
    assert y.stride() == expected
    assert dx.stride() == expected
    # What `y.sum().backward()` sends back: one element, stride 0.
    check(x, torch.ones((), device=device).expand_as(x), "none")


def test_inputs_stay_and_results_repeat(device):
    x, dy = torch.randn(2, 5000, device=device)
    before = x.clone(), dy.clone()
    first, second = ((gelu_fwd(x, "none"), gelu_bwd(dy, x, "none")) for _ in range(2))
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 2**31 + 4097
    x = torch.ones(n, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.tensor([2.0, -1.0, 3.0])
    y = gelu_fwd(x, "none")
    assert torch.equal(y[-3:], F.gelu(x[-3:]))
    assert torch.equal(y[2**31 - 2 : 2**31 + 2], F.gelu(x[:4]))
    dx = gelu_bwd(x, x, "none")
    torch.testing.assert_close(dx[-3:], gelu_grad(x[-3:], x[-3:], "none"))


@pytest.mark.gpu
def test_other_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(1000, device="cuda:1")
    check(x, torch.randn_like(x), "none")
    assert torch.cuda.current_device() == 0
