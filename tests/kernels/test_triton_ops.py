"""The operators torch.ops.fusedmlp_triton.*: their schemas, fake kernels, FLOP counts and launchers."""

import pytest
import torch
from conftest import ON_GPU
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp.kernels import triton_ops

M, K, N = 70, 24, 40
# In the interpreter and on a GPU; bf16 products are wrong in the interpreter, around which the operators work.
DTYPES = [torch.float32, torch.bfloat16]


def operands(device: str, dtype: torch.dtype = torch.float32):
    """x (M, K), weight (N, K), bias (N,), hidden (M, N), and partial sums over its rows."""
    shapes = ((M, K), (N, K), (N,), (M, N))
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return *tensors, torch.randn(3, K, device=device)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_kernels_give_what_the_launchers_give(dtype):
    """Of stack_bwd, which is not for every dtype and card, `test_gemm_stack.py` asks the same."""
    x, weight, bias, hidden, sums = operands("cuda" if ON_GPU else "cpu", dtype)
    apart = hidden[::2, ::2]
    calls = [
        (triton_ops.gelu_fwd, (apart, "none")),
        (triton_ops.gelu_fwd, (hidden.t(), "tanh")),
        (triton_ops.gelu_bwd, (hidden[:1].expand(M, N), hidden, "tanh")),
        (triton_ops.softmax_fwd, (hidden.t(), 0)),
        (triton_ops.softmax_bwd, (hidden, hidden, 1)),
        (triton_ops.linear_gelu_fwd, (x, weight, bias, "none", True)),
        (triton_ops.linear_gelu_fwd, (x, weight, None, "tanh", False)),
        (triton_ops.dgelu_dbias, (hidden, hidden, "none", False)),
        (triton_ops.dgelu_dbias, (hidden.t().contiguous().t(), hidden, "tanh", True)),
        (triton_ops.dgelu_gemm, (x, weight.t(), hidden, "none", False, False)),
        (triton_ops.dgelu_gemm, (x, weight.t(), hidden, "tanh", True, True)),
        (triton_ops.dgelu_gemm, (x, weight.t(), hidden, "none", False, True, True)),
        (triton_ops.column_sum, (sums, dtype)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_every_operator_runs_the_launcher_of_its_name():
    names = [operator._schema.name.removeprefix("fusedmlp_triton::") for operator in triton_ops.LAUNCHERS]
    assert len(names) == 9
    for name, (operator, launcher) in zip(names, triton_ops.LAUNCHERS.items(), strict=True):
        assert launcher.__name__ == name
        assert getattr(triton_ops, name) is operator
        arguments = [argument.name for argument in operator._schema.arguments]
        taken = list(launcher.__annotations__)[: len(arguments)]
        assert arguments == taken, name


def test_flops():
    x, weight, _, hidden, sums = operands("meta")
    counter = FlopCounterMode(display=False)

    def flops(operator, *arguments):
        with counter:
            operator(*arguments)
        return counter.get_total_flops()

    product = 2 * M * K * N
    assert flops(triton_ops.linear_gelu_fwd, x, weight, None, "none", True) == product
    assert flops(triton_ops.dgelu_gemm, x, weight.t(), hidden, "none", True, True) == product
    assert flops(triton_ops.stack_bwd, x, weight.t(), hidden, hidden, sums, "none", True) == 2 * product
    assert (
        flops(triton_ops.gelu_fwd, hidden, "none") == flops(triton_ops.dgelu_dbias, hidden, hidden, "none", True) == 0
    )
