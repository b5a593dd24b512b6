"""Every implementation, forward and all gradients, against the float64 oracle. A new implementation inherits it all."""

import math
import os

import pytest
import torch
from oracle import Case, check

from fusedmlp import impls

LOW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# Rows and columns: a power of two, one less and one more (tails of vector loads and tiles), 1 (broadcasting and
# degenerate strides), widths around 1024 (a block), and no rows at all.
SHAPES = [(64, 128), (63, 127), (65, 129), (1, 1), (1, 33), (33, 1), (3, 1023), (2, 1025), (0, 16), (5,), (2, 3, 40)]
# rows, in, out: below, at and above the size of a tile; sizes that 16-byte accesses do not divide; 1 and 0.
LINEAR = [(64, 64, 64), (33, 40, 72), (65, 63, 129), (1, 16, 1), (7, 1, 9), (0, 16, 8), (130, 24, 48)]


# A C++ compiler takes seconds for each kernel of `compiled` on a CPU: one size there, and one that makes it dynamic.
FEW = {"shapes": [(64, 128), (65, 129)], "linear": [(64, 64, 64), (33, 40, 72)], "dtypes": ("fp32", "bf16")}


def slow_to_compile(impl, device):
    full = os.environ.get("FUSEDMLP_FULL_TESTS") == "1"
    return impls.resolved(impl) == "compiled" and device == "cpu" and not full


def layouts(tensor):
    """The same shape in every layout a caller may hand over."""
    yield "contiguous", tensor
    if tensor.ndim >= 2:
        yield "transposed", tensor.mT.contiguous().mT
        yield "expanded", tensor[:1].expand_as(tensor)
    if tensor.ndim >= 1:
        yield "sliced", torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


@pytest.fixture(params=LOW)
def dtype(request, impl, device):
    dtype = LOW[request.param]
    if slow_to_compile(impl, device) and request.param not in FEW["dtypes"]:
        pytest.skip("the C++ compiler takes too long: runs on a GPU, or with FUSEDMLP_FULL_TESTS=1")
    if dtype not in impls.dtypes(impl):
        pytest.skip(f"impl={impl} does not take {dtype}")
    return dtype


def normal(*shape, dtype, device, scale=1.0):
    return (torch.randn(*shape, device=device) * scale).to(dtype)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(impl, dtype, approximate, device, poisoned):
    few = slow_to_compile(impl, device)
    for shape in FEW["shapes"] if few else SHAPES:
        x = normal(*shape, dtype=dtype, device=device, scale=2.0)
        for layout, view in layouts(x) if shape == (63, 127) else [("contiguous", x)]:
            dy = normal(*shape, dtype=dtype, device=device)
            check(Case("gelu", {"x": view}, {"approximate": approximate}), impl, dy, f"{shape} {layout}")


def test_softmax(impl, dtype, device, poisoned):
    few = slow_to_compile(impl, device)
    for shape in FEW["shapes"] if few else SHAPES:
        x = normal(*shape, dtype=dtype, device=device, scale=3.0)
        for dim in range(-len(shape), 0):
            for layout, view in layouts(x) if shape in ((63, 127), (2, 3, 40)) else [("contiguous", x)]:
                dy = normal(*shape, dtype=dtype, device=device)
                check(Case("softmax", {"x": view}, {"dim": dim}), impl, dy, f"{shape} dim={dim} {layout}")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu(impl, dtype, approximate, bias, device, poisoned):
    for M, K, N in FEW["linear"] if slow_to_compile(impl, device) else LINEAR:
        x = normal(M, K, dtype=dtype, device=device)
        weight = normal(N, K, dtype=dtype, device=device, scale=K**-0.5)
        vector = normal(N, dtype=dtype, device=device) if bias else None
        views = zip(layouts(x), layouts(weight), strict=True) if M == 33 else [(("contiguous", x), ("", weight))]
        for (layout, x_view), (_, weight_view) in views:
            case = Case("linear_gelu", {"x": x_view, "weight": weight_view, "bias": vector})
            case.options["approximate"] = approximate
            check(case, impl, normal(M, N, dtype=dtype, device=device), f"{(M, K, N)} {layout}")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_mlp(impl, dtype, approximate, bias, device, poisoned):
    for M, K, N in FEW["linear"] if slow_to_compile(impl, device) else LINEAR:
        N2 = K + 3
        tensors = {
            "x": normal(M, K, dtype=dtype, device=device),
            "weight1": normal(N, K, dtype=dtype, device=device, scale=K**-0.5),
            "bias1": normal(N, dtype=dtype, device=device) if bias else None,
            "weight2": normal(N2, N, dtype=dtype, device=device, scale=N**-0.5),
            "bias2": normal(N2, dtype=dtype, device=device) if bias else None,
        }
        dy = normal(M, N2, dtype=dtype, device=device)
        check(Case("mlp", tensors, {"approximate": approximate}), impl, dy, f"{(M, K, N, N2)}")


