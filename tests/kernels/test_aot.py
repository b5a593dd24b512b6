"""What the compiler makes of the pointwise and softmax kernels, on a machine without a GPU."""

import re
from collections import Counter

import pytest
import torch
from conftest import INTERPRETER

pytest.importorskip("triton", reason="Triton is not installed")

if INTERPRETER:
    pytest.skip("kernels are plain Python in the interpreter", allow_module_level=True)

from fusedmlp.kernels import adamw, gelu, softmax, softmax_team, softmax_wide
from fusedmlp.kernels.aot import SHARED_BYTES_PER_BLOCK, compile_kernel

SMS = [80, 90, 100]
on_all_cards = pytest.mark.parametrize("sm", SMS)


def types(kernel, constants, dtype):
    """Run-time arguments: tensors of `dtype`, the teams' work area, 32-bit sizes and strides."""

    def kind(name):
        if name == "work_ptr":
            return "*i64"
        return f"*{dtype}" if name.endswith("_ptr") else "i32"

    return {name: kind(name) for name in kernel.arg_names if name not in constants and name != "PDL"}


def build(kernel, constants, dtype, sm, num_warps, odd=()):
    """Compile with every size and stride a multiple of 16, except those in `odd`."""
    arguments = types(kernel, constants, dtype)
    aligned = [name for name in arguments if name not in odd]
    return compile_kernel(kernel, arguments, constants, sm, num_warps=num_warps, multiples_of_16=aligned)


def assert_lean(report):
    assert report.stack_bytes == 0, "registers are spilled"
    assert report.shared_bytes <= SHARED_BYTES_PER_BLOCK[report.sm]
    assert not report.tensor_core


def gelu_kernels():
    for kernel in (gelu._gelu_fwd_kernel, gelu._gelu_bwd_kernel):
        for approximate in ("none", "tanh"):
            for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
                yield pytest.param(kernel, approximate, dtype, itemsize, id=f"{kernel.__name__}-{approximate}-{dtype}")


@on_all_cards
@pytest.mark.parametrize(("kernel", "approximate", "dtype", "itemsize"), list(gelu_kernels()))
def test_gelu(kernel, approximate, dtype, itemsize, sm):
    fp32_forward = kernel is gelu._gelu_fwd_kernel and dtype == "fp32"
    block_bytes = gelu._BLOCK_BYTES_FP32_FORWARD if fp32_forward else gelu._BLOCK_BYTES
    constants = {"APPROXIMATE": approximate, "BLOCK": block_bytes // itemsize}
    report = build(kernel, constants, dtype, sm, gelu._NUM_WARPS)
    assert_lean(report)
    # Accesses per tensor and thread, in the body and in the masked end.
    accesses = 2 if fp32_forward else 4
    tensors_read = len(types(kernel, constants, dtype)) - 2
    assert report.loads == {16: accesses * tensors_read}
    assert report.stores == {16: accesses}
    # Otherwise too few threads fit on a multiprocessor to keep enough loads in flight.
    assert report.registers <= 64


def test_gelu_of_odd_length_has_narrow_accesses_at_its_end_only():
    constants = {"APPROXIMATE": "none", "BLOCK": 2048}
    report = build(gelu._gelu_fwd_kernel, constants, "bf16", 90, 4, odd=("n",))
    assert report.loads == {16: 2, 2: 16}
    assert report.stores == {16: 2, 2: 16}


def test_erf_form_stays_within_the_instructions_that_memory_leaves_time_for():
    """bf16 at 4.3 TB/s leaves about 31 instructions of a lane for each element of an H200; erf itself takes 40."""
    constants = {"APPROXIMATE": "none", "BLOCK": 2048}
    report = build(gelu._gelu_fwd_kernel, constants, "bf16", 90, 4)
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP|BRA)", report.sass(), re.MULTILINE))
    # 16 elements in each of the two branches.
    assert instructions / 32 <= 28


ADAMW_ARGUMENTS = {
    "table_ptr": "*i64", "chunk_ptr": "*i32", "sums_ptr": "*fp32", "max_norm_ptr": "*fp32", "clip_ptr": "*fp32",
    "num_sums": "i32", "num_tensors": "i32",
}  # fmt: skip


def build_adamw(kernel, constants, sm, num_warps):
    arguments = {name: kind for name, kind in ADAMW_ARGUMENTS.items() if name in kernel.arg_names}
    return compile_kernel(kernel, arguments, constants, sm, num_warps=num_warps)


@on_all_cards
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_adamw(dtype, sm):
    """Vectors of 16 bytes but in the last chunk of a tensor, and enough programs on a multiprocessor to stream."""
    triton_dtype, block = adamw.DTYPES[dtype], adamw._block(dtype)
    shared = {"ALIGNED": True, "CHUNK": adamw.CHUNK, "BLOCK": block}
    constants = {"PARAMETER": triton_dtype, "GRADIENT": triton_dtype, **shared}
    update = build_adamw(adamw._adamw_kernel, constants, sm, adamw._NUM_WARPS)
    assert_lean(update)
    assert (update.loads[16], update.stores[16]) == (4, 3)
    # Four blocks of 256 threads.
    assert update.registers <= 64
    sums = build_adamw(adamw._square_sums_kernel, {"GRADIENT": triton_dtype, **shared}, sm, adamw._NUM_WARPS)
    assert_lean(sums)
    assert sums.loads[16] >= 1
    assert sums.registers <= 40
    assert_lean(build_adamw(adamw._clip_kernel, {"BLOCK": adamw._SUM_BLOCK}, sm, 16))


