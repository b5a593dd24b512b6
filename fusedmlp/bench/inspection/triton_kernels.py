"""The Triton kernels that an op launches: recorded with their arguments instead of launched, then compiled for a card.

So what is inspected is what would run: the kernel, block sizes, grid and specialisations that the launchers choose for
these sizes on this card.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedmlp.bench.cards import Card
from fusedmlp.bench.cases import Case, make_tensors, option
from fusedmlp.bench.inspection.fake_gpu import fake_gpu
from fusedmlp.bench.inspection.reading import Kernel, from_report
from fusedmlp.errors import UserError
from fusedmlp.kernels.aot import compile_kernel

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the jitted function, its arguments by name, launch options, and the number of programs."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    programs: int


def triton_kernels(module: ModuleType, case: Case, direction: str, card: Card) -> list[Kernel]:
    """The kernels that `module` (an implementation) launches for one direction of a case, in order, compiled."""
    return [compile_launch(launch, card, case.itemsize) for launch in record(module, case, direction, card)]


def record(module: ModuleType, case: Case, direction: str, card: Card) -> list[Launch]:
    """The launches of one direction; "step" for training forward and backward. Raises: UserError if there are none."""
    launches: list[Launch] = []
    with fake_gpu(card), _recorded(launches), _launchers_as_they_are(module), _by_hand(module, direction) as nodes:
        y = getattr(module, case.op)(*make_tensors(case, torch.device("cuda")).values(), option(case))
        if direction == "backward":
            launches.clear()
        for function, context in reversed(nodes):
            function.backward(context, torch.empty_like(y))
    if not launches:
        impl = module.__name__.rpartition(".")[2]
        remedy = "what runs in its place is named by `python scripts/bench.py kernels` or a profile"
        raise UserError(f"impl={impl} launches no Triton kernel for {case} {direction}; {remedy}")
    return launches


def compile_launch(launch: Launch, card: Card, itemsize: int) -> Kernel:
    """Compile a recorded launch for `card` and read the result."""
    types, constants, multiples = {}, {}, []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        kind = None if parameter.is_constexpr else _type(value, parameter.do_not_specialize)
        if kind is None:
            constants[parameter.name] = value
            continue
        types[parameter.name] = kind
        if kind.startswith("*") or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize):
            multiples.append(parameter.name)
    report = compile_kernel(launch.kernel, types, constants, card.sm, multiples_of_16=multiples, **launch.options)
    warps = launch.options.get("num_warps", 4)
    block = [constants[name] for name in ("BLOCK_M", "BLOCK_N") if name in constants]
    if len(block) < 2:
        block = [constants[name] for name in ("BLOCK", "CHUNK") if name in constants]
    elements = math.prod(block) / (32 * warps) if block else None
    return from_report(report, card, warps, launch.programs, elements, itemsize)


def _type(value: Any, unspecialised: bool) -> str | None:
    """Triton's type of an argument; None for one that becomes a constant."""
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int) and (value != 1 or unspecialised):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return None


@contextmanager
def _by_hand(module: ModuleType, direction: str) -> Iterator[list[tuple[Any, Any]]]:
    """Autograd functions run without autograd, which asks for a real GPU; gives them and their contexts, in order."""
    nodes: list[tuple[Any, Any]] = []

    def apply(function: Any, *args: Any) -> Any:
        context = _Context(needs_input_grad=tuple(isinstance(arg, Tensor) for arg in args))
        nodes.append((function, context))
        return function.forward(context, *args)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        if hasattr(module, "requires_grad"):
            stack.enter_context(mock.patch.object(module, "requires_grad", _constantly(direction != "forward")))
        yield nodes


def _constantly(value: bool) -> Callable[..., bool]:
    return lambda *tensors: value


class _Context(SimpleNamespace):
    """What an autograd function keeps between forward and backward."""

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


@contextmanager
def _recorded(launches: list[Launch]) -> Iterator[None]:
    """Launches of Triton kernels are noted and not made."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        defaults = {p.name: p.default for p in kernel.params if p.has_default}
        given = defaults | dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        arguments = {name: given[name] for name in kernel.arg_names}
        sizes = grid(arguments) if callable(grid) else grid
        launches.append(Launch(kernel, arguments, options, math.prod(sizes)))

    with mock.patch.object(JITFunction, "run", run):
        yield


@contextmanager
def _launchers_as_they_are(module: ModuleType) -> Iterator[None]:
    """The operators of the module, and of the modules that it imports, are replaced by their launchers.

    An operator on a tensor without data runs its fake kernel, and no launcher.
    """
    modules = [value for value in vars(module).values() if isinstance(value, ModuleType)]
    with ExitStack() as stack:
        for owner in (module, *modules):
            launchers = getattr(owner, "LAUNCHERS", {})
            for name, value in list(vars(owner).items()):
                if isinstance(value, torch._ops.OpOverload) and value in launchers:
                    stack.enter_context(mock.patch.object(owner, name, launchers[value]))
        yield
