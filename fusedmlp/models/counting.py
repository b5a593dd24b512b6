"""The FLOPs of somebody else's module, counted on a copy that has no memory; nothing of that stays behind.

A module may keep what its first forward pass has computed (a mask, rotary tables). A tensor without memory among that
would make all that is computed in the training one without memory, whose every value reads as 0.
"""

import copy
import functools
import gc
import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedmlp import impls

log = logging.getLogger(__name__)

# Of a batch of that many: products of weights alone, as in a parametrization, are shared by its samples. Some layers,
# such as BatchNorm, take no single one.
_SAMPLES = 32
# A cache may hold its tensors in tuples, lists and lists of those.
_DEPTH = 3
_HALF = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def told_flops(net: nn.Module, title: str, instead: str) -> int | None:
    """What a module says of itself, as a number or as a method without arguments; None if it says nothing of use.

    Args:
        title: of the module, for the warning where what it says is of no use.
        instead: what is done then.
    """
    told = getattr(net, "flops_per_sample", None)
    try:
        told = told() if callable(told) else told
        value = None if told is None else float(told)
    except Exception as error:  # of somebody else's method
        log.warning("flops_per_sample of %s: %s: %s; %s", title, type(error).__name__, error, instead)
        return None
    if value is not None and not 0 < value < math.inf:
        log.warning("flops_per_sample of %s is %s; %s", title, value, instead)
        return None
    return None if value is None else int(value)


class Count(NamedTuple):
    """FLOPs of a sample; those of them that have 16-bit and 8-bit factors, and of the others those of convolutions."""

    flops: int
    half: int
    fp8: int
    convolutions: int


def counted_flops(model: nn.Module, length: int, title: str) -> Count | None:
    """FLOPs of forward and backward pass on a sample of `length` tokens, in products as impl=native has them.

    None where the module does not run on tensors without memory.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with _random_state_kept(), _silenced(logging.getLogger("torch._subclasses.fake_tensor")):
            count = _count(model, length, fake)
            return count if count.flops else None
    except Exception:  # whatever somebody else's module asks of its tensors that they do not have
        log.warning("the FLOPs of %s cannot be counted, so TFLOP/s are left out", title, exc_info=True)
        return None
    finally:
        _forget(fake)


def without_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a count."""
    return isinstance(tensor, FakeTensor)


def _grouped_product(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of products of a's rows, in groups, with a matrix of b for each, or of the groups' gradients."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _convolution_backward(
    dy: torch.Size, x: torch.Size, weight: torch.Size, *others: Any, out_val: Any = None, out_shape: Any = None
) -> int:
    """FLOPs of the gradients of a convolution's x and weight, each of them those of the convolution."""
    *_, transposed, _, _, wanted = others
    places = math.prod((x if transposed else dy)[2:])
    return 2 * x[0] * places * math.prod(weight) * (wanted[0] + wanted[1])