def softmax_configurations():
    for n_cols in (16, 1024, 4096, 8192, 32768, 50304, 5_000_000):
        for backward in (False, True):
            yield pytest.param(n_cols, backward, id=f"{n_cols}-{'bwd' if backward else 'fwd'}")


@on_all_cards
@pytest.mark.parametrize(("n_cols", "backward"), list(softmax_configurations()))
def test_softmax(n_cols, backward, sm):
    report = build_softmax(n_cols, backward, "bf16", sm)
    assert_lean(report)
    # A team's words are 8 bytes wide.
    assert set(report.loads) == ({16, 8} if n_cols > 32768 else {16})
    assert set(report.stores) == {16}


@pytest.mark.parametrize(("n_cols", "backward"), list(softmax_configurations()))
def test_softmax_in_fp32(n_cols, backward):
    assert_lean(build_softmax(n_cols, backward, "fp32", 90))


ODD = ("stride_xm", "stride_ym", "stride_dym", "stride_dxm", "n_cols")


@on_all_cards
@pytest.mark.parametrize(
    ("n_cols", "backward"), [(n, b) for n in (8001, 30_001, 50_257, 5_000_001) for b in (False, True)]
)
def test_rows_that_begin_between_vectors_are_read_in_vectors(n_cols, backward, sm):
    """Only the elements in the two vectors that a row's ends cut are accessed one by one: once for each tensor."""
    config = softmax.choose(n_cols, 2, backward, softmax_team.MAX_PARTS, True)
    odd = build_softmax(n_cols, backward, "bf16", sm, 8, ODD, config)
    even = build_softmax(n_cols // 64 * 64, backward, "bf16", sm, config=config)
    assert_lean(odd)
    assert odd.loads == even.loads + Counter({2: 2 if backward else 1})
    assert odd.stores == even.stores + Counter({2: 1})
    assert odd.registers <= even.registers + 16


@on_all_cards
@pytest.mark.parametrize(("dtype", "vector"), [("bf16", 8), ("fp32", 4)])
@pytest.mark.parametrize("backward", [False, True])
def test_cut_rows_of_16_kb_or_less_are_held_by_one_program(dtype, vector, backward, sm):
    itemsize = 16 // vector
    for n_bytes in (3970, 8002, 16_002):
        n_cols = n_bytes // itemsize
        config = softmax.choose(n_cols, itemsize, backward, softmax_team.MAX_PARTS, True)
        assert isinstance(config, softmax_team.TeamConfig)
        report = build_softmax(n_cols, backward, dtype, sm, vector, ODD, config)
        assert_lean(report)
        assert set(report.loads) == set(report.stores) == {16, itemsize}
        # Enough programs fit on a multiprocessor to hide each other's waiting: half of its threads.
        assert report.registers <= 64


@pytest.mark.parametrize("stride", [1, 8], ids=["overlapping", "known"])
def test_strides_that_the_compiler_knows(stride):
    """Rows one element apart (`unfold` gives them): a stride of 1 is a constant to the compiler."""
    constants = {"PARTS": 1, "BLOCK": 2048, "VECTOR": 8, "PACKED": True, "stride_xm": stride}
    report = build(softmax_team._softmax_fwd_team_kernel, constants, "bf16", 90, 2, ("zero", "n_cols", "stride_ym"))
    assert_lean(report)
    assert report.loads[16] > 0


@on_all_cards
@pytest.mark.parametrize("backward", [False, True])
def test_narrow_rows_of_whole_vectors_are_read_in_vectors(backward, sm):
    """1000 columns are a multiple of 8, though not of 16."""
    report = build_softmax(1000, backward, "bf16", sm, vector=8, odd=ODD)
    assert_lean(report)
    assert set(report.loads) == {16}
    assert set(report.stores) == {16}


def build_softmax(n_cols, backward, dtype, sm, vector=1, odd=(), config=None):
    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    config = config or softmax.choose(n_cols, itemsize, backward, softmax_team.MAX_PARTS)
    direction = "bwd" if backward else "fwd"
    if isinstance(config, softmax.RowsConfig):
        kernel = getattr(softmax, f"_softmax_{direction}_kernel")
        constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "VECTOR": vector}
    elif isinstance(config, softmax.TeamConfig):
        kernel = getattr(softmax_team, f"_softmax_{direction}_team_kernel")
        parts = -(-n_cols // config.block)
        constants = {"PARTS": parts, "BLOCK": config.block, "VECTOR": vector, "PACKED": itemsize == 2}
    else:
        kernel = getattr(softmax_wide, f"_softmax_{direction}_wide_kernel")
        constants = {"PARTS": softmax_team.MAX_PARTS, "CHUNK": config.chunk, "VECTOR": vector}
    return build(kernel, constants, dtype, sm, config.num_warps, ("zero", *odd))


@pytest.mark.parametrize(("backward", "registers"), [(False, 72), (True, 128)])
def test_16_bit_parts_are_held_as_they_came(backward, registers):
    """64 columns a thread: 32 registers a tensor. With fp32 copies kept across the waiting it would be 96 and 154."""
    assert build_softmax(65536, backward, "bf16", 90).registers <= registers


@on_all_cards
@pytest.mark.parametrize("backward", [False, True])
def test_a_team_waits_without_a_barrier(backward, sm):
    """Each warp leaves the waiting loop when it has seen all words: a barrier inside would never be passed."""
    ptx = build_softmax(50304, backward, "bf16", sm).ptx
    waiting = ptx[ptx.index("ld.volatile") : ptx.rindex("ld.volatile")]
    assert "bar.sync" not in waiting
    assert "shared" not in waiting


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="_gelu_fwd_kernel takes"):
        compile_kernel(gelu._gelu_fwd_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 64}, 90)
