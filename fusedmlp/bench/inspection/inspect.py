"""From an op's name to its kernels: which implementation is asked, and how its kernels are found."""

from fusedmlp import impls
from fusedmlp.bench.cards import Card
from fusedmlp.bench.cases import Case
from fusedmlp.bench.inspection.reading import Kernel
from fusedmlp.errors import UserError


def inspect_op(case: Case, impl: str, direction: str, card: Card) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels of an op, and the modules that a compiler generated for it, by direction.

    Args:
        direction: "forward", "backward" or "step".
        card: what they are compiled for; it need not be here.
    Raises: UserError where the implementation has no kernels of its own, or cannot be compiled here.
    """
    if impl not in impls.names():
        raise UserError(f"impl {impl!r} is unknown; accepted: {', '.join(impls.names())}")
    if direction not in ("forward", "backward", "step"):
        raise UserError(f"direction {direction!r} is unknown; accepted: forward, backward, step")
    if impl == "compiled":
        from fusedmlp.bench.inspection.compiled_source import compiled_source

        return [], compiled_source(case, direction, card)
    if impl == "cuda":
        from fusedmlp.bench.inspection.cuda_kernels import cuda_kernels

        return cuda_kernels(case, direction, card), {}
    return _triton(case, impl, direction, card), {}


def _triton(case: Case, impl: str, direction: str, card: Card) -> list[Kernel]:
    import importlib

    try:
        module = importlib.import_module(f"fusedmlp.impls.{impl}")
        from fusedmlp.bench.inspection.triton_kernels import triton_kernels
    except ImportError as error:
        raise UserError(f"impl {impl!r} cannot be inspected: {error}") from error
    return triton_kernels(module, case, direction, card)
