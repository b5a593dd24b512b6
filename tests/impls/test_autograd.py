"""What every implementation owes to autograd: what it keeps, what it leaves alone, what it costs."""

import pytest
import torch
from oracle import Case, gradients
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fusedmlp import functional, impls

M, K, N = 24, 16, 32


def cases(device, dtype=torch.float32):
    def normal(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    linear = {"x": normal(M, K), "weight": normal(N, K), "bias": normal(N)}
    mlp = {"x": normal(M, K), "weight1": normal(N, K), "bias1": normal(N), "weight2": normal(K, N), "bias2": normal(K)}
    return [
        Case("gelu", {"x": normal(M, K)}),
        Case("gelu", {"x": normal(M, K)}, {"approximate": "tanh"}),
        Case("softmax", {"x": normal(M, K)}, {"dim": -1}),
        Case("softmax", {"x": normal(M, K)}, {"dim": 0}),
        Case("linear_gelu", linear),
        Case("mlp", mlp),
    ]


def leaves(case):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in case.tensors.items()}


def test_nothing_is_overwritten_and_two_backward_passes_agree(impl, device):
    for case in cases(device):
        tensors = leaves(case)
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        y = case.call(impl, tensors)
        y_before, dy = y.detach().clone(), torch.randn_like(y)
        dy_before = dy.clone()
        first = torch.autograd.grad(y, list(tensors.values()), dy, retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(y, list(tensors.values()), dy)
        for one, copy, other in zip(first, kept, second, strict=True):
            assert torch.equal(copy, other), case.op
            assert torch.equal(one, copy), f"{case.op}: the second backward pass changed the first one's gradient"
        assert torch.equal(y, y_before)
        assert torch.equal(dy, dy_before)
        assert all(torch.equal(tensors[name], before[name]) for name in before), case.op


class Unwanted(torch.autograd.Function):
    """x, of which what comes after wants no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_where_no_gradient_arrives_none_is_passed_on(impl, device):
    if impls.resolved(impl) == "compiled":
        pytest.skip("PyTorch's compiler makes zeros of it")
    for case in cases(device):
        tensors = leaves(case)
        y = Unwanted.apply(case.call(impl, tensors))
        assert torch.autograd.grad(y.sum(), list(tensors.values()), allow_unused=True) == (None,) * len(tensors), case


def test_a_graph_can_be_kept_after_one_that_was_not(impl, device):
    for case in cases(device):
        tensors = leaves(case)
        x = tensors["x"]
        (expected,) = torch.autograd.grad(case.call(impl, tensors).sum(), x)
        (kept,) = torch.autograd.grad(case.call(impl, tensors).sum(), x, retain_graph=True)
        assert torch.equal(kept, expected), case.op


def test_a_graph_can_be_kept_where_the_compiler_has_been_here_before(impl, device):
    """What a cache on disk keeps of an earlier compilation must not say otherwise."""
    if impls.resolved(impl) != "compiled":
        pytest.skip("compiles nothing that is kept by size")
    for again in (False, True):
        impls.load("compiled").forget()
        torch._dynamo.reset()
        # The second size compiles a graph for any.
        for size in (3, 8, 9):
            x = torch.randn(4, size, device=device, requires_grad=True)
            loss = functional.gelu(x, impl=impl).sum()
            loss.backward(retain_graph=again)
            once = x.grad.clone()
            if again:
                loss.backward()
                assert torch.equal(x.grad, 2 * once), size


def test_results_can_be_written_in_place(impl, device):
    """As `y += residual` and `nn.ReLU(inplace=True)` do."""
    if impls.resolved(impl) == "compiled":
        pytest.skip("its compiler takes seconds for each shape, and its results are as PyTorch makes them")
    for case in cases(device):
        if case.op == "softmax":
            continue  # its result is kept for the backward pass, in torch too
        for shape in ((M, K), (2, M // 2, K)):
            found = []
            for name in (impl, "native"):
                tensors = leaves(case)
                y = case.call(name, tensors | {"x": tensors["x"].view(shape)})
                y += 1
                y.view(-1).mul_(2)
                found.append(torch.autograd.grad(y.square().sum(), list(tensors.values())))
            for got, expected in zip(*found, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_same_inputs_twice_give_the_same_bits(impl, device):
    for case in cases(device):
        first, second = gradients(case, impl), gradients(case, impl)
        assert all(torch.equal(first[name], second[name]) for name in first), case.op


def test_double_backward_is_right_or_raises_clearly(impl, device):
    for case in cases(device):
        tensors = leaves(case)
        x = tensors["x"]
        (dx,) = torch.autograd.grad(case.call(impl, tensors).square().sum(), x, create_graph=True)
        try:
            (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        except RuntimeError as error:
            message = str(error).lower()
            assert "double backward" in message or "second derivative" in message, message
            continue
        reference = leaves(case)
        (dx,) = torch.autograd.grad(case.call("native", reference).square().sum(), reference["x"], create_graph=True)
        (expected,) = torch.autograd.grad(dx.square().sum(), reference["x"])
        torch.testing.assert_close(ddx, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def second_derivative(case, impl, of, by, frozen=()):
    """Of the squared gradient of `of`, by tensor `by`; zeros where there is no path, None where it raises clearly."""
    tensors = leaves(case)
    for name in frozen:
        tensors[name].requires_grad_(False)
    y = case.call(impl, tensors)
    loss = (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum()
    (gradient,) = torch.autograd.grad(loss, tensors[of], create_graph=True)
    try:
        (result,) = torch.autograd.grad(
            gradient.square().sum() + 0 * tensors[by].sum(), tensors[by], allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        message = str(error)
        assert "double backward" in message or "second derivative" in message, message
        return None
    return result


def test_a_second_derivative_by_any_tensor_is_right_or_raises(impl, device):
    """Also where the backward pass needs nothing of that tensor: it is never left out of a sum without a word."""
    if impls.resolved(impl) == "compiled":
        pytest.skip("its compiler takes seconds for each set of gradients, and PyTorch refuses second derivatives")
    for case in cases(device):
        pairs = [(of, by, ()) for of in case.tensors for by in case.tensors]
        pairs.append(("x", "x", tuple(name for name in case.tensors if name != "x")))
        for of, by, frozen in pairs:
            got = second_derivative(case, impl, of, by, frozen)
            if got is not None:
                expected = second_derivative(case, "native", of, by, frozen)
                scale = expected.abs().max().item()
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * scale, msg=f"{case.op} {of} {by}")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning", "ignore:.torch.jit.script:DeprecationWarning")
def test_forward_mode_is_right_or_raises(impl, device):
    for case in cases(device):
        for dual in case.tensors:

            def tangent(name, case=case, dual=dual):
                primal = case.tensors[dual]
                with forward_ad.dual_level():
                    tensors = case.tensors | {dual: forward_ad.make_dual(primal, torch.ones_like(primal))}
                    return forward_ad.unpack_dual(case.call(name, tensors)).tangent

            try:
                got = tangent(impl)
            except (RuntimeError, NotImplementedError):
                continue
            assert got is not None, f"{case.op}: the tangent of {dual} is lost"
            torch.testing.assert_close(got, tangent("native"), rtol=1e-3, atol=1e-3)


def test_create_graph_inside_activation_checkpointing(impl, device):
    """Saved tensors may be unpacked once there."""
    if impls.resolved(impl) == "compiled":
        pytest.skip("PyTorch refuses create_graph through compiled code")
    for case in cases(device):
        tensors = leaves(case)
        y = checkpoint(case.call, impl, tensors, use_reentrant=False)
        (dx,) = torch.autograd.grad(y.sum(), tensors["x"], create_graph=True)
        (expected,) = torch.autograd.grad(case.call(impl, tensors).sum(), tensors["x"])
        assert torch.equal(dx, expected), case.op


def test_a_frozen_tensor_gets_no_gradient_and_the_others_stay_right(impl, device):
    for case in cases(device):
        if len(case.tensors) == 1:
            continue
        dy = torch.ones_like(case.call(impl, case.tensors))
        expected = gradients(case, impl, dy=dy)
        for frozen in case.tensors:
            tensors = leaves(case)
            tensors[frozen].requires_grad_(False)
            case.call(impl, tensors).backward(dy)
            assert tensors[frozen].grad is None
            for name, tensor in tensors.items():
                if name != frozen:
                    torch.testing.assert_close(
                        tensor.grad, expected[f"d{name}"], msg=f"{case.op} d{name}, {frozen} frozen"
                    )


def test_a_frozen_tensor_costs_no_flops(impl, device):
    """The backward pass of linear_gelu is two GEMMs; one of them goes with the input or the weight."""
    if impls.resolved(impl) == "compiled":
        pytest.skip("FlopCounterMode does not see into a compiled graph")
    case = next(case for case in cases(device) if case.op == "linear_gelu")

    def backward_flops(*frozen):
        tensors = leaves(case)
        for name in frozen:
            tensors[name].requires_grad_(False)
        y = case.call(impl, tensors)
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        return counter.get_total_flops()

    gemm = 2 * M * K * N
    assert backward_flops() == 2 * gemm
    assert backward_flops("x") == gemm
    assert backward_flops("weight") == gemm
    assert backward_flops("x", "weight") == 0


def test_flops_of_the_forward_pass(impl, device):
    if impls.resolved(impl) == "compiled":
        pytest.skip("FlopCounterMode does not see into a compiled graph")
    for case in cases(device):
        expected = {"linear_gelu": 2 * M * K * N, "mlp": 4 * M * K * N}.get(case.op, 0)
        with FlopCounterMode(display=False) as counter:
            case.call(impl, leaves(case))
        assert counter.get_total_flops() == expected, case.op


def test_nothing_is_kept_without_gradients(impl, device):
    """Under no_grad parameters still say requires_grad; nothing may be saved for a backward pass that cannot come."""
    saved = []

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor

    for case in cases(device):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.no_grad():
                y = case.call(impl, leaves(case))
            assert not y.requires_grad
            assert y.grad_fn is None
            case.call(impl, {name: tensor.detach() for name, tensor in case.tensors.items()})
        assert saved == [], case.op


@pytest.mark.gpu
def test_memory_without_gradients(impl):
    """No hidden-sized tensor survives the call: the output alone stays allocated."""
    x, weight = torch.randn(4096, 256, device="cuda"), torch.randn(1024, 256, device="cuda", requires_grad=True)
    with torch.no_grad():
        functional.linear_gelu(x, weight, impl=impl)
        before = torch.cuda.memory_allocated()
        y = functional.linear_gelu(x, weight, impl=impl)
    assert torch.cuda.memory_allocated() - before <= y.numel() * y.element_size() + 2**20


def test_autocast_computes_as_linear_does(impl, device):
    """Compute dtype from autocast, gradients in the parameters' dtype; gelu and softmax keep the dtype of x."""
    for case in cases(device):
        tensors = leaves(case)
        with torch.autocast(device, dtype=torch.bfloat16):
            if torch.bfloat16 not in impls.dtypes(impl):
                pytest.skip("no bf16")
            y = case.call(impl, tensors)
        assert y.dtype == (torch.bfloat16 if case.op in ("linear_gelu", "mlp") else torch.float32)
        y.float().square().sum().backward()
        assert all(tensor.grad.dtype == torch.float32 for tensor in tensors.values())
        reference = leaves(case)
        case.call("native", reference).square().sum().backward()
        for name, tensor in tensors.items():
            error = (tensor.grad - reference[name].grad).norm() / reference[name].grad.norm()
            assert error < 0.03, f"{case.op} d{name}"
