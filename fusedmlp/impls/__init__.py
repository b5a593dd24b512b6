"""The contract of an implementation, and how one is found by its name.

An implementation is one file in this folder. Its name is the file's name; nothing is registered anywhere. It defines

    gelu(x, approximate)                        x: any shape -> like x
    softmax(x, dim)                             x: any shape, 0 <= dim -> like x
    linear_gelu(x, weight, bias, approximate)   x: (..., K), weight: (N, K), bias: (N,) or None -> (..., N)
    mlp(x, weight1, bias1, weight2, bias2, approximate)
                                                weight2: (N2, N), bias2: (N2,) or None -> (..., N2)
    unavailable() -> str | None                 why it cannot run here, in words a user can act on

and, where they differ from the defaults, `DTYPES` (what it computes in), `DEVICES` (device types; default: any),
`built()` (whether it runs without a long build first; impl=auto leaves it out until it does; default: True) and
`resolved()` (the name of the implementation that runs in its place). The functions may rely on `fusedmlp.functional`
having checked their arguments: one dtype, one device, matching shapes, `approximate` "none" or "tanh".
"""

import importlib
import pkgutil
from types import ModuleType

import torch

DEFAULT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_loaded: dict[str, ModuleType] = {}


def names() -> list[str]:
    """Names of all implementations, whether or not they can run here, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def unavailable(name: str) -> str | None:
    """Why implementation `name` cannot run here, in words a user can act on; None if it can.

    Raises: ValueError for an unknown name.
    """
    if name not in names():
        raise ValueError(f"impl={name!r} is unknown; accepted: {', '.join(names())}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        return f"its import failed: {error}"
    return module.unavailable()


def load(name: str) -> ModuleType:
    """The module of implementation `name`, ready to run.

    Raises: ValueError for an unknown name; RuntimeError, with the reason and the remedy, if it cannot run here.
    """
    if torch.compiler.is_compiling() or name not in _loaded:
        _load(name)
    return _loaded[name]


def _load(name: str) -> None:
    reason = unavailable(name)
    if reason is not None:
        raise RuntimeError(f"impl={name!r} cannot run here: {reason}")
    _loaded[name] = importlib.import_module(f"{__name__}.{name}")


# A first call may come while TorchDynamo traces: it runs `_load` and takes the result for a constant. This is all that
# `torch.compiler.assume_constant_result` does, without its import of TorchDynamo, which takes a second.
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolved(name: str) -> str:
    """Name of the implementation that runs when `name` is asked for; differs from it for "auto" only."""
    module = load(name)
    return module.resolved() if hasattr(module, "resolved") else name


def dtypes(name: str) -> tuple[torch.dtype, ...]:
    """Dtypes that implementation `name` accepts."""
    return getattr(load(name), "DTYPES", DEFAULT_DTYPES)
