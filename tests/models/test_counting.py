"""Counting somebody else's FLOPs leaves no trace in what is trained then, and is asked of nobody who does not know."""

import functools
import logging
import random
import sys
import threading
import types

import numpy
import pytest
import torch
from conftest import raises
from torch import nn
from torch.utils.checkpoint import checkpoint
from training.runs import RANDOM_BYTES, TINY, config, fits, result

from fusedmlp.errors import UserError
from fusedmlp.models import TorchModule
from fusedmlp.training.run import run

CONTEXT = 8
# Forward: T (2 * 16 * 64 for each layer of the MLP, 2 * 16 * 256 for the head); the backward pass is twice that.
FLOPS = 3 * CONTEXT * (2 * 2 * 16 * 64 + 2 * 16 * 256)
# (T, T) @ (T, 16), forward and the gradient of x.
MASK_FLOPS = 2 * 2 * CONTEXT * CONTEXT * 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(self.mlp(self.mixed(self.embed(tokens))))

    def mixed(self, x):
        return x


def causal(x):
    return torch.ones(x.shape[1], x.shape[1], device=x.device).tril()


class InAttribute(Net):
    mask = None

    def mixed(self, x):
        if self.mask is None:
            self.mask = causal(x)
        return self.mask @ x


class InBuffer(Net):
    def mixed(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", causal(x), persistent=False)
        return self.mask @ x


class InOwnDict(Net):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def mixed(self, x):
        return self.masks.setdefault(x.shape[1], causal(x)) @ x


class InObject(Net):
    def __init__(self):
        super().__init__()
        self.kept = types.SimpleNamespace(mask=None)

    def mixed(self, x):
        if self.kept.mask is None:
            self.kept.mask = causal(x)
        return self.kept.mask @ x


MASKS = {}


class InGlobalDict(Net):
    def mixed(self, x):
        if x.shape[1] not in MASKS:
            MASKS[x.shape[1]] = (causal(x), None)
        return MASKS[x.shape[1]][0] @ x


@functools.cache
def kept(length):
    return torch.ones(length, length).tril()


@functools.lru_cache(4)
def kept_with_others(length):
    return [torch.ones(length, length).tril()]


class InCache(Net):
    def mixed(self, x):
        return kept(x.shape[1]) @ x


class InBoundedCache(Net):
    def mixed(self, x):
        return kept_with_others(x.shape[1])[0] @ x


class InGlobalVariable(Net):
    def mixed(self, x):
        global THE_MASK
        if THE_MASK is None:
            THE_MASK = causal(x)
        return THE_MASK @ x


THE_MASK = None


class Counting(Net):
    calls = 0

    def mixed(self, x):
        self.calls += 1
        random.random(), numpy.random.rand(), torch.rand(1)  # noqa: NPY002
        return x


class Normalized(Net):
    """BatchNorm has no mean of a single value."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens):
        return self.head(self.norm(self.mlp(self.embed(tokens).sum(1))))


class Convolving(Net):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def mixed(self, x):
        return self.conv(x.mT).mT


class ConvolvingInGroups(Net):
    """Each output channel sees one of the 16; strided, then back to the length, and twice as many channels."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Conv1d(16, 32, 2, 2, groups=16)
        self.widen = nn.ConvTranspose1d(32, 16, 2, 2, groups=16)

    def mixed(self, x):
        return self.widen(self.narrow(x.mT)).mT


class HalfInHalf(Net):
    def __init__(self):
        super().__init__()
        self.mlp.bfloat16()

    def mixed(self, x):
        return x.bfloat16()

    def forward(self, tokens):
        return self.head(self.mlp(self.mixed(self.embed(tokens))).float())


class Attending(Net):
    def __init__(self):
        super().__init__()
        self.bfloat16()

    def mixed(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Experts(Net):
    """Every token goes to one of two experts: their products, which the counter does not know, are those of one."""

    dtype = torch.bfloat16

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 16, 16, dtype=self.dtype))

    def mixed(self, x):
        rows = x.flatten(0, 1).to(self.dtype)
        ends = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        return torch._grouped_mm(rows, self.experts, offs=ends).view(x.shape).to(x.dtype)


class ExpertsInFull(Experts):
    """As in a Hugging Face model that was not made for 16 bits."""

    dtype = torch.float32


class InThreeFactors(Net):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(16, 16, 16)

    def mixed(self, x):
        return self.bilinear(x, x)


class WithVectors(Net):
    """A matrix-vector product of each position, added to one of all of them, and the product of two vectors."""

    def __init__(self):
        super().__init__()
        self.vector, self.matrix = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16, 16))

    def mixed(self, x):
        rows = torch.stack([torch.addmv(row[0], self.matrix, row[0]).dot(self.vector) for row in x])
        return x + (x @ self.vector)[..., None] + rows[:, None, None]


class SummedOverABatch(Net):
    def mixed(self, x):
        return x + torch.addbmm(x[0], self.embed.weight[:CONTEXT].expand(len(x), CONTEXT, 16), x.mT @ x)


