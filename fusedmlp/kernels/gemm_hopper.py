"""GEMM for Hopper (sm_90) in Gluon, whose epilogue hides behind the next tile's products: ping-pong.

A program runs three groups of warps. A producer keeps a ring of operand tiles filled. Two consumers take output tiles
in turn: while one multiplies, the other applies GELU to the tile it has just finished and stores it.

What bounds it is shared memory, 128 bytes a cycle for filling the ring, feeding the tensor cores and passing results
through: tiles of 128 x 128 ask for 177 of them at full speed, so the tensor cores are busy at most 72 % of the time.

Gluon changes between Triton releases, so all of it stands here, in `hopper_pipeline.py` and in `hopper_epilogue.py`. It
compiles with Triton 3.6 and 3.8, and the launcher uses it with those of `configs.HOPPER_TRITON`, with which it ran on
an H200.

    product = a @ b, a (M, K), b (K, N) stored as (N, K) where B_IS_NK; fp32 accumulator
    forward:  preact = product + bias, act = gelu(preact)
    backward: dpreact = product * gelu'(preact), act = gelu(preact) or the product itself, partial_ptr
              (cdiv(M, BLOCK_M), N) = column sums of dpreact

Operands bf16 or fp16, every row 16-byte aligned (TMA); M, N, K need not be multiples of the block sizes.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedmlp.kernels.gemm import tile_position
from fusedmlp.kernels.hopper_epilogue import (
    column_halves,
    column_sums,
    dgelu,
    dgelu_by_halves,
    gelu,
    store_rows,
    within,
)
from fusedmlp.kernels.hopper_pipeline import (
    await_sent,
    finish,
    make_barriers,
    make_ring,
    make_tiles,
    multiply,
    producer,
    send,
)

# Registers of a thread at launch. The three groups then share them out anew: 240 for a consumer, 24 for the producer.
MAXNREG = 168


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype):
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """`matrix` (contiguous rows of a multiple of 16 bytes) for transfers of (rows, columns) blocks."""
    return TensorDescriptor.from_tensor(matrix, block, _layout(tuple(block), matrix.dtype))


@gluon.jit
def _fwd_consumer(
    ring, turn, out_smem, bias_ptr, act_desc, preact_desc, M, N, K, num_programs, ME: gl.constexpr,
    APPROXIMATE: gl.constexpr, HAS_BIAS: gl.constexpr, STORE_PREACT: gl.constexpr, B_IS_NK: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Every second tile of this program: products, then bias and GELU; writes act and, if asked for, preact."""
    BLOCK_M: gl.constexpr = act_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = act_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N // 2, 16])
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    num_k = gl.cdiv(K, ring[0].shape[2])
    smem = out_smem.index(ME)
    left_smem = smem.slice(0, BLOCK_N // 2, dim=1)
    right_smem = smem.slice(BLOCK_N // 2, BLOCK_N // 2, dim=1)
    step = num_k * ME
    i = gl.to_tensor(0)
    for tile in range(gl.program_id(0) + ME * num_programs, num_m * num_n, 2 * num_programs):
        pid_m, pid_n = tile_position(tile, num_m, num_n, GROUP_M)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        acc = multiply(acc, ring, turn, step, num_k, i, ME, B_IS_NK)
        if HAS_BIAS:
            offs_n = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + offs_n, mask=within(offs_n, N), other=0.0).to(gl.float32)
        acc = finish(acc, ring, step + num_k)
        if HAS_BIAS:
            acc = acc + gl.expand_dims(bias, 0)
        left, right = column_halves(acc, half)
        await_sent()
        if STORE_PREACT:
            left_smem.store(left.to(smem.dtype))
            right_smem.store(right.to(smem.dtype))
            send(preact_desc, pid_m, pid_n, smem)
        left_act = gelu(left, APPROXIMATE).to(smem.dtype)
        # Where no preact is on its way, this only keeps the halves' GELUs apart.
        await_sent()
        left_smem.store(left_act)
        right_smem.store(gelu(right, APPROXIMATE).to(smem.dtype))
        send(act_desc, pid_m, pid_n, smem)
        step += 2 * num_k
        i += 1
    tma.store_wait(0)


@gluon.jit
def _bwd_consumer(
    ring, turn, out_smem, loaded, preact_desc, dpreact_desc, second_desc, partial_ptr, M, N, K, num_programs,
    ME: gl.constexpr, APPROXIMATE: gl.constexpr, STORE_ACT: gl.constexpr, SUM_ROWS: gl.constexpr,
    STORE_PRODUCT: gl.constexpr, B_IS_NK: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Every second tile of this program: products, then GELU's derivative; writes dpreact, second, column sums."""
    BLOCK_M: gl.constexpr = preact_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = preact_desc.block_type.shape[1]
    HALF_N: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_N, 16])
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    num_k = gl.cdiv(K, ring[0].shape[2])
    smem = out_smem.index(ME)
    left_smem = smem.slice(0, HALF_N, dim=1)
    right_smem = smem.slice(HALF_N, HALF_N, dim=1)
    bar = loaded.index(ME)
    step = num_k * ME
    i = gl.to_tensor(0)
    for tile in range(gl.program_id(0) + ME * num_programs, num_m * num_n, 2 * num_programs):
        pid_m, pid_n = tile_position(tile, num_m, num_n, GROUP_M)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        await_sent()
        mbarrier.expect(bar, preact_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(preact_desc, [m, n], bar, smem)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        acc = multiply(acc, ring, turn, step, num_k, i, ME, B_IS_NK)
        acc = finish(acc, ring, step + num_k)
        mbarrier.wait(bar, i & 1)
        left, right = column_halves(acc, half)
        if STORE_ACT or STORE_PRODUCT:
            PUT: gl.constexpr = "act" if STORE_ACT else "product"
            left_rows = dgelu_by_halves(left, left_smem, APPROXIMATE, PUT)
            right_rows = dgelu_by_halves(right, right_smem, APPROXIMATE, PUT)
            send(second_desc, pid_m, pid_n, smem)
            await_sent()
            store_rows(left_smem, left_rows[0], left_rows[1])
            store_rows(right_smem, right_rows[0], right_rows[1])
        else:
            dgelu(left, left_smem, APPROXIMATE, "dpreact")
            dgelu(right, right_smem, APPROXIMATE, "dpreact")
        send(dpreact_desc, pid_m, pid_n, smem)
        if SUM_ROWS:
            column_sums(smem, partial_ptr + pid_m.to(gl.int64) * N, m, n, M, N)
        step += 2 * num_k
        i += 1
    tma.store_wait(0)


@gluon.jit
def _follow(PDL: gl.constexpr):
    """`pdl.follow`, in the warps that then start the others."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit(do_not_specialize=["M", "num_programs"])
def _hopper_linear_gelu_fwd_kernel(
    x_desc, weight_desc, act_desc, preact_desc, bias_ptr, M, N, K, num_programs,
    APPROXIMATE: gl.constexpr, HAS_BIAS: gl.constexpr, STORE_PREACT: gl.constexpr, B_IS_NK: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """act = gelu(x @ weight + bias), and preact if asked for. A program computes every num_programs-th tile."""
    _follow(PDL)
    ring = make_ring(x_desc, weight_desc, STAGES)
    turn = make_barriers(2)
    out_smem = make_tiles(act_desc, 2)
    # fmt: off
    gl.warp_specialize(
        [
            (_fwd_consumer, (ring, turn, out_smem, bias_ptr, act_desc, preact_desc, M, N, K, num_programs,
                             gl.constexpr(0), APPROXIMATE, HAS_BIAS, STORE_PREACT, B_IS_NK, GROUP_M)),
            (_fwd_consumer, (ring, turn, out_smem, bias_ptr, act_desc, preact_desc, M, N, K, num_programs,
                             gl.constexpr(1), APPROXIMATE, HAS_BIAS, STORE_PREACT, B_IS_NK, GROUP_M)),
            (producer, (ring, x_desc, weight_desc, M, N, K, num_programs, B_IS_NK, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


@gluon.jit(do_not_specialize=["num_programs"])
def _hopper_dgelu_kernel(
    dy_desc, weight_desc, preact_desc, dpreact_desc, second_desc, partial_ptr, M, N, K, num_programs,
    APPROXIMATE: gl.constexpr, STORE_ACT: gl.constexpr, SUM_ROWS: gl.constexpr, STORE_PRODUCT: gl.constexpr,
    B_IS_NK: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """dpreact = (dy @ weight) * gelu'(preact); if asked for, second = gelu(preact) (STORE_ACT) or dy @ weight
    (STORE_PRODUCT), and column sums."""
    _follow(PDL)
    ring = make_ring(dy_desc, weight_desc, STAGES)
    turn = make_barriers(2)
    loaded = make_barriers(2)
    out_smem = make_tiles(dpreact_desc, 2)
    # fmt: off
    gl.warp_specialize(
        [
            (_bwd_consumer, (ring, turn, out_smem, loaded, preact_desc, dpreact_desc, second_desc, partial_ptr,
                             M, N, K, num_programs,
                             gl.constexpr(0), APPROXIMATE, STORE_ACT, SUM_ROWS, STORE_PRODUCT, B_IS_NK, GROUP_M)),
            (_bwd_consumer, (ring, turn, out_smem, loaded, preact_desc, dpreact_desc, second_desc, partial_ptr,
                             M, N, K, num_programs,
                             gl.constexpr(1), APPROXIMATE, STORE_ACT, SUM_ROWS, STORE_PRODUCT, B_IS_NK, GROUP_M)),
            (producer, (ring, dy_desc, weight_desc, M, N, K, num_programs, B_IS_NK, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
