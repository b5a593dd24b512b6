"""Any PyTorch module, a timm model or a Hugging Face model as the network that train.py trains.

`B` batch, `T` window length in tokens (context), `P` positions with logits, `V` classes.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from fusedmlp.errors import UserError
from fusedmlp.models.counting import counted_flops, told_flops, without_memory
from fusedmlp.models.hugging_face import one_sequence
from fusedmlp.replace import Replacement, replace_modules

INPUTS = ("tokens", "image")
TARGETS = "my_package.Net, timm:<name> or hf:<model type or folder>"


class TorchModule(nn.Module):
    """A module of somebody else's as a next-token model; its MLPs are replaced by those of `impl`.

    Args:
        target: what builds the module: `my_package.Net` (imported, also from the current directory), `timm:<name>` (a
            timm model with random weights), or `hf:<model type or folder>` (a Hugging Face causal language model or
            image classifier with random weights, from the defaults of its type, such as gpt2, or from the config.json
            in a folder). Nothing is downloaded.
        kwargs: keyword arguments of what `target` names: of the class, of the timm model, or of the config.
        dim: not used here; in a config, what kwargs can refer to.
        context: T.
        vocab_size: V, the number of classes that the logits must have at least.
        inputs: "tokens" hands over (B, T) int64; "image" reads the T bytes of a window as a picture (B, C, H, W) in
            [-1, 1], with `image_shape`.
        image_shape: [C, H, W], whose product is T.
        replace: whether `fusedmlp.replace_modules` is applied, with `impl`.
        impl: of the modules put in.
    Attributes:
        net: the module.  report: what was replaced, or None.  title: what was built, for the record.
        convolution_share, half_share, fp8_share: of the FLOPs, once they are counted: convolutions, and what else has
            16-bit or 8-bit factors. The first two are 1 where the module tells its FLOPs and has convolutions, or
            parameters of 16 bits.
    Shape: tokens (B, T) int64 -> logits (B, P, V); (B, V) from the module counts as P = 1, the token after the window.
    Raises: UserError where the target cannot be built; ValueError for a size.
    """

    def __init__(
        self,
        target: str | None = None,
        kwargs: dict[str, Any] | None = None,
        dim: int | None = None,
        context: int = 128,
        vocab_size: int = 256,
        inputs: str = "tokens",
        image_shape: list[int] | None = None,
        replace: bool = True,
        impl: str = "auto",
    ):
        super().__init__()
        if target is None:
            raise UserError(f"model.target is missing; expected {TARGETS}")
        if inputs not in INPUTS:
            raise ValueError(f"inputs={inputs!r} is unknown; accepted: {', '.join(INPUTS)}")
        if inputs == "image":
            shape = image_shape or []
            if len(shape) != 3 or shape[0] * shape[1] * shape[2] != context:
                raise ValueError(f"image_shape={image_shape} must be [channels, height, width] of product {context=}")
        self.context, self.vocab_size, self.inputs, self.image_shape = context, vocab_size, inputs, image_shape
        self.title = target
        self.convolution_share = self.half_share = self.fp8_share = 0.0
        self.net = build(target, kwargs or {})
        _require_tables(self.net, target, context, vocab_size)
        self.report: Replacement | None = replace_modules(self.net, impl) if replace else None
        self._known: set[str] | None = {name for name, _ in self.named_parameters()}

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        if self.inputs == "image":
            assert self.image_shape is not None
            pixels = tokens.view(-1, *self.image_shape).to(self._dtype())
            x = pixels / 127.5 - 1  # (B, C, H, W)
        with one_sequence() if self.title.startswith("hf:") else nullcontext():
            logits = _logits(self.net(x))
        if without_memory(logits) and not without_memory(tokens):
            raise UserError(
                f"model.target={self.title} has kept a tensor without values, from the count of its FLOPs, outside of "
                "itself; let it keep that in an attribute, or give it a flops_per_sample, and nothing is counted"
            )
        if logits.ndim == 2:
            logits = logits.unsqueeze(1)
        self._check(logits, len(tokens))
        if self._known is not None:
            if late := [name for name, _ in self.named_parameters() if name not in self._known]:
                raise UserError(
                    f"model.target={self.title} makes parameters in its forward pass: {', '.join(late)}; the optimizer "
                    "does not know of them; expected all of them after construction"
                )
            self._known = None
        return logits

    def _check(self, logits: Tensor, batch: int) -> None:
        shaped = logits.ndim == 3 and logits.shape[0] == batch and logits.shape[-1] >= self.vocab_size
        if not shaped or not 1 <= logits.shape[1] <= self.context:
            raise UserError(
                f"model.target={self.title} gave logits of shape {tuple(logits.shape)} for a batch of {batch}; "
                "expected (batch, positions, classes) or (batch, classes), with at least "
                f"{self.vocab_size} classes and at most {self.context} positions"
            )
        if torch.is_grad_enabled() and not logits.requires_grad:
            raise UserError(
                f"model.target={self.title} gave logits of dtype {logits.dtype} without a gradient; expected "
                "floating-point logits that depend on its parameters, not detached from them"
            )

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.net.parameters() if p.is_floating_point()), torch.float32)

    def flops_per_sample(self) -> int | None:
        """FLOPs of the matrix products and convolutions of one training step on one window, forward and backward.

        From the module itself if it has a `flops_per_sample()`; else PyTorch's FLOP counter counts them on a copy
        without memory, with impl=native and attention in plain products, so that the number is the same for every
        implementation. None where the module does not run like that.
        """
        own = told_flops(self.net, self.title, "counted instead")
        if own is not None:
            self.half_share = float(any(p.dtype in (torch.bfloat16, torch.float16) for p in self.net.parameters()))
            convolving = any(isinstance(module, _ConvNd) for module in self.net.modules())
            self.convolution_share = float(convolving and not self.half_share)
            return own
        count = counted_flops(self, self.context, self.title)
        if count is None:
            return None
        self.convolution_share, self.half_share = count.convolutions / count.flops, count.half / count.flops
        self.fp8_share = count.fp8 / count.flops
        return count.flops


def build(target: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """The module that `target` names. Raises: UserError if it cannot be built."""
    source, found, name = target.partition(":")
    builders: dict[str, Callable[..., Any]] = {"timm": _timm, "hf": _hugging_face}
    if found and source not in builders:
        raise UserError(f"model.target={target}: expected {TARGETS}")
    builder = builders[source] if found else _imported
    try:
        net = builder(name if found else target, **kwargs)
    except UserError:
        raise
    except Exception as error:  # of somebody else's constructor
        raise UserError(f"model.target={target} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise UserError(f"model.target={target} gives a {type(net).__name__}; expected a torch.nn.Module")
    for name, parameter in net.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            raise UserError(
                f"model.target={target}: its parameter {name} has no values yet (a lazy module, or device=meta); "
                "expected a module whose parameters are initialised"
            )
    for name, module in net.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UserError(
                f"model.target={target}: {name or 'it'}, of type {type(module).__name__}, has sparse=True, and AdamW "
                "takes no sparse gradients; build it with sparse=False"
            )
    return net


def _require_tables(net: Any, target: str, context: int, vocab_size: int) -> None:
    """Raises: UserError if a Hugging Face model has fewer tokens or learned positions than a window has.

    On a GPU its lookup would fail in a kernel, later, and take all that was computed with it.
    """
    tokens = None
    with suppress(Exception):  # models of other inputs have none, and say so in several ways
        tokens = net.get_input_embeddings()
    if isinstance(tokens, nn.Embedding) and tokens.num_embeddings < vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is more than the {tokens.num_embeddings} tokens that {target} has; give "
            f"+model.kwargs.vocab_size={vocab_size}"
        )
    positions = getattr(getattr(net, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or context <= positions:
        return
    # Some keep two more, for padding; rotary positions have no table and no end.
    tables = [m for m in net.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    if any(table.num_embeddings in (positions, positions + 2) for table in tables):
        raise UserError(
            f"model.context={context} is more than the {positions} positions of {target}; give "
            f"+model.kwargs.max_position_embeddings={context}"
        )


def _imported(path: str, **kwargs: Any) -> Any:
    module, _, name = path.rpartition(".")
    here = os.getcwd()
    if here not in sys.path:
        # train.py's own folder is on the path; the user's may be another one.
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.target={path!r} names nothing that can be imported: {error}; expected {TARGETS}"
        ) from error
    return function(**kwargs)


def _timm(name: str, **kwargs: Any) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise UserError(f"model.target=timm:{name} needs timm: pip install timm") from error
    return timm.create_model(name, pretrained=False, **kwargs)


def _hugging_face(name: str, **kwargs: Any) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"model.target=hf:{name} needs transformers: pip install transformers") from error
    if Path(name).expanduser().is_dir():
        config = transformers.AutoConfig.from_pretrained(Path(name).expanduser(), local_files_only=True, **kwargs)
    else:
        config = transformers.AutoConfig.for_model(name, **kwargs)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of earlier tokens are for generation
    padding, tokens = (getattr(config, key, None) for key in ("pad_token_id", "vocab_size"))
    if isinstance(padding, int) and isinstance(tokens, int) and padding >= tokens:
        # That of a vocabulary which kwargs have made smaller; windows have no padding. Some types insist on a number.
        with suppress(Exception):
            config.pad_token_id = None
    for family in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification):
        with suppress(ValueError):  # a type of model that the family does not have
            return family.from_config(config)
    raise UserError(
        f"model.target=hf:{name} is neither a causal language model nor an image classifier; name its class"
    )


def _logits(output: Any) -> Tensor:
    """The logits in what a module returns: a tensor, an object or dictionary with `logits`, or a tuple's first item."""
    if isinstance(output, Mapping):
        output = output.get("logits", output)
    output = getattr(output, "logits", output)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise UserError(f"the model returned {type(output).__name__}; expected logits, a tensor")
    return output
