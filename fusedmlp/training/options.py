"""What the sections of the config accept: one dataclass each, types from the annotations, ranges in one place.

A section with a `_target_` (model, data) is checked against the signature of what it builds; the target's own
constructor checks the ranges.
"""

import difflib
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusedmlp.errors import UserError

PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true")
WANDB_MODES = ("offline", "online", "disabled")
ACCELERATORS = ("auto", "cpu", "gpu")
DISTRIBUTED = ("ddp", "fsdp")
STRATEGIES = ("single", *DISTRIBUTED)
ADAMW = ("auto", "native", "triton")
PROFILE_TOOLS = ("torch", "nsys", "memory", "ncu")

# What is accepted where the type alone does not say it.
_CHOICES: dict[str, tuple[str, ...]] = {
    "trainer.precision": PRECISIONS, "trainer.accelerator": ACCELERATORS, "trainer.strategy": STRATEGIES,
    "trainer.adamw": ADAMW, "trainer.cuda_graph": ("true", "false", "auto"),
    "trainer.devices": ("an integer of at least 1", "auto"), "logger.mode": WANDB_MODES,
    "profile.tool": (*PROFILE_TOOLS, "null"),
}  # fmt: skip
_INTEGERS_BELOW = 2**63  # what PyTorch holds sizes in
_LONGEST_WAIT_S = 1_000_000  # PyTorch counts milliseconds in 32 bits


