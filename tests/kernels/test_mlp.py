"""mlp: what is kept for the backward pass is a choice; the gradients are the same whatever is chosen."""

import itertools

import pytest
import torch
from conftest import ON_GPU, raises

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp import functional

KEEPS = ["preact+act", "preact", "x"]
NAMES = ["x", "weight1", "bias1", "weight2", "bias2"]
DEVICE = "cuda" if ON_GPU else "cpu"
M, K, N, N2 = 24, 16, 40, 12

pytestmark = pytest.mark.interpreter


@pytest.fixture
def tensors():
    shapes = [(M, K), (N, K), (N,), (N2, N), (N2,)]
    return {name: torch.randn(*shape, device=DEVICE) for name, shape in zip(NAMES, shapes, strict=True)}


@pytest.fixture(params=KEEPS)
def keep(request, monkeypatch):
    from fusedmlp.impls import triton

    monkeypatch.setattr(triton, "MLP_KEEP", request.param)
    return request.param


def step(tensors, wanted=NAMES, impl="triton"):
    """Gradients of the wanted tensors, and the shapes of what was kept for them."""
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = functional.mlp(*leaves.values(), impl=impl)
    y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y))
    assert all((leaf.grad is not None) == (name in wanted) for name, leaf in leaves.items())
    return {name: leaves[name].grad for name in wanted}, kept


def test_gradients_of_every_subset(tensors, keep):
    expected, _ = step(tensors, impl="native")
    for count in range(1, 6):
        for wanted in itertools.combinations(NAMES, count):
            got, _ = step(tensors, wanted)
            for name in wanted:
                torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4, msg=f"{name} of {wanted}")


def test_hidden_sized_tensors_that_are_kept(tensors, keep):
    def hidden(*wanted):
        return step(tensors, wanted)[1].count((M, N))

    assert hidden(*NAMES) == {"preact+act": 2, "preact": 1, "x": 0}[keep]
    # act is for weight2's gradient, preact for all that lies before it.
    assert hidden("weight2") == (0 if keep == "x" else 1)
    assert hidden("x") == hidden("bias1") == (0 if keep == "x" else 1)
    assert hidden("bias2") == 0


def test_two_backward_passes_through_one_graph(tensors, keep):
    leaves = [t.detach().requires_grad_() for t in tensors.values()]
    y = functional.mlp(*leaves, impl="triton")
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), leaves)


def test_an_unknown_choice_is_named(tensors, monkeypatch):
    from fusedmlp.impls import triton

    monkeypatch.setattr(triton, "MLP_KEEP", "act")
    with raises(ValueError, "'act'", "preact+act, preact, x"):
        step(tensors)


@pytest.mark.gpu
def test_peak_memory(keep):
    """Beside inputs and gradients two hidden-sized tensors at a time; three where act is computed beside dpreact."""
    rows, width = 8192, 512
    shapes = [(rows, width), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    leaves = [torch.randn(*s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    dy = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def run():
        return torch.autograd.grad(functional.mlp(*leaves, impl="triton"), leaves, dy)

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    hidden, small = rows * 4 * width * 2, rows * width * 2
    assert peak < (3.6 if keep == "preact" else 2.6) * hidden + 2 * small
