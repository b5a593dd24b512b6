"""Every config composes, and what it builds can be built."""

import pytest
from omegaconf import OmegaConf
from training.runs import CONFIGS, config

from fusedmlp import impl_names
from fusedmlp.training.options import LoggerOptions, ProfileOptions, SweepOptions, TrainerOptions, build

GROUPS = {
    folder.name: [file.stem for file in sorted(folder.glob("*.yaml"))]
    for folder in sorted(CONFIGS.iterdir())
    if folder.is_dir() and folder.name != "hydra"
}
OPTIONS = [f"{group}={name}" for group, names in GROUPS.items() for name in names]


@pytest.mark.parametrize("option", OPTIONS + [f"impl={name}" for name in impl_names()])
def test_every_option_composes_and_resolves(option):
    values = OmegaConf.to_container(config(option), resolve=True)
    assert set(values) == {"dim", "seed", "resume", "impl", "model", "data", "trainer", "profile", "logger", "sweep"}
    build("trainer", values["trainer"], TrainerOptions)
    build("logger", values["logger"], LoggerOptions)
    build("profile", values["profile"], ProfileOptions)
    build("sweep", values["sweep"], SweepOptions)
    assert values["model"]["impl"] == values["impl"]
    assert values["model"]["dim"] == values["dim"]


# What cannot be built without a word of the user's.
REQUIRED = {
    "torch_module": ["model.target=fusedmlp.models.MLPLanguageModel", "+model.kwargs.dim=32", "model.context=16"]
}


@pytest.mark.parametrize("model", GROUPS["model"])
def test_every_model_builds_at_the_default_width_with_any_data(model):
    values = OmegaConf.to_container(config(f"model={model}", *REQUIRED.get(model, [])), resolve=True)
    assert values["data"]["seq_len"] == values["model"]["context"]
    assert build("model", values["model"]).context == values["model"]["context"]


def test_the_lectures_stack_and_a_small_gpt2():
    lecture = config("experiment=lecture")
    assert (lecture.dim, lecture.model.num_layers, lecture.data.batch_size) == (2048, 64, 1024)
    assert lecture.trainer.precision == "bf16-true"
    gpt = config("experiment=gpt")
    assert (gpt.dim, gpt.model.num_layers, gpt.model.num_heads, gpt.model.context) == (768, 12, 12, 1024)
    assert (gpt.model.vocab_size, gpt.model.pad_vocab_to, gpt.data.batch_size) == (50257, 64, 16)


@pytest.mark.parametrize("change", ["dim=64", "trainer.max_steps=7"])
@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_the_command_line_wins_over_an_experiment(experiment, change):
    key, value = change.split("=")
    assert OmegaConf.select(config(f"experiment={experiment}", change), key) == int(value)
