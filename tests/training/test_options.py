"""What the config's sections accept, and the one message for everything else."""

from dataclasses import dataclass, fields

import pytest
from conftest import raises
from omegaconf import OmegaConf
from training.runs import config

from fusedmlp.errors import UserError
from fusedmlp.training.options import LoggerOptions, ProfileOptions, SweepOptions, TrainerOptions, build


def trainer(**changes) -> TrainerOptions:
    values = OmegaConf.to_container(config().trainer, resolve=True)
    return build("trainer", values | changes, TrainerOptions)


def test_the_configs_hold_every_option_and_nothing_else():
    cfg = config()
    for section, target in (("trainer", TrainerOptions), ("logger", LoggerOptions), ("profile", ProfileOptions)):
        assert set(cfg[section]) == {field.name for field in fields(target)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": "abc"}, ("trainer.max_steps=abc", "an integer")),
        ({"max_steps": 2.5}, ("trainer.max_steps=2.5", "an integer")),
        ({"max_steps": True}, ("trainer.max_steps=true", "an integer")),
        ({"max_steps": None}, ("trainer.max_steps=null", "an integer")),
        ({"max_steps": 0}, ("trainer.max_steps=0", "at least 1")),
        ({"accumulate": 0}, ("trainer.accumulate=0", "at least 1")),
        ({"log_every": -1}, ("trainer.log_every=-1", "at least 1")),
        ({"val_every": -1}, ("trainer.val_every=-1", "at least 0")),
        ({"learning_rate": 0}, ("trainer.learning_rate=0", "above 0")),
        ({"learning_rate": float("inf")}, ("trainer.learning_rate=inf", "above 0")),
        ({"rank_timeout": 1e30}, ("trainer.rank_timeout=1e+30", "at most 1000000")),
        ({"rank_timeout": 1e-9}, ("trainer.rank_timeout=1e-09", "from 1")),
        ({"learning_rate": "fast"}, ("trainer.learning_rate=fast", "a number")),
        ({"min_learning_rate": 1}, ("trainer.min_learning_rate=1", "trainer.learning_rate=0.001")),
        ({"weight_decay": -0.1}, ("trainer.weight_decay=-0.1", "at least 0")),
        ({"beta2": 1.0}, ("trainer.beta2=1.0", "below 1")),
        ({"max_grad_norm": 0}, ("trainer.max_grad_norm=0", "above 0, or null")),
        ({"max_grad_norm": "none"}, ("trainer.max_grad_norm=none", "a number or null")),
        ({"checkpoint": 1}, ("trainer.checkpoint=1", "true or false")),
        ({"precision": "bf16"}, ("trainer.precision=bf16", "bf16-true", "bf16-mixed")),
        ({"precision": "16-mixed"}, ("trainer.precision=16-mixed", "GradScaler", "every step")),
        ({"precision": 32}, ("trainer.precision=32", "32-true", "bf16-mixed")),
        ({"cuda_graph": 1}, ("trainer.cuda_graph=1", "true, false, auto")),
        ({"max_steps": 10**25}, ("trainer.max_steps=1000", "an integer below 2^63")),
        ({"max_steps": 1e30}, ("trainer.max_steps=1000", "an integer below 2^63")),
        ({"peak_tflops": float("inf")}, ("trainer.peak_tflops=inf", "finite")),
        ({"accelerator": "tpu"}, ("trainer.accelerator=tpu", "gpu", "cpu", "auto")),
        ({"devices": 2}, ("trainer.devices=2", "1")),
        ({"peak_tflops": 0}, ("trainer.peak_tflops=0", "above 0", "null")),
        ({"peak_tflops": "H200"}, ("trainer.peak_tflops=H200", "a number or null")),
        ({"peak_tflops": "989.5"}, ("trainer.peak_tflops=989.5", "a number or null, without quotes")),
        ({"max_stps": 3}, ("trainer.max_stps", "no such key", "max_steps", "accumulate")),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(changes, words):
    with raises(UserError, *words) as caught:
        trainer(**changes)
    assert "\n" not in str(caught.value)


def test_a_section_that_is_a_value():
    with raises(UserError, "sweep=3", "sweep.KEY=VALUE"):
        build("sweep", 3, SweepOptions)


def test_numbers_may_be_written_as_floats_or_integers():
    options = trainer(max_steps=1e3, learning_rate=1, max_grad_norm=None)
    assert options.max_steps == 1000
    assert isinstance(options.max_steps, int)
    assert options.learning_rate == 1.0
    assert options.max_grad_norm is None


def test_a_number_where_a_name_belongs_is_told_how_to_write_it():
    values = OmegaConf.to_container(config().logger, resolve=True)
    with raises(UserError, "logger.project=5", "a string", "logger.project='\"5\"'"):
        build("logger", values | {"project": 5}, LoggerOptions)


def test_a_missing_key_is_named():
    with raises(UserError, "logger.project is missing", "a string"):
        build("logger", {"mode": "offline", "entity": None, "tags": []}, LoggerOptions)


def test_wandb_modes():
    values = OmegaConf.to_container(config().logger)
    assert build("logger", values, LoggerOptions).mode == "offline"
    with raises(UserError, "logger.mode=onlin", "online, offline, disabled"):
        build("logger", values | {"mode": "onlin"}, LoggerOptions)


def test_wandb_tags():
    values = OmegaConf.to_container(config().logger)
    for tags in ([None], [""], ["a" * 65], [["a"]]):
        with raises(UserError, "logger.tags=", "a list of words of 1 to 64 characters"):
            build("logger", values | {"tags": tags}, LoggerOptions)


@dataclass
class Shelf:
    books: int
    names: list[str]
    height: float = 1.0

    def __post_init__(self):
        if self.books > 9:
            raise ValueError(f"books={self.books} do not fit")


def test_a_target_is_found_by_its_path_and_checked_by_its_signature():
    section = {"_target_": f"{__name__}.Shelf", "books": 3, "names": ["a"]}
    assert build("shelf", section, Shelf) == Shelf(3, ["a"])
    with raises(UserError, "shelf.names=a", "a list"):
        build("shelf", section | {"names": "a"}, Shelf)
    with raises(UserError, "shelf: books=10 do not fit"):
        build("shelf", section | {"books": 10}, Shelf)


def test_a_target_that_does_not_exist():
    with raises(UserError, "model._target_", "fusedmlp.models.Nothing"):
        build("model", {"_target_": "fusedmlp.models.Nothing"})