@dataclass(frozen=True)
class TrainerOptions:
    """Section `trainer`; every key is explained in configs/trainer/default.yaml."""

    max_steps: int
    accumulate: int
    precision: str
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float | None
    adamw: str
    log_every: int
    val_every: int
    checkpoint: bool
    checkpoint_every: int
    accelerator: str
    strategy: str
    devices: int | str
    num_nodes: int
    rank_timeout: float
    peak_tflops: float | None
    cuda_graph: bool | str
    read_loss_every_step: bool

    def __post_init__(self) -> None:
        for name in ("max_steps", "accumulate", "log_every"):
            require(f"trainer.{name}", getattr(self, name), getattr(self, name) >= 1, "an integer of at least 1")
        for name in ("warmup_steps", "val_every", "checkpoint_every"):
            require(
                f"trainer.{name}", getattr(self, name), getattr(self, name) >= 0, "an integer of at least 0 (0: off)"
            )
        require(
            "trainer.learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf, "a finite number above 0"
        )
        require("trainer.min_learning_rate", self.min_learning_rate, 0 <= self.min_learning_rate <= self.learning_rate,
                f"a number from 0 to trainer.learning_rate={self.learning_rate}")  # fmt: skip
        require("trainer.weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf,
                "a finite number of at least 0")  # fmt: skip
        for name in ("beta1", "beta2"):
            require(f"trainer.{name}", getattr(self, name), 0 <= getattr(self, name) < 1, "a number from 0 to below 1")
        require("trainer.max_grad_norm", self.max_grad_norm, self.max_grad_norm is None or self.max_grad_norm > 0,
                "a number above 0, or null for no clipping")  # fmt: skip
        require("trainer.peak_tflops", self.peak_tflops, self.peak_tflops is None or 0 < self.peak_tflops < math.inf,
                "a finite number above 0, in TFLOP/s, or null for the peak that is known of the GPU")  # fmt: skip
        if self.precision in ("16-mixed", "fp16-mixed", "16", "16-true", "fp16-true"):
            raise UserError(
                f"trainer.precision={self.precision} is not offered: fp16 needs a GradScaler, which reads a value from "
                f"the GPU in every step and so stalls it; accepted: {', '.join(PRECISIONS)}"
            )
        choose("trainer.precision", self.precision, PRECISIONS)
        choose("trainer.adamw", self.adamw, ADAMW)
        choose("trainer.accelerator", self.accelerator, ACCELERATORS)
        require("trainer.cuda_graph", self.cuda_graph, self.cuda_graph in (True, False, "auto"), "true, false or auto")
        if self.cuda_graph is True and self.read_loss_every_step:
            raise UserError(
                "trainer.cuda_graph=true cannot replay steps that wait for the loss (trainer.read_loss_every_step)"
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        choose("trainer.strategy", self.strategy, STRATEGIES)
        require("trainer.rank_timeout", self.rank_timeout, 1 <= self.rank_timeout <= _LONGEST_WAIT_S,
                f"a number of seconds from 1, at most {_LONGEST_WAIT_S}")  # fmt: skip
        if self.strategy == "single":
            for name in ("devices", "num_nodes"):
                require(f"trainer.{name}", getattr(self, name), getattr(self, name) == 1,
                        "1 with trainer=default; several are for trainer=ddp and trainer=fsdp")  # fmt: skip
            return
        counts = isinstance(self.devices, int) and self.devices >= 1
        require("trainer.devices", self.devices, self.devices == "auto" or counts, "an integer of at least 1, or auto")
        require("trainer.num_nodes", self.num_nodes, self.num_nodes >= 1, "an integer of at least 1")
        if self.cuda_graph is True:
            raise UserError(
                f"trainer.cuda_graph=true: a step under trainer={self.strategy} is not captured, because its "
                "communication is not part of a graph; give auto or false"
            )


@dataclass(frozen=True)
class LoggerOptions:
    """Section `logger`: Weights & Biases. metrics.csv and result.json are always written."""

    mode: str
    project: str
    entity: str | None
    tags: list[str]

    def __post_init__(self) -> None:
        choose("logger.mode", self.mode, WANDB_MODES)
        # A number is a word, too: Hydra reads 2026 as one.
        words = all(isinstance(tag, str | int | float) and 1 <= len(str(tag)) <= 64 for tag in self.tags)
        require("logger.tags", self.tags, words, "a list of words of 1 to 64 characters, as in [A,B]")


@dataclass(frozen=True)
class ProfileOptions:
    """Section `profile`: the tool that records some steps (None for none) and its window; see configs/profile/."""

    tool: str | None
    wait: int
    warmup: int
    active: int
    artifact: bool
    kernel: str | None
    launches: int
    relaunch: bool

    def __post_init__(self) -> None:
        if self.tool is not None:
            choose("profile.tool", self.tool, PROFILE_TOOLS)
        least = {"wait": 0, "warmup": 1 if self.tool == "torch" else 0, "active": 1, "launches": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            require(f"profile.{name}", value, value >= bound, f"an integer of at least {bound}")


@dataclass(frozen=True)
class SweepOptions:
    """Section `sweep`: what holds for a whole sweep (`-m`)."""

    timeout: float | None
    resume: str | None
    repeats: int
    preload: int

    def __post_init__(self) -> None:
        require("sweep.timeout", self.timeout, self.timeout is None or 0 < self.timeout < float("inf"),
                "a number of seconds above 0, or null for no limit")  # fmt: skip
        require("sweep.repeats", self.repeats, self.repeats >= 1, "an integer of at least 1")
        require("sweep.preload", self.preload, self.preload >= 0, "a number of jobs, 0 or more")


def require(key: str, value: object, ok: bool, accepted: str) -> None:
    """Raises UserError, naming the key, the value and what is accepted, unless `ok`."""
    if not ok:
        raise UserError(f"{key}={shown(value)}: expected {accepted}")


def choose(key: str, value: str, accepted: Iterable[str]) -> None:
    """Raises UserError with the choices, the closest first, unless `value` is one of them."""
    choices = list(accepted)
    if value not in choices:
        raise UserError(f"{key}={shown(value)} is unknown; accepted: {', '.join(by_closeness(value, choices))}")


def by_closeness(word: str, choices: Iterable[str]) -> list[str]:
    """`choices`, those that look most like `word` first, the others in their order."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.5)
    return close + [choice for choice in choices if choice not in close]


def build(section: str, values: Mapping[str, Any], target: Callable[..., Any] | None = None) -> Any:
    """Calls `target`, or what `values["_target_"]` names, once the names and types of the section's values are right.

    Raises: UserError for an unknown or missing key, a value of another type, and in place of the target's ValueError.
    """
    require(section, values, isinstance(values, Mapping), f"its keys, as in {section}.KEY=VALUE")
    values = dict(values)
    path = values.pop("_target_", None)
    function = target or _locate(section, path)
    parameters, takes_others = _parameters(function)
    for name in values:
        if name not in parameters and not takes_others:
            known = by_closeness(name, parameters)
            raise UserError(f"{section}.{name}: no such key; keys of {section}: {', '.join(known)}")
    for name, (kind, required) in parameters.items():
        if name in values:
            values[name] = converted(f"{section}.{name}", values[name], kind)
        elif required:
            raise UserError(f"{section}.{name} is missing; expected {_described(kind)}")
    try:
        return function(**values)
    except ValueError as error:
        raise UserError(f"{section}: {error}") from error


def _locate(section: str, path: str | None) -> Callable[..., Any]:
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{section}._target_={path!r} names nothing that can be imported: {error}") from error


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, tuple[Any, bool]], bool]:
    """Name -> (annotation, whether it must be given) of a function or class, and whether it has **keywords besides."""
    constructor = function.__init__ if inspect.isclass(function) else function
    hints = typing.get_type_hints(constructor)
    parameters = inspect.signature(function).parameters
    named = {
        name: (hints.get(name, Any), parameter.default is parameter.empty)
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def converted(key: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: an integer may stand for a float, and 1e3 for 1000. Raises UserError for another type."""
    for option in _alternatives(kind):
        origin = typing.get_origin(option) or option
        if option is Any or (option is type(None) and value is None):
            return value
        if isinstance(value, bool) != (origin is bool):
            continue
        if origin is float and isinstance(value, int):
            return float(value)
        if origin is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if origin is int and isinstance(value, int) and abs(value) >= _INTEGERS_BELOW:
            raise UserError(f"{key}={shown(value)}: expected an integer below 2^63")
        if isinstance(origin, type) and isinstance(value, origin):
            return value
        if isinstance(value, list | tuple) and origin in (list, tuple, typing.get_origin(typing.Sequence[int])):
            return value
    raise UserError(f"{key}={shown(value)}: expected {_expected(key, value, kind)}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _expected(key: str, value: Any, kind: Any) -> str:
    if key in _CHOICES:
        return f"one of {', '.join(_CHOICES[key])}"
    if isinstance(value, str) and value.strip().lstrip("+-").replace(".", "", 1).isdecimal():
        return f"{_described(kind)}, without quotes"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    written = f", for Hydra in quotes of its own: {key}='\"{value}\"'" if number and str in _alternatives(kind) else ""
    return _described(kind) + written


def _described(kind: Any) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
    return " or ".join(words.get(option) or _container(option) for option in _alternatives(kind))


def _container(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "keys with values, as in {KEY: VALUE}"
    return "a list, as in [A,B]" if origin else str(kind)


def shown(value: object) -> str:
    """A value as it would be written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
