"""The optimizer's groups, the learning rate's course, and what a step makes of them."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from training.runs import config

from fusedmlp.errors import UserError
from fusedmlp.models import GPT
from fusedmlp.training.adamw import TritonAdamW
from fusedmlp.training.metrics import DeviceMetrics
from fusedmlp.training.optim import build_optimizer, learning_rate
from fusedmlp.training.options import TrainerOptions, build
from fusedmlp.training.step import TrainStep, next_token_loss


@pytest.fixture
def options() -> TrainerOptions:
    values = OmegaConf.to_container(config().trainer, resolve=True)
    changes = {"max_steps": 110, "warmup_steps": 10, "learning_rate": 1.0, "min_learning_rate": 0.1}
    return build("trainer", values | changes, TrainerOptions)


def test_learning_rate_rises_linearly_then_follows_half_a_cosine(options):
    rates = [learning_rate(step, options) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert sorted(rates[10:], reverse=True) == rates[10:]


@pytest.mark.parametrize("warmup", [0, 110, 1000])
def test_learning_rate_is_sound_for_any_warm_up(options, warmup):
    options = replace(options, warmup_steps=warmup)
    assert all(0 < learning_rate(step, options) <= 1.0 for step in range(120))


def test_only_matrices_decay_and_every_parameter_is_optimized_once(options):
    model = GPT(dim=32, num_layers=2, num_heads=2, context=8)
    model.position_embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(model, options)
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(parameter.ndim == 2 for parameter in decayed)
    assert all(parameter.ndim == 1 for parameter in others)
    wanted = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(id(parameter) for parameter in decayed + others) == sorted(wanted)


@pytest.mark.parametrize("name", ["auto", "native"])
def test_without_a_gpu_pytorchs_fused_form_is_used(options, name):
    optimizer = build_optimizer(torch.nn.Linear(2, 2), replace(options, adamw=name))
    assert type(optimizer) is torch.optim.AdamW
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_that_cannot_run_is_refused(options):
    with pytest.raises(UserError, match=r"trainer.adamw=triton cannot run here: .*; accepted: native, or auto"):
        build_optimizer(torch.nn.Linear(2, 2), replace(options, adamw="triton"))


@pytest.mark.gpu
def test_on_a_gpu_triton_is_used_where_it_can_be(options):
    for dtype, wanted in (
        (torch.float32, TritonAdamW),
        (torch.bfloat16, TritonAdamW),
        (torch.float64, torch.optim.AdamW),
    ):
        assert type(build_optimizer(torch.nn.Linear(2, 2, device="cuda", dtype=dtype), options)) is wanted


def test_complex_parameters_which_have_no_fused_form_are_optimized(options):
    model = torch.nn.Linear(2, 2)
    model.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = build_optimizer(model, options)
    (model(torch.ones(1, 2)).sum() + (model.phase * 1j).real.sum()).backward()
    optimizer.step()
    assert (model.phase != 1).all()


class Odd(torch.nn.Module):
    """Parameters of several dtypes, one without dimensions, one without elements, and some without gradients."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.unused, self.frozen = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False)
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.zeros(0, 3))
        self.wide = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.phase = torch.nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens)) * self.wide * self.scale + self.empty.sum()
        return self.head((x * self.phase).real.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])  # fused or not
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05, 1000.0, math.inf])
def test_steps_are_those_of_plain_pytorch(options, accumulate, max_grad_norm, dtype):
    options = replace(options, accumulate=accumulate, max_grad_norm=max_grad_norm)
    torch.manual_seed(0)
    model = Odd(dtype)
    plain = copy.deepcopy(model)
    metrics = DeviceMetrics(("train/loss", "train/grad_norm"), torch.device("cpu"))
    step = TrainStep(model, build_optimizer(model, options), options, metrics)
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2))
    for rate in (1e-2, 2e-2, 5e-3):
        step.set_learning_rate(rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro in range(accumulate):
            tokens = torch.randint(16, (4, 8))
            step.micro_step(tokens, tokens, last=micro == accumulate - 1)
            (next_token_loss(plain(tokens), tokens) / accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        assert metrics.read().means()["train/grad_norm"] == pytest.approx(norm.item()), "before it is clipped"
        assert norm > 0.05
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