def test_leading_dimensions(impl, device):
    """x may have any number of them, none included."""
    for shape in [(16,), (2, 3, 16)] if slow_to_compile(impl, device) else [(16,), (2, 3, 16), (2, 1, 3, 16)]:
        x, weight, bias = (normal(*s, dtype=torch.float32, device=device) for s in (shape, (8, 16), (8,)))
        got = check(Case("linear_gelu", {"x": x, "weight": weight, "bias": bias}), impl)
        assert got["y"].shape == (*shape[:-1], 8)


def test_gradients_of_any_layout(impl, device):
    """sum().backward() hands over a gradient of stride 0, a following transpose or slice others."""
    x, weight, bias = (normal(*s, dtype=torch.float32, device=device) for s in ((12, 16), (24, 16), (24,)))
    cases = [
        Case("gelu", {"x": x}),
        Case("softmax", {"x": x}, {"dim": 1}),
        Case("softmax", {"x": x}, {"dim": 0}),
        Case("linear_gelu", {"x": x, "weight": weight, "bias": bias}),
        Case("mlp", {"x": x, "weight1": weight, "bias1": bias, "weight2": weight.t(), "bias2": bias[:16]}),
    ]
    for case in cases:
        columns = 24 if case.op == "linear_gelu" else 16
        wide = normal(12, 2 * columns, dtype=torch.float32, device=device)
        gradients = {
            "expanded": torch.ones((), device=device).expand(12, columns),
            "row expanded": wide[:1, :columns].expand(12, columns),
            "transposed": wide[:, :columns].t().contiguous().t(),
            "sliced": wide[:, ::2],
        }
        for layout, dy in gradients.items():
            check(case, impl, dy, layout)


def test_softmax_of_many_rows(impl, device):
    """More than 65,535 rows: a grid's second dimension ends there."""
    x = normal(70_000, 3, dtype=torch.float32, device=device)
    check(Case("softmax", {"x": x}, {"dim": 1}), impl, normal(70_000, 3, dtype=torch.float32, device=device))


def test_softmax_of_a_wide_row(impl, device):
    for columns in (5_000, 40_000):
        x = normal(2, columns, dtype=torch.float32, device=device, scale=4.0)
        dy = normal(2, columns, dtype=torch.float32, device=device)
        # An online sum is scaled again, and rounded, once for each of a row's blocks.
        check(Case("softmax", {"x": x}, {"dim": 1}), impl, dy, roundings=2 + columns // 2048)


def test_softmax_of_special_rows(impl, dtype, device):
    """inf, NaN, rows of -inf, causal masks: finite and NaN where torch is; constant rows; large values."""
    inf = math.inf
    rows = [
        [0.0, -inf, 1.0, 2.0],
        [-inf, -inf, -inf, -inf],
        [inf, 0.0, 1.0, 2.0],
        [math.nan, 0.0, 1.0, 2.0],
        [-inf, -inf, -inf, 3.0],
        [7.0, 7.0, 7.0, 7.0],
        [1e4, -1e4, 1e4, 0.0],
        [20.0, -20.0, 0.0, 1.0],
    ]
    x = torch.tensor(rows, dtype=dtype, device=device)
    # Once narrow, once with the special values behind a prefix of -inf that is wider than a block.
    prefix = torch.full((len(rows), 4_096), -inf, dtype=dtype, device=device)
    for case in (x, torch.cat([prefix, x], 1), torch.cat([x, prefix], 1)):
        y, expected = (impls.load(name).softmax(case, 1) for name in (impl, "native"))
        assert torch.equal(torch.isnan(y), torch.isnan(expected))
        torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_special_values(impl, dtype, approximate, device):
    """Finite where torch is finite, the limits of GELU for large |x|, NaN stays NaN, also in the gradient."""
    values = [20.0, -20.0, 1e4, -1e4, 0.0, -0.0, 5.0, -5.0, 6e4, -6e4]
    x = torch.tensor(values, dtype=dtype, device=device)
    check(Case("gelu", {"x": x}, {"approximate": approximate}), impl, label="large")
    y = impls.load(impl).gelu(torch.tensor([math.nan, math.inf], dtype=dtype, device=device), approximate)
    assert torch.isnan(y[0])
    # On CPU torch's vectorised erf form gives NaN for +inf, its scalar tail and its CUDA kernel give +inf.
    assert y[1] == math.inf or impls.resolved(impl) == "native"
    # erf(-inf) = tanh(-inf) = -1, and -inf * 0 is NaN: in torch as in the mathematics of the formula.
    assert torch.isnan(impls.load(impl).gelu(torch.tensor([-math.inf], dtype=dtype, device=device), approximate)).all()


def test_fp16_sums_are_wide(impl, device):
    """A sum of 4,096 ones, or of products as large as 64, stalls or overflows in fp16."""
    if torch.float16 not in impls.dtypes(impl):
        pytest.skip("no fp16")
    constant = torch.zeros(2, 8_192, dtype=torch.float16, device=device)
    y = impls.load(impl).softmax(constant, 1)
    torch.testing.assert_close(y, torch.full_like(y, 1 / 8_192))
    x = torch.full((4, 4_096), 4.0, dtype=torch.float16, device=device)
    weight = torch.full((8, 4_096), 1 / 256, dtype=torch.float16, device=device)
    y = impls.load(impl).linear_gelu(x, weight, None, "none")
    torch.testing.assert_close(y, torch.full_like(y, 64.0))
