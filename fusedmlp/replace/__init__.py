"""Put FusedMLP, FusedLinearGeLU and the softmax op into a model that somebody else wrote."""

from typing import Any

from torch import nn

from fusedmlp import impls
from fusedmlp.replace.report import Left, Replaced, Replacement
from fusedmlp.replace.verify import Snapshot
from fusedmlp.replace.walk import Walk

__all__ = ["Left", "Replaced", "Replacement", "replace_modules"]


def replace_modules(model: nn.Module, impl: str = "auto", verify: bool = False, batch: Any = None) -> Replacement:
    """Replaces Linear + GELU, their MLPs and `nn.Softmax` in a model, in place, by what runs with `impl`.

    What is replaced is found by structure: the order in which a value goes through children, read from the source of
    `forward`; linear layers by what they compute, `nn.Linear` or with a transposed weight; GELUs by their values.

    - A module (or a method of one) that does nothing but lead a value through linear layer, GELU, dropouts or
      identities and linear layer, with anything before and after, becomes a `FusedMLP`: `nn.Sequential`, timm's `Mlp`,
      the MLPs of Hugging Face's GPT-2 and ViT, torchvision's `MLPBlock`, `nn.TransformerEncoderLayer` (whose fast path,
      in eval and without gradients, stays what it is). A dropout that drops splits it in two ops.
    - Elsewhere a linear layer whose result goes into a GELU and nowhere else becomes a `FusedLinearGeLU`, and the GELU
      an identity.
    - `nn.Softmax` becomes the softmax op.

    Modules change their class but stay the objects that they were: parameters are not copied, optimizers built before
    stay right, the keys of the state dict do not change; tied and frozen weights, dtypes, devices and meta tensors
    survive, and so do hooks. Other activations, linear layers that are more than that (adapters, quantised,
    parametrized, with hooks of their own), and whatever cannot be told from the source, are left alone, and the report
    says why.

    A linear layer that has become one with its GELU is no `nn.Linear` any more: what looks for those (adapters, weight
    initialisation, quantisation) comes before.

    Args:
        model: any module; models compiled with `torch.compile` or wrapped for several GPUs: replace first, wrap then.
        impl: one of `fusedmlp.impl_names()`.
        verify: compute outputs and gradients on `batch` before and after, with copies of the model (one of them in
            float64), and undo everything if they disagree.
        batch: what the model is called with: a tensor, a tuple of arguments or a dictionary of keyword arguments.
    Returns: a report: what was replaced by what, what was left and why. Its `restore()` undoes everything.
    Raises: TypeError for what is not a module; ValueError for an unknown impl, or `verify` without a batch;
        RuntimeError, with the reason, if impl cannot run here, or if `verify` cannot copy the model or run it in
        float64; whatever the model itself raises for the batch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    impls.load(impl)
    if verify and batch is None:
        raise ValueError("verify=True compares on a batch: give batch=, a tensor, tuple of arguments or dictionary")
    before = Snapshot.of(model, batch) if verify else None
    report = Replacement(impl)
    try:
        Walk(model, report).run()
    except BaseException:
        report.restore()
        raise
    if before is not None:
        report.difference = before.difference(model, batch)
        report.verified = report.difference is None
        if report.difference is not None:
            report.restore()
            report.left += [Left(one.name, one.what, report.difference) for one in report.replaced]
            report.replaced.clear()
    return report
