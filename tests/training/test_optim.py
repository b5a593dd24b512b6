"""The optimizer's groups and the learning rate's course."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from training.runs import config

from fusedmlp.errors import UserError
from fusedmlp.models import GPT
from fusedmlp.training.adamw import TritonAdamW
from fusedmlp.training.optim import build_optimizer, learning_rate
from fusedmlp.training.options import TrainerOptions, build


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