class OfComplexNumbers(Net):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.complex64))

    def mixed(self, x):
        return (x.to(torch.complex64) @ self.weight).real


class OfWeightsAlone(Net):
    """A product of the whole batch's, as in a parametrization."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.zeros(16, 16)), nn.Parameter(torch.zeros(16, 16))

    def mixed(self, x):
        return x @ (self.down @ self.up)


class _In8Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, grouped):
        ctx.save_for_backward(x, weight)
        x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).mT
        scales = torch.ones(()), torch.ones(())
        if grouped:
            scales = torch.ones(len(x)), torch.ones(1, 16)
            ends = torch.tensor([len(x)], dtype=torch.int32)
            return torch._scaled_grouped_mm(x, weight[None], *scales, offs=ends, out_dtype=torch.bfloat16).float()
        return torch._scaled_mm(x, weight, *scales, out_dtype=torch.bfloat16).float()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x, None


class In8Bits(Net):
    grouped = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))

    def mixed(self, x):
        return _In8Bits.apply(x.flatten(0, 1), self.weight, self.grouped).view(x.shape)


class In8BitsInGroups(In8Bits):
    grouped = True


class Recomputing(Net):
    """Activation checkpointing computes the forward pass once more; MFU does not count that."""

    reentrant = False

    def mixed(self, x):
        return checkpoint(self.mlp, x, use_reentrant=self.reentrant)


class RecomputingReentrantly(Recomputing):
    reentrant = True


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(16, 16, batch_first=True)

    def mixed(self, x):
        return self.recurrent(x)[0]


class Uncopyable(Net):
    def __init__(self):
        super().__init__()
        self.mlp.lock, self.generator = threading.Lock(), torch.Generator()
        self.mask = None

    def mixed(self, x):
        if self.mask is None:
            self.mask = causal(x)
        return self.mask @ x


class Impossible(Net):
    def mixed(self, x):
        return x @ x


class Telling(Net):
    """Says of itself what the test puts here."""

    flops_per_sample = 0


@pytest.fixture(autouse=True)
def networks(monkeypatch):
    monkeypatch.setitem(sys.modules, "networks", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "THE_MASK", None)
    for cache in (kept, kept_with_others):
        cache.cache_clear()
    MASKS.clear()


def made(network) -> TorchModule:
    return TorchModule(f"networks.{network.__name__}", context=CONTEXT, impl="native")


KEEPING = [InAttribute, InBuffer, InOwnDict, InObject, InGlobalDict, InCache, InBoundedCache]


@pytest.mark.parametrize("network", KEEPING)
def test_what_a_network_keeps_of_its_first_pass_is_not_of_the_count(network):
    model = made(network)
    assert model.flops_per_sample() == FLOPS + MASK_FLOPS
    logits = model(torch.randint(0, 256, (3, CONTEXT)))
    assert type(logits) is torch.Tensor
    assert logits.sum().isfinite()
    assert model.flops_per_sample() == FLOPS + MASK_FLOPS, "and what it keeps now does not matter"
    assert type(model(torch.randint(0, 256, (3, CONTEXT)))) is torch.Tensor


def test_what_cannot_be_taken_back_ends_the_run():
    model = made(InGlobalVariable)
    model.flops_per_sample()
    with raises(UserError, "networks.InGlobalVariable", "has kept a tensor", "flops_per_sample"):
        model(torch.randint(0, 256, (3, CONTEXT)))


def test_the_random_numbers_and_the_network_are_as_before():
    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(1).item()  # noqa: NPY002

    def seed():
        random.seed(1)
        numpy.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    model = made(Counting)
    seed()
    without = drawn()
    seed()
    assert model.flops_per_sample() == FLOPS
    assert drawn() == without
    assert model.net.calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_network_that_needs_more_than_one_sample():
    # Of one position: the sums are no products.
    assert made(Normalized).flops_per_sample() == 3 * (2 * 2 * 16 * 64 + 2 * 16 * 256)


@pytest.mark.parametrize("network", [Recomputing, RecomputingReentrantly])
def test_what_is_computed_once_more_in_the_backward_pass_does_not_count(network):
    assert made(network).flops_per_sample() == FLOPS + 3 * CONTEXT * 2 * 2 * 16 * 64


def test_the_products_within_a_recurrent_network_count():
    # Four gates of x and of h, at each position; no gradient of the first h is needed.
    gates = 2 * 4 * 16 * 16
    assert made(Recurrent).flops_per_sample() == FLOPS + CONTEXT * 2 * 3 * gates - gates


@pytest.mark.parametrize(("network", "half"), [(Experts, 1), (ExpertsInFull, 0)])
def test_the_products_of_experts_count(network, half):
    model = made(network)
    experts = 3 * CONTEXT * 2 * 16 * 16
    assert model.flops_per_sample() == FLOPS + experts
    assert model.half_share == pytest.approx(half * experts / (FLOPS + experts))


@pytest.mark.parametrize(
    ("network", "products"),
    [
        # Its gradients have products of the same size, for each of the three factors.
        (InThreeFactors, 4 * CONTEXT * 2 * 16**3),
        # x @ vector, matrix @ row and the vectors' own; no outer product, which the gradients of two have.
        (WithVectors, 2 * CONTEXT * 2 * 16 + 2 * 2 * 16**2 + 2 * 16),
        (SummedOverABatch, 2 * 3 * CONTEXT * 2 * 16**2),
        (OfComplexNumbers, 4 * 3 * CONTEXT * 2 * 16**2),
    ],
)
def test_products_that_pytorch_does_not_count_or_counts_as_less(network, products):
    assert made(network).flops_per_sample() == FLOPS + products


def test_a_product_of_weights_alone_is_shared_by_the_samples_of_a_batch():
    shared = 3 * 2 * 16**3
    assert made(OfWeightsAlone).flops_per_sample() == FLOPS + 3 * CONTEXT * 2 * 16**2 + shared // 32


@pytest.mark.parametrize("network", [In8Bits, In8BitsInGroups])
def test_the_share_of_products_in_8_bits(network):
    model = made(network)
    product = CONTEXT * 2 * 16**2
    assert model.fp8_share == 0, "until it is counted"
    assert model.flops_per_sample() == FLOPS + 3 * product
    assert model.fp8_share == pytest.approx(product / (FLOPS + 3 * product))
    assert model.half_share == 0


def test_what_cannot_be_copied_is_shared_with_the_copy():
    model = made(Uncopyable)
    assert model.flops_per_sample() == FLOPS + MASK_FLOPS
    assert model.net.mask is None


def test_the_share_of_convolutions(monkeypatch):
    model = made(Convolving)
    convolutions = 3 * CONTEXT * 2 * 16 * 16 * 3
    assert model.convolution_share == 0, "until it is counted"
    assert model.flops_per_sample() == FLOPS + convolutions
    assert model.convolution_share == pytest.approx(convolutions / (FLOPS + convolutions))
    monkeypatch.setattr(Convolving, "flops_per_sample", 777, raising=False)
    assert (model.flops_per_sample(), model.convolution_share) == (777, 1), "not known, so no peak that is too low"
    monkeypatch.setattr(Telling, "flops_per_sample", 777)
    model = made(Telling)
    assert (model.flops_per_sample(), model.convolution_share) == (777, 0)


def test_a_convolution_in_groups_has_the_products_within_them():
    """PyTorch's counter multiplies every group with every other one for the gradient of the weight."""
    narrow = widen = 3 * 2 * (CONTEXT // 2) * 32 * 2
    assert made(ConvolvingInGroups).flops_per_sample() == FLOPS + narrow + widen


def test_the_share_of_products_in_16_bits(monkeypatch):
    model = made(HalfInHalf)
    assert model.flops_per_sample() == FLOPS
    assert model.half_share == pytest.approx(2 * 64 / (2 * 64 + 256))
    monkeypatch.setattr(HalfInHalf, "flops_per_sample", 777, raising=False)
    assert (model.flops_per_sample(), model.half_share) == (777, 1), "not known, so no peak that is too low"


def test_attention_in_16_bits_counts_as_that():
    """PyTorch's plain attention, in which it is counted, computes in fp32, and the one that runs does not."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    model = made(Attending)
    assert model.flops_per_sample() == FLOPS + 3 * 2 * 2 * CONTEXT * CONTEXT * 16
    assert model.half_share == 1
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == allowed


def test_what_cannot_be_counted_is_one_warning(caplog):
    assert made(Impossible).flops_per_sample() is None
    assert [record.name for record in caplog.records if record.levelname != "INFO"] == ["fusedmlp.models.counting"]
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def raising(self):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("told", "flops"),
    [
        (lambda self: 777, 777),
        (lambda self: numpy.int64(777), 777),
        (lambda self: torch.tensor(777), 777),
        (lambda self: 7.5e2, 750),
        (777, 777),
        (raising, FLOPS),
        (lambda self, length: 777 * length, FLOPS),
        (lambda self: "many", FLOPS),
        (lambda self: -1, FLOPS),
        (lambda self: float("nan"), FLOPS),
        (None, FLOPS),
    ],
)
def test_what_a_network_says_of_itself_counts_where_it_is_a_number(monkeypatch, told, flops):
    monkeypatch.setattr(Telling, "flops_per_sample", told)
    found = made(Telling).flops_per_sample()
    assert (found, type(found)) == (flops, int)


@fits
def test_a_network_that_keeps_a_mask_learns(tmp_path):
    overrides = [override for override in (*TINY, *RANDOM_BYTES) if "num_layers" not in override]
    overrides += [
        f"data.cache_dir={tmp_path / 'cache'}", "model=torch_module", "model.target=networks.InAttribute",
        "model.context=8",
    ]  # fmt: skip
    assert run(config(*overrides), tmp_path / "run", overrides)[1].status == "completed"
    assert result(tmp_path / "run")["final_train_loss"] > 4
