"""The values that a model keeps on the host, in Python, and may change in a step."""

import functools
import random
import reprlib
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from operator import length_hint
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

# What a model keeps is near to it; beyond that lie the data and the libraries.
_DEPTH, _MOST_ITEMS, _MOST_VALUES = 4, 1000, 100_000
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
# Their own state is known, and no step of a model depends on it.
_KNOWN_PACKAGES = ("builtins", "torch", "fusedmlp", "lightning", "logging")
_LEAVES = (type, ModuleType)
# What else a file's variables may be: its loggers and writers are nothing that a step depends on.
_GLOBAL_PACKAGES = ("builtins", "collections", "itertools", "types", "random", "numpy", "torch")
_INSTALLED = {"site-packages", "dist-packages"}


def host_values(model: nn.Module) -> dict[str, object]:
    """What is kept on the host, by where it is: equal values are no change that a later step could see.

    Looked through are the attributes of the modules, what these refer to, and the variables of the classes and files
    that the modules are from, and of the user's other files that these import. Not in it are the values of parameters
    and buffers, and what else a step changes on the GPU in place.
    """
    trained = {f"{name}.requires_grad": tensor.requires_grad for name, tensor in model.named_parameters()}
    return trained | {name: state for name, _, state in _kept(model)}


def tensors_with_graph(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those among what `host_values` looks through, each once, and where they are."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value, state in _kept(model):
        if isinstance(state, KeptTensor) and state.has_graph:
            found.setdefault(id(value), (name, value))
    return list(found.values())


def _kept(model: nn.Module) -> Iterator[tuple[str, Any, object]]:
    """Where something is kept, it, and its state."""
    found = 0
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    waiting: deque[tuple[str, Any, int]] = deque((name, value, 0) for name, value in _roots(model))
    while waiting and found < _MOST_VALUES:
        name, value, depth = waiting.popleft()
        state, parts = _looked_at(value, depth <= _DEPTH and id(value) not in seen)
        if state is not None:
            found += 1
            yield name, value, state
        elif parts:
            seen[id(value)] = value
            waiting.extend((name + part, inner, depth + 1) for part, inner in parts)


def _looked_at(value: Any, deeper: bool) -> tuple[object, list[tuple[str, Any]]]:
    """The state of a value or, unless it has one, its parts. Somebody else's object may raise whatever it is asked."""
    with suppress(Exception):
        if (state := _state(value)) is not None:
            return state, []
        if deeper:
            return None, list(_parts(value))
    return None, []


class KeptTensor:
    """A tensor that is neither a parameter nor a buffer. It is not kept alive for this."""

    def __init__(self, tensor: Tensor):
        self.tensor = weakref.ref(tensor)
        self.has_graph = tensor.grad_fn is not None
        # On a GPU a replay does again what is done in place.
        self.version = tensor._version if tensor.device.type == "cpu" and not tensor.is_inference() else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptTensor):
            return False
        # No step differentiates through what an earlier one has left. Whether one reads it shows `nothing_left`.
        return self.has_graph or other.has_graph or (self.tensor() is other.tensor() and self.version == other.version)

    __hash__ = None  # type: ignore[assignment]


def _state(value: Any) -> object:
    """Something that is equal as long as the value is the same; None for what has parts, and what is not looked at."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return KeptTensor(value)
    if issubclass(kind, torch.Generator):
        # A graph takes care of a generator on the GPU, or refuses it.
        return value.get_state().tolist() if value.device.type == "cpu" else 0
    if issubclass(kind, random.Random):
        return value.getstate()
    if issubclass(kind, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if issubclass(kind, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if issubclass(kind, numpy.ndarray | numpy.generic):
        return value.shape, value.tobytes() if value.size <= _MOST_ITEMS else None
    if kind is count or issubclass(kind, float | complex):
        return repr(value)  # a NaN is not equal to itself
    if issubclass(kind, bool | int | str | bytes | None.__class__):
        return kind, value
    if issubclass(kind, Iterator) and not hasattr(value, "__dict__"):
        return length_hint(value, -1)
    return None


def _roots(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield from ((prefix + key, value) for key, value in vars(module).items() if key not in MODULE_TABLES)
    owners = dict.fromkeys(owner for module in model.modules() for owner in type(module).__mro__)
    for name, namespace in _namespaces(owner for owner in owners if _package(owner) not in _KNOWN_PACKAGES).items():
        for key, value in list(vars(namespace).items()):
            package = _package(type(value))
            if not key.startswith("__") and (package in _GLOBAL_PACKAGES or _beside(package, name)):
                yield f"{name}.{key}", value


def _namespaces(owners: Iterable[type]) -> dict[str, Any]:
    """The classes, the files that they are from, and there the other classes, such as autograd functions, and the
    user's other files that these import."""
    found: dict[str, Any] = {}
    for owner in owners:
        found[f"{owner.__module__}.{owner.__qualname__}"] = owner
        if owner.__module__ not in found and (file := sys.modules.get(owner.__module__)):
            found[owner.__module__] = file
            for value in list(vars(file).values()):
                if issubclass(type(value), type) and value.__module__ == owner.__module__:
                    found[f"{value.__module__}.{value.__qualname__}"] = value
                elif issubclass(type(value), ModuleType) and _beside(value.__name__, owner.__module__):
                    found.setdefault(value.__name__, value)
    return found


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _beside(name: str, other: str) -> bool:
    """Whether two modules are of one package, or of packages that lie in one folder without being installed there."""
    package, theirs = name.partition(".")[0], other.partition(".")[0]
    if package in _KNOWN_PACKAGES:
        return False
    return package == theirs or ((folder := _folder(package)) is not None and folder == _folder(theirs))


@functools.cache
def _folder(package: str) -> Path | None:
    """Where a package of the user's own lies; None for what is installed or has no file."""
    module = sys.modules.get(package)
    path = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    return None if path is None or _INSTALLED & set(Path(path).parts) else Path(path).parent


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, dict):
        items = list(value.items())
        return [("", len(items)), *((f"[{reprlib.repr(key)}]", inner) for key, inner in items[:_MOST_ITEMS])]
    if issubclass(kind, list | tuple | set | frozenset | deque):
        return [("", len(value)), *((f"[{i}]", inner) for i, inner in enumerate(list(value)[:_MOST_ITEMS]))]
    if issubclass(kind, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        kept = [(f".{name}", cell.cell_contents) for name, cell in cells if _filled(cell)]
        return [*kept, (".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__)]
    if issubclass(kind, MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if issubclass(kind, functools.partial):
        return [("", value.func), (".args", value.args), (".keywords", value.keywords)]
    if issubclass(kind, _LEAVES) or (_package(kind) in _KNOWN_PACKAGES and not issubclass(kind, nn.Module)):
        return ()
    slots = (name for owner in kind.__mro__ for name in _slots(owner) if hasattr(value, name))
    return [
        *((f".{key}", inner) for key, inner in list(getattr(value, "__dict__", {}).items())),
        *((f".{name}", getattr(value, name)) for name in slots),
    ]


def _slots(owner: type) -> tuple[str, ...]:
    slots = owner.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
