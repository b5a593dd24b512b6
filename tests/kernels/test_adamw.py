"""AdamW that clips as it steps, against float64, and what it owes to whoever takes it for torch.optim.AdamW."""

import copy
import itertools
import math

import pytest
import torch
from conftest import ON_GPU
from training.runs import curve, result, train

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp.errors import UserError
from fusedmlp.kernels import prepared
from fusedmlp.kernels.adamw import CHUNK
from fusedmlp.training.adamw import TritonAdamW, fault
from fusedmlp.training.optim import resolve_adamw

pytestmark = pytest.mark.interpreter
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One element, an odd number, none, exactly a chunk, one more, and a matrix.
SHAPES = [(1,), (301,), (0,), (CHUNK,), (CHUNK + 1,), (70, 64)]


def parameters(device, dtype, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def give_gradients(tensors, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.device, tensor.dtype)


def groups(tensors):
    """Two that differ in all that groups can differ in."""
    return [
        {"params": tensors[::2], "weight_decay": 0.1, "betas": (0.9, 0.95)},
        {"params": tensors[1::2], "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6, "betas": (0.0, 0.999)},
    ]


def doubles(tensors):
    """The same in float64, with the gradients."""
    twins = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for twin, tensor in zip(twins, tensors, strict=True):
        twin.grad = None if tensor.grad is None else tensor.grad.double()
    return twins


def unit(dtype):
    """Half the distance between neighbours at 1: what rounding one value to `dtype` may change."""
    return torch.finfo(dtype).eps / 2


def assert_steps_like_float64(tensors, optimizer, max_norm, **settings):
    """One step from the state as it is, against AdamW in float64 from the same state."""
    twins = doubles(tensors)
    oracle = torch.optim.AdamW(groups(twins), **settings)
    saved = optimizer.state_dict()
    saved = {"state": saved["state"], "param_groups": oracle.state_dict()["param_groups"]}
    oracle.load_state_dict(copy.deepcopy(saved))
    norm = torch.nn.utils.clip_grad_norm_(twins, math.inf if max_norm is None else max_norm)
    oracle.step()
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for tensor, twin, old in zip(tensors, twins, before, strict=True):
        ours, theirs = optimizer.state[tensor], oracle.state[twin]
        assert ours.keys() == theirs.keys()
        if not ours:
            assert torch.equal(tensor, old)
            continue
        assert ours["step"] == theirs["step"]
        dtype = tensor.dtype
        # Computed in fp32, by a few operations, and rounded once; the interpreter cuts bf16 off.
        units = {torch.float32: 16, torch.float16: 1.01, torch.bfloat16: 1.01 if ON_GPU else 2.01}[dtype]
        smallest = 2 * torch.finfo(dtype).tiny * unit(dtype)
        for found, wanted in ((ours["exp_avg"], theirs["exp_avg"]), (ours["exp_avg_sq"], theirs["exp_avg_sq"])):
            cancelled = 2**-21 * wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(found.double(), wanted, rtol=units * unit(dtype), atol=smallest + cancelled)
        moved = (twin - old.double()).abs()
        allowed = units * unit(dtype) * (twin.abs() + moved) + 1e-5 * moved + smallest
        assert bool(((tensor.double() - twin).abs() <= allowed).all())


@in_all_dtypes
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_steps_equal_float64(device, dtype, max_norm):
    """Gradients below and above the norm that is clipped to, and a state that grows over the steps."""
    tensors = parameters(device, dtype)
    settings = {"lr": 1e-2, "eps": 1e-5, "maximize": dtype == torch.bfloat16}
    optimizer = TritonAdamW(groups(tensors), max_grad_norm=max_norm, **settings)
    for seed, scale in enumerate([1e-3, 1.0, 3.0, 1e-3]):
        give_gradients(tensors, scale, seed)
        assert_steps_like_float64(tensors, optimizer, max_norm, **settings)


def test_many_steps_keep_the_bias_correction_exact(device):
    """1 - beta^step for one step, for thousands, and where beta^step is close to 1."""
    for beta, steps in itertools.product((0.9, 0.999, 0.999999), (1, 700, 100_000)):
        (tensor,) = tensors = parameters(device, torch.float32, [(8,)])
        settings = {"lr": 1e-2, "betas": (beta, beta), "eps": 1e-12, "weight_decay": 0.0}
        optimizer, oracle = TritonAdamW(tensors, **settings), torch.optim.AdamW(twins := doubles(tensors), **settings)
        for seed in range(2):
            give_gradients(tensors, 1.0, seed)
            twins[0].grad = tensor.grad.double()
            for each, parameter in ((optimizer, tensor), (oracle, twins[0])):
                if seed:
                    each.state[parameter]["step"].fill_(steps)
                each.step()
        torch.testing.assert_close(tensor.double(), twins[0], rtol=3e-6, atol=3e-7)


def test_mixed_dtypes_and_addresses_between_vectors(device):
    whole = torch.randn(4001, device=device, dtype=torch.bfloat16)
    tensors = [
        torch.randn(50, 40, device=device).requires_grad_(),
        whole[1:1001].detach().requires_grad_(),
        torch.randn(300, device=device, dtype=torch.float16).requires_grad_(),
        whole[1024:3000].detach().requires_grad_(),
    ]
    settings = {"lr": 1e-2, "eps": 1e-5}
    optimizer = TritonAdamW(groups(tensors), max_grad_norm=0.5, **settings)
    for seed in range(2):
        give_gradients(tensors, 1.0, seed)
        assert_steps_like_float64(tensors, optimizer, 0.5, **settings)


def test_layouts(device):
    """A transposed parameter, whose gradient comes in its layout or in another."""
    tensor = torch.randn(30, 50, device=device).t().detach().requires_grad_()
    optimizer = TritonAdamW([tensor], lr=1e-2)
    twin = tensor.detach().double().contiguous().requires_grad_()
    oracle = torch.optim.AdamW([twin], lr=1e-2)
    for transposed in (True, False):
        gradient = torch.randn(50, 30, device=device)
        tensor.grad = gradient.t().contiguous().t() if transposed else gradient
        twin.grad = gradient.double()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(tensor.double(), twin, rtol=1e-5, atol=1e-6)
    for gaps in (torch.randn(10, 20, device=device)[:, ::2], torch.randn(10, 1, device=device).expand(10, 4)):
        with pytest.raises(ValueError, match="accepted: dense ones"):
            TritonAdamW([gaps.detach().requires_grad_()])
    tensor.data = tensor.data.contiguous()
    with pytest.raises(RuntimeError, match="must be dense, and keep dtype and layout"):
        optimizer.step()


def test_parameters_without_gradient_stay_and_do_not_count(device):
    tensors = parameters(device, torch.float32, [(5,), (6,), (7,)])
    settings = {"lr": 1e-2, "eps": 1e-5}
    optimizer = TritonAdamW(groups(tensors), **settings)
    optimizer.step()
    assert optimizer.grad_norm == 0.0
    for seed, missing in enumerate([1, None, 0]):
        give_gradients(tensors, 1.0, seed)
        if missing is not None:
            tensors[missing].grad = None
        assert_steps_like_float64(tensors, optimizer, None, **settings)
    assert [optimizer.state[tensor]["step"].item() for tensor in tensors] == [2, 2, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_clipped_as_by_pytorch(device, value):
    tensors = parameters(device, torch.float32, [(4,), (3,)])
    give_gradients(tensors, 1.0, 0)
    tensors[0].grad[1] = value
    twins = doubles(tensors)
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    torch.optim.AdamW(twins).step()
    optimizer = TritonAdamW(tensors, max_grad_norm=1.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor(value), equal_nan=True)
    for tensor, twin in zip(tensors, twins, strict=True):
        torch.testing.assert_close(tensor.double(), twin, equal_nan=True)


def test_gradients_are_not_written_and_steps_repeat_bit_for_bit(device):
    found = []
    for _ in range(2):
        tensors = parameters(device, torch.bfloat16, [(3 * CHUNK + 5,), (99,)])
        optimizer = TritonAdamW(tensors, max_grad_norm=0.1)
        for seed in range(2):
            give_gradients(tensors, 1.0, seed)
            before = [tensor.grad.clone() for tensor in tensors]
            optimizer.step()
            assert all(torch.equal(tensor.grad, old) for tensor, old in zip(tensors, before, strict=True))
        found.append(tensors)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_state_goes_to_torch_and_comes_from_it(device, fused):
    tensors, others = (parameters(device, torch.float32, [(20, 30), (30,)]) for _ in range(2))
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    ours = TritonAdamW(tensors, **settings)
    theirs = torch.optim.AdamW(others, fused=fused, **settings)
    give_gradients(tensors, 1.0, 0)
    give_gradients(others, 1.0, 0)
    ours.step()
    theirs.step()
    states = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    theirs.load_state_dict(states[0])
    ours.load_state_dict(states[1])
    give_gradients(tensors, 1.0, 1)
    give_gradients(others, 1.0, 1)
    ours.step()
    theirs.step()
    assert [ours.state[tensor]["step"].item() for tensor in tensors] == [2, 2]
    for one, two in zip(tensors, others, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_a_copy_clips_too(device):
    optimizer = TritonAdamW(parameters(device, torch.float32, [(9,)]), max_grad_norm=0.25)
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        give_gradients(each.param_groups[0]["params"], 1.0, 0)
        each.step()
    assert twin.max_grad_norm == 0.25
    assert torch.equal(*(each.param_groups[0]["params"][0] for each in (optimizer, twin)))


def test_closure_hooks_and_a_learning_rate_that_changes(device):
    (tensor,) = tensors = parameters(device, torch.float32, [(64,)])
    optimizer, calls = TritonAdamW(tensors, lr=1e-3, weight_decay=0.0), []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure():
        optimizer.zero_grad()
        loss = (tensor**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    before = tensor.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(closure)
    assert torch.equal(tensor, before)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device=device)
    optimizer.step(closure)
    assert (tensor - before).abs().max() > 0.1
    assert calls == ["hook"] * 3


class Wrapped(torch.Tensor):
    """A tensor whose memory may be another's."""


def test_what_it_refuses(device):
    with pytest.raises(ValueError, match="float64; accepted: fp32, bf16, fp16"):
        TritonAdamW([torch.zeros(2, device=device, dtype=torch.float64, requires_grad=True)])
    wrapped = torch.zeros(2, device=device).as_subclass(Wrapped).requires_grad_()
    with pytest.raises(ValueError, match="a parameter is a Wrapped; accepted: plain tensors"):
        TritonAdamW([wrapped])
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        TritonAdamW(parameters(device, torch.float32), max_grad_norm=0)
    with pytest.raises(ValueError, match="parameters are on meta"):
        TritonAdamW([torch.zeros(2, device="meta", requires_grad=True)])
    tensors = parameters(device, torch.float32, [(3,)])
    amsgrad = torch.optim.AdamW(tensors, amsgrad=True)
    with pytest.raises(ValueError, match="AMSGrad"):
        TritonAdamW(tensors).load_state_dict(amsgrad.state_dict())


def test_a_machine_on_which_triton_cannot_compile(device, monkeypatch):
    """As without a C compiler, which Triton says when it launches the first kernel."""
    tensors = parameters(device, torch.float32, [(3,)])
    assert fault(tensors) is None

    def refuse(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(prepared, "launch", refuse)
    assert fault(tensors) == "Failed to find C compiler."
    with pytest.raises(UserError, match=r"trainer.adamw=triton cannot run here: Failed to find C compiler.; accepted"):
        resolve_adamw("triton", tensors)
    assert resolve_adamw("auto", tensors) == "native"


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    tensor = torch.zeros(2**31 + 2**20 + 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tensor.grad = torch.zeros_like(tensor)
    tensor.grad[-5:] = 1.0
    optimizer = TritonAdamW([tensor], lr=0.5, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(5))
    torch.testing.assert_close(tensor[-6:].float(), torch.tensor([0.0] + [-0.5] * 5, device="cuda"))


@pytest.mark.gpu
def test_recorded_twice_and_not_at_all():
    """Two graphs and steps between them, with a learning rate that changes; all without a wait of the host."""
    rate = torch.full((), 1e-2, device="cuda")
    ours, theirs = (parameters("cuda", torch.bfloat16, [(512, 300), (301,), (3 * CHUNK,)]) for _ in range(2))
    optimizer = TritonAdamW(ours, lr=rate, max_grad_norm=1.0)
    plain = TritonAdamW(theirs, lr=rate, max_grad_norm=1.0)
    sources = [parameters("cuda", torch.bfloat16, [p.shape for p in ours], seed) for seed in range(8)]

    def step(each, tensors, gradients):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient * 1.0
        each.step()

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(optimizer, ours, sources[0])
        graphs = []
        for _ in range(2):
            static = [source.clone() for source in sources[0]]
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.graph(graph, stream=side):
                step(optimizer, ours, static)
            graphs.append((graph, static))
        for i, gradients in enumerate(sources[1:]):
            rate.fill_(1e-2 / (i + 1))
            if i % 3 == 2:
                step(optimizer, ours, gradients)
                continue
            graph, static = graphs[i % 3]
            torch._foreach_copy_(static, gradients)
            graph.replay()
        for i, gradients in enumerate(sources):
            rate.fill_(1e-2 / max(i, 1))
            step(plain, theirs, gradients)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)
        assert optimizer.state[one]["step"] == plain.state[two]["step"] == 8


def test_training_is_the_same_with_both(tmp_path, device):
    """Losses and norms of runs, with clipping and accumulation; each goes on from the other's checkpoint."""
    settings = ("trainer.accumulate=2", "trainer.max_grad_norm=0.05", "trainer.log_every=1", "trainer.warmup_steps=0",
                "trainer.min_learning_rate=1e-3", "trainer.precision=32-true",
                f"trainer.accelerator={'gpu' if ON_GPU else 'cpu'}")  # fmt: skip
    other = {"native": "triton", "triton": "native"}
    for name in other:
        ending = train(tmp_path / name, f"trainer.adamw={name}", "trainer.max_steps=6", *settings)
        assert ending.status == "completed", ending.reason
        assert result(tmp_path / name)["adamw"] == name
    for name, before in other.items():
        resumed = ("trainer.max_steps=9", f"resume={tmp_path / before}", *settings)
        assert train(tmp_path / f"{name}-on", f"trainer.adamw={name}", *resumed).status == "completed"
    for kind in ("train/loss", "train/grad_norm"):
        for ending in ("", "-on"):
            native, triton = (
                {step: float(value) for step, value in curve(tmp_path / f"{name}{ending}", kind).items()}
                for name in other
            )
            assert len(native) == (3 if ending else 6)
            assert triton == pytest.approx(native, rel=1e-4)