def _matrix_product(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of a @ b; b may be a vector, and both may have a batch dimension or be vectors."""
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _product_added_to(_: torch.Size, *factors: Any, **__: Any) -> int:
    return _matrix_product(*factors)


def _trilinear(*arguments: Any, **__: Any) -> int:
    """FLOPs of nn.Bilinear's sums of products of three factors, where one multiplies what the other two give.

    After the factors come, for each of them, the dimensions of the whole that it lacks.
    """
    sizes: dict[int, int] = {}
    for shape, lacking in zip(arguments[:3], arguments[3:6], strict=True):
        dims = (dim for dim in range(len(shape) + len(lacking)) if dim not in lacking)
        sizes |= dict(zip(dims, shape, strict=True))
    return 2 * math.prod(sizes.values())


# What PyTorch's counter has no formula for, or one that counts groups which are not multiplied with one another. The
# gradient of a matrix that multiplies a vector is no sum of products, and not counted.
_BY_NAME = {
    "mv": _matrix_product,
    "dot": _matrix_product,
    "vdot": _matrix_product,
    "addmv": _product_added_to,
    "addbmm": _product_added_to,
    "_trilinear": _trilinear,
    "_grouped_mm": _grouped_product,
    "_scaled_grouped_mm": _grouped_product,
    "_scaled_mm_v2": _matrix_product,
    "_scaled_grouped_mm_v2": _grouped_product,
    "convolution_backward": _convolution_backward,
}
# Not every version of PyTorch has all of them.
_FORMULAS = {getattr(torch.ops.aten, name): flops for name, flops in _BY_NAME.items() if hasattr(torch.ops.aten, name)}


class _GroupedInAnyType(TorchDispatchMode):
    """Lets tensors without memory be multiplied in groups in any type, as those with memory may be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype in _HALF:
            return func(*args, **(kwargs or {}))
        a, b, *others = args
        ends = others[0] if others else (kwargs or {}).get("offs")
        return func(a.bfloat16(), b.bfloat16(), ends).to(a.dtype)


class _Counter(FlopCounterMode):
    """Leaves out what activation checkpointing computes once more in the backward pass, with gradients on.

    A product of complex numbers is four of real ones.
    """

    in_backward = False
    half = fp8 = convolutions = 0

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet not in self.flop_registry or (self.in_backward and torch.is_grad_enabled()):
            return out
        flops: Any = self.flop_registry[func_packet](*args, **kwargs, out_val=out)
        dtype = next((arg.dtype for arg in args if isinstance(arg, torch.Tensor)), torch.float32)
        if dtype.is_complex:
            flops *= 4
        if dtype in _HALF:
            self.half += flops
        elif dtype in _FP8:
            self.fp8 += flops
        elif "convolution" in str(func_packet):
            self.convolutions += flops
        self.flop_counts["Global"][func_packet] += flops
        return out


def _count(model: nn.Module, length: int, fake: FakeTensorMode) -> Count:
    with fake, _plain_products():
        model = _copied(model, fake)
        for module in model.modules():
            # The counter knows the operations of this one.
            if getattr(module, "impl", None) in impls.names():
                module.impl = "native"  # type: ignore[assignment]
        tokens = torch.zeros(_SAMPLES, length, dtype=torch.long)
        with _GroupedInAnyType(), _Counter(display=False, custom_mapping=_FORMULAS) as counter:
            loss = model(tokens).float().sum()
            counter.in_backward = True
            loss.backward()
    totals = counter.get_total_flops(), counter.half, counter.fp8, counter.convolutions
    return Count(*(total // _SAMPLES for total in totals))


def _copied(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """A copy without memory, which shares what cannot be copied, such as a lock."""
    memo: dict[int, Any] = {}
    with FakeCopyMode(fake):
        for module in reversed(list(model.modules())):
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                try:
                    copy.deepcopy(value, memo)
                except Exception:  # what it raises depends on the object
                    memo[id(value)] = value
        return copy.deepcopy(model, memo)


@contextmanager
def _plain_products() -> Iterator[None]:
    """Attention and recurrent networks in products that the counter sees, of the type of their tensors."""
    mkldnn: Any = torch.backends.mkldnn
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    before, mkldnn.enabled = mkldnn.enabled, False
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
        mkldnn.enabled = before


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, legacy = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    """PyTorch reports as an error, with a traceback, what it raises besides."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _forget(fake: FakeTensorMode) -> None:
    """Takes the tensors of `fake` out of the caches of functions and the dictionaries that they have been kept in."""
    if not _alive(fake):
        return
    gc.collect()
    kept: list[Any] = _alive(fake)
    for _ in range(_DEPTH):
        within: list[Any] = []
        for holder in gc.get_referrers(*kept):
            if isinstance(holder, functools._lru_cache_wrapper):
                holder.cache_clear()
            elif isinstance(holder, dict) and not _is_namespace(holder):
                for key in [key for key, value in holder.items() if any(value is one for one in kept)]:
                    del holder[key]
            elif type(holder) in (list, tuple) and holder is not kept:
                within.append(holder)
        kept = within


def _alive(fake: FakeTensorMode) -> list[FakeTensor]:
    return [held for held in gc.get_objects() if type(held) is FakeTensor and held.fake_mode is fake]


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Whether it is the variables of a module or the attributes of an object, which nobody expects to vanish."""
    return any(getattr(owner, "__dict__", None) is holder for owner in gc.get_referrers(holder))
