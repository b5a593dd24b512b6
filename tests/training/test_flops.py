"""The analytic FLOP count, held against PyTorch's counter, which sees every matrix product that is really done."""

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fusedmlp.models import GPT, MLPLanguageModel
from fusedmlp.training.task import next_token_loss

aten = torch.ops.aten
# PyTorch's formulas for the fused kernels of a GPU; its counter does not know the CPU's kernel.
FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(
        dy, q, k, v
    ),
}
BATCH = 3


def counted(model, fused: bool = False) -> int:
    """FLOPs of the forward and backward pass of one batch, as they are dispatched."""
    tokens = torch.randint(0, 250, (BATCH, model.context))
    unfused = contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter, unfused:
        next_token_loss(model(tokens), tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("reference", ["native", "manual"])
@pytest.mark.parametrize(("dim", "layers", "context", "vocab"), [(64, 3, 8, 256), (96, 1, 1, 300), (32, 17, 32, 257)])
def test_mlp(dim, layers, context, vocab, reference):
    model = MLPLanguageModel(dim, layers, context, vocab, impl=reference)
    assert BATCH * model.flops_per_sample() == counted(model)


@pytest.mark.parametrize("attention", ["softmax", "sdpa"])
@pytest.mark.parametrize(
    ("dim", "layers", "heads", "context", "vocab"), [(32, 2, 2, 8, 256), (48, 1, 3, 64, 300), (16, 5, 1, 17, 257)]
)
def test_gpt(dim, layers, heads, context, vocab, attention):
    model = GPT(dim, layers, heads, context, vocab, attention=attention, impl="native")
    assert BATCH * model.flops_per_sample() == counted(model)


def test_fused_attention_computes_its_scores_once_more_and_that_is_not_counted():
    dim, layers, context = 32, 2, 16
    model = GPT(dim, layers, 2, context, attention="sdpa", impl="native")
    once_more = layers * 2 * context**2 * dim
    assert BATCH * (model.flops_per_sample() + once_more) == counted(model, fused=True)


def test_one_number_for_every_implementation(impl):
    assert MLPLanguageModel(64, context=8, impl=impl).flops_per_sample() == 3 * (4 * 2 * 64**2 + 2 * 64 * 256)
    assert GPT(32, 2, 2, 8, impl=impl).flops_per_sample() == 3 * (2 * (24 * 8 * 32**2 + 4 * 64 * 32) + 2 * 8 * 32 * 256)
