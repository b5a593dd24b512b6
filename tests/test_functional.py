"""What the public functions say of wrong arguments: the argument, what came, what is accepted."""

import pytest
import torch
from conftest import raises

from fusedmlp import functional as fn

x, w, b = torch.ones(4, 8), torch.ones(16, 8), torch.ones(16)
w2, b2 = torch.ones(8, 16), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fn.gelu([1.0]), TypeError, ["x must be a torch.Tensor", "list"]),
        (lambda: fn.gelu(torch.ones(2, dtype=torch.int64)), TypeError, ["x is torch.int64", "torch.float32"]),
        (lambda: fn.gelu(torch.ones(2, dtype=torch.complex64)), TypeError, ["x is torch.complex64"]),
        (lambda: fn.gelu(torch.ones(2, 2).to_sparse()), TypeError, ["x has layout torch.sparse_coo", "torch.strided"]),
        (lambda: fn.gelu(x, "quick"), ValueError, ["approximate='quick'", '"none"', '"tanh"']),
        (lambda: fn.softmax(x, 2), ValueError, ["dim=2", "2 dimensions", "-2 to 1"]),
        (lambda: fn.softmax(x, -3), ValueError, ["dim=-3", "-2 to 1"]),
        (lambda: fn.softmax(torch.tensor(1.0), 1), ValueError, ["dim=1", "-1 to 0"]),
        (lambda: fn.softmax(x, 1.0), TypeError, ["dim must be an int", "1.0"]),
        (lambda: fn.softmax(x, True), TypeError, ["dim must be an int", "True"]),
        (lambda: fn.linear_gelu(x, [[1.0]]), TypeError, ["weight must be a torch.Tensor", "list"]),
        (lambda: fn.linear_gelu(x, w.half()), TypeError, ["weight is torch.float16", "x is torch.float32"]),
        (lambda: fn.linear_gelu(x, w.to("meta")), ValueError, ["weight is on meta", "x on cpu"]),
        (lambda: fn.linear_gelu(x, w.to_sparse()), TypeError, ["weight has layout torch.sparse_coo", "torch.strided"]),
        (lambda: fn.mlp(x, w, b, w2.to_sparse(), b2), TypeError, ["weight2 has layout torch.sparse_coo"]),
        (lambda: fn.linear_gelu(x, w[0]), ValueError, ["weight must be (out_features, in_features)", "(8,)"]),
        (lambda: fn.linear_gelu(x[:, :7], w), ValueError, ["x has shape (4, 7)", "accepted: (..., 8)"]),
        (lambda: fn.linear_gelu(torch.tensor(1.0), w), ValueError, ["x has shape ()", "(..., 8)"]),
        (lambda: fn.linear_gelu(x, w, b[:3]), ValueError, ["bias has shape (3,)", "accepted: (16,) or None"]),
        (lambda: fn.linear_gelu(x, w, b.double()), TypeError, ["bias is torch.float64"]),
        (lambda: fn.linear_gelu(x, w, 1.0), TypeError, ["bias must be a torch.Tensor", "float"]),
        (lambda: fn.linear_gelu(x, w, b, True), ValueError, ["approximate=True"]),
        (lambda: fn.mlp(x, w, b, w2[:, :9], b2), ValueError, ["weight2 has shape (8, 9)", "accepted: (N2, 16)"]),
        (lambda: fn.mlp(x, w, b, w2, b), ValueError, ["bias2 has shape (16,)", "accepted: (8,)"]),
        (lambda: fn.mlp(x, w, b, w2.half(), b2), TypeError, ["weight2 is torch.float16"]),
        (lambda: fn.mlp(x, w[0], b, w2, b2), ValueError, ["weight1 must be (out_features, in_features)"]),
        (lambda: fn.mlp(x, None, b, w2, b2), TypeError, ["weight1 must be a torch.Tensor", "NoneType"]),
    ],
)
def test_a_wrong_argument_is_named(call, error, words):
    with raises(error, *words):
        call()


def test_wrong_arguments_are_named_under_autocast_too():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with raises(ValueError, "x has shape (4, 7)"):
            fn.linear_gelu(x[:, :7], w)
        with raises(TypeError, "x must be a torch.Tensor"):
            fn.linear_gelu(None, w)


def test_an_implementation_says_which_dtypes_and_devices_it_takes(monkeypatch):
    from fusedmlp.impls import native

    monkeypatch.setattr(native, "DTYPES", (torch.float32,))
    monkeypatch.setattr(native, "DEVICES", ("cuda",), raising=False)
    with raises(TypeError, "x is torch.float16", "impl='native' accepts torch.float32"):
        fn.gelu(x.half(), impl="native")
    with raises(ValueError, "x is on cpu", "impl='native' accepts tensors on cuda"):
        fn.softmax(x, impl="native")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_tensors_give_empty_results_and_gradients(impl, shape, device):
    empty = torch.empty(shape, device=device, requires_grad=True)
    for y in (fn.gelu(empty, impl=impl), fn.softmax(empty, -1, impl=impl)):
        assert y.shape == shape
        y.sum().backward()
        assert empty.grad.shape == shape


def test_the_meta_device_gives_shapes(impl):
    if impl == "compiled":
        pytest.skip("its compiler takes seconds")
    on_meta = [t.to("meta").requires_grad_() for t in (torch.ones(2, 4, 8), w, b, w2, b2)]
    y = fn.softmax(fn.gelu(fn.mlp(*on_meta, impl=impl), impl=impl), impl=impl)
    assert (y.device.type, y.shape) == ("meta", (2, 4, 8))
    y.sum().backward()
    assert [t.grad.shape for t in on_meta] == [t.shape for t in on_meta]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused():
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=layout)
        with raises(TypeError, "x has layout", "accepted: torch.strided"):
            fn.linear_gelu(nested, w, impl="native")


def test_a_tensor_without_dimensions(impl, device):
    scalar = torch.tensor(2.0, device=device)
    assert fn.softmax(scalar, -1, impl=impl) == 1.0
    torch.testing.assert_close(fn.gelu(scalar, impl=impl), torch.nn.functional.gelu(scalar))


def test_a_dimension_may_be_an_integer_of_numpy():
    numpy = pytest.importorskip("numpy")
    torch.testing.assert_close(fn.softmax(x, numpy.int64(0)), torch.softmax(x, 0))


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fn.linear_gelu(x.double(), w.double(), impl="native").dtype == torch.float64


def test_the_default_is_erf():
    torch.testing.assert_close(fn.gelu(x), torch.nn.functional.gelu(x))


def test_the_imaginary_part_of_a_conjugate(impl, device):
    """A view whose memory holds the values with the other sign."""
    values = torch.randn(4, 8, device=device)
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg()
    torch.testing.assert_close(fn.gelu(view, impl=impl), torch.nn.functional.gelu(values))


def test_transforms_are_right_or_refused_in_words(impl, device):
    if impl == "compiled":
        pytest.skip("PyTorch says itself that a compiled function cannot be transformed")
    on_device, weight = x.to(device), w.to(device)
    derivative = torch.func.grad(lambda t: fn.linear_gelu(t, weight, impl=impl).sum())
    if impl in ("triton", "cuda"):
        with raises(RuntimeError, "torch.func", "impl='native'"):
            derivative(on_device)
        return
    expected = torch.func.grad(lambda t: torch.nn.functional.gelu(t @ weight.T).sum())
    torch.testing.assert_close(derivative(on_device), expected(on_device))
