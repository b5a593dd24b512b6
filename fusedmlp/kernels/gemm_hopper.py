"""GEMM for Hopper (sm_90) in Gluon, whose epilogue hides behind the next tile's products: ping-pong.

A program runs three groups of warps. A producer keeps a ring of operand tiles filled by TMA. Two consumers take output
tiles in turn: while one multiplies, the other applies GELU to the tile it has just finished and stores it. A pair of
barriers, `turn`, passes the tensor cores from one consumer to the other.

What bounds it is shared memory, 128 bytes a cycle for filling the ring, feeding the tensor cores and passing results
through: tiles of 128 x 128 ask for 177 of them at full speed, so the tensor cores are busy at most 72 % of the time.

Gluon changes between Triton releases, so all of it stands in this file: it compiles with Triton 3.6 and 3.8, and the
launcher uses it with those of `configs.HOPPER_TRITON`, with which it ran on an H200.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedmlp.kernels.gemm import tile_position

# Registers of a thread at launch. The three groups then share them out anew: 240 for a consumer, 24 for the producer.
MAXNREG = 168

# Its name before Triton 3.7.
_thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype):
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """`matrix` (contiguous rows of a multiple of 16 bytes) for transfers of (rows, columns) blocks."""
    return TensorDescriptor.from_tensor(matrix, block, _layout(tuple(block), matrix.dtype))


@gluon.jit
def _tanh(x):
    # Absolute error 5e-4: an eighth of the rounding of bf16, so for 16-bit outputs only.
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _density_and_tail(x):
    """Normal density at x and distribution function at -|x|: Abramowitz and Stegun 26.2.17, absolute error 8e-8."""
    t = _reciprocal(1.0 + 0.2316419 * gl.abs(x))
    density = _exp2(x * x * -0.7213475204444817) * 0.3989422804014327
    poly = 0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    return density, density * (t * poly)


@gluon.jit
def _gelu(x, APPROXIMATE: gl.constexpr):
    """gelu(x) for fp32 x, accurate to 16-bit outputs; the mathematics stands in `kernels/gelu.py`."""
    if APPROXIMATE == "tanh":
        half = 0.5 * x
        return half + half * _tanh(x * (0.7978845608028654 + 0.035677408136300125 * (x * x)))
    else:
        _density, tail = _density_and_tail(x)
        return gl.maximum(x, 0.0) - gl.abs(x) * tail


@gluon.jit
def _gelu_and_grad(x, APPROXIMATE: gl.constexpr):
    """(gelu(x), d gelu / dx) for fp32 x, accurate to 16-bit outputs."""
    if APPROXIMATE == "tanh":
        square = x * x
        t = _tanh(x * (0.7978845608028654 + 0.035677408136300125 * square))
        gate = 0.5 + 0.5 * t
        slope = (1.0 - t * t) * (0.3989422804014327 + 0.05351611222045019 * square)
    else:
        slope, tail = _density_and_tail(x)
        gate = gl.where(x > 0, 1.0 - tail, tail)
    return x * gate, gate + x * slope


@gluon.jit
def _producer(ring, a_desc, b_desc, M, N, K, num_programs, B_IS_NK: gl.constexpr, GROUP_M: gl.constexpr):
    """Fill the ring with the operands of every tile of this program."""
    a_smem, b_smem, filled, emptied = ring
    STAGES: gl.constexpr = a_smem.shape[0]
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if B_IS_NK else 1]
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), num_m * num_n, num_programs):
        pid_m, pid_n = tile_position(tile, num_m, num_n, GROUP_M)
        for k in range(gl.cdiv(K, BLOCK_K)):
            mbarrier.wait(emptied.index(slot), phase)
            bar = filled.index(slot)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [pid_m * BLOCK_M, k * BLOCK_K], bar, a_smem.index(slot))
            if B_IS_NK:
                tma.async_copy_global_to_shared(b_desc, [pid_n * BLOCK_N, k * BLOCK_K], bar, b_smem.index(slot))
            else:
                tma.async_copy_global_to_shared(b_desc, [k * BLOCK_K, pid_n * BLOCK_N], bar, b_smem.index(slot))
            last = slot == STAGES - 1
            slot = gl.where(last, 0, slot + 1)
            phase = gl.where(last, phase ^ 1, phase)


@gluon.jit
def _within(offs_n, N):
    """offs_n < N, where N is a multiple of 8 and eight neighbours agree."""
    return offs_n // 8 < N // 8


@gluon.jit
def _product(acc, ring, turn, step, num_k, i, ME: gl.constexpr, B_IS_NK: gl.constexpr):
    """Products of consumer ME's i-th tile, which stands in the ring from step `step` on; the newest is still running.

    The slot before the current one is computed, not carried from one iteration to the next: Triton 3.6 loses a
    loop-carried variable set up as `before = slot; for ...: before = slot`, and then no slot is ever freed.
    """
    a_smem, b_smem, filled, emptied = ring
    STAGES: gl.constexpr = a_smem.shape[0]
    slot = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(turn.index(ME), (i & 1) ^ (1 - ME))
    for k in range(num_k):
        mbarrier.wait(filled.index(slot), phase)
        b = b_smem.index(slot)
        if B_IS_NK:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_smem.index(slot), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        # All products but the newest are done, so the slot before this one is free.
        mbarrier.arrive(emptied.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=k > 0)
        last = slot == STAGES - 1
        slot = gl.where(last, 0, slot + 1)
        phase = gl.where(last, phase ^ 1, phase)
    # The other consumer may queue its products behind the newest of these.
    mbarrier.arrive(turn.index(1 - ME), count=1)
    return acc


@gluon.jit
def _finish(acc, ring, next_step):
    """Wait for a tile's newest product and free its slot, the one before that of `next_step`."""
    emptied = ring[3]
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(emptied.index((next_step - 1) % emptied.shape[0]), count=1)
    return acc


@gluon.jit
def _column_halves(x, layout: gl.constexpr):
    """Left and right half of the columns of x, both in `layout`: registers are renamed, nothing moves."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _send(desc, pid_m, pid_n, smem):
    """Start writing `smem` to tile (pid_m, pid_n) of `desc`."""
    fence_async_shared()
    _thread_barrier()
    shape: gl.constexpr = desc.block_type.shape
    tma.async_copy_shared_to_global(desc, [pid_m * shape[0], pid_n * shape[1]], smem)


@gluon.jit
def _await_sent():
    """Until this consumer's shared memory has been read by the stores that were started."""
    tma.store_wait(0)
    _thread_barrier()


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
        acc = _product(acc, ring, turn, step, num_k, i, ME, B_IS_NK)
        if HAS_BIAS:
            offs_n = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + offs_n, mask=_within(offs_n, N), other=0.0).to(gl.float32)
        acc = _finish(acc, ring, step + num_k)
        if HAS_BIAS:
            acc = acc + gl.expand_dims(bias, 0)
        left, right = _column_halves(acc, half)
        _await_sent()
        if STORE_PREACT:
            left_smem.store(left.to(smem.dtype))
            right_smem.store(right.to(smem.dtype))
            _send(preact_desc, pid_m, pid_n, smem)
        left_act = _gelu(left, APPROXIMATE).to(smem.dtype)
        # Where no preact is on its way, this only keeps the halves' GELUs apart.
        _await_sent()
        left_smem.store(left_act)
        right_smem.store(_gelu(right, APPROXIMATE).to(smem.dtype))
        _send(act_desc, pid_m, pid_n, smem)
        step += 2 * num_k
        i += 1
    tma.store_wait(0)


@gluon.jit
def _row_halves(x):
    """Upper and lower half of the rows of x, in the layout of x: registers are renamed, nothing moves."""
    layout: gl.constexpr = x.type.layout
    upper, lower = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()
    return gl.convert_layout(upper, layout, assert_trivial=True), gl.convert_layout(lower, layout, assert_trivial=True)


@gluon.jit
def _dgelu(product, smem, APPROXIMATE: gl.constexpr, PUT: gl.constexpr):
    """Put PUT, "dpreact", "act" or "product", where the preact was, in `smem`; returns dpreact."""
    act, grad = _gelu_and_grad(smem.load(product.type.layout).to(gl.float32), APPROXIMATE)
    dpreact = (product * grad).to(smem.dtype)
    if PUT == "act":
        smem.store(act.to(smem.dtype))
    elif PUT == "product":
        smem.store(product.to(smem.dtype))
    else:
        smem.store(dpreact)
    return dpreact


@gluon.jit
def _dgelu_by_halves(product, smem, APPROXIMATE: gl.constexpr, PUT: gl.constexpr):
    """`_dgelu` in two steps, which take fewer registers; returns the halves of dpreact."""
    ROWS: gl.constexpr = smem.shape[0] // 2
    upper, lower = _row_halves(product)
    upper = _dgelu(upper, smem.slice(0, ROWS, dim=0), APPROXIMATE, PUT)
    return upper, _dgelu(lower, smem.slice(ROWS, ROWS, dim=0), APPROXIMATE, PUT)


@gluon.jit
def _store_rows(smem, upper, lower):
    ROWS: gl.constexpr = smem.shape[0] // 2
    smem.slice(0, ROWS, dim=0).store(upper)
    smem.slice(ROWS, ROWS, dim=0).store(lower)


@gluon.jit
def _column_sums(smem, sums_ptr, first_m, first_n, M, N):
    """Write the sums of the columns of a tile in `smem`.

    It is read again, in a layout where a thread holds many rows of few columns: summing the products' own layout takes
    three times the instructions, for shuffles between threads.
    """
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    PASS: gl.constexpr = 4 * (256 // COLUMNS)
    STRIP: gl.constexpr = 2 * PASS
    sums = gl.zeros((PASS, COLUMNS), gl.float32, layout)
    offs_m = gl.expand_dims(first_m + gl.arange(0, STRIP, gl.SliceLayout(1, layout)), 1)
    for r in gl.static_range(0, ROWS, STRIP):
        strip = smem.slice(r, STRIP, dim=0).load(layout).to(gl.float32)
        # A row beyond M is zero times b, which is NaN where b is not finite.
        strip = gl.where(offs_m + r < M, strip, 0.0).reshape([STRIP // PASS, PASS, COLUMNS])
        sums += gl.convert_layout(gl.sum(strip, axis=0), layout, assert_trivial=True)
    offs_n = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(sums_ptr + offs_n, gl.sum(sums, axis=0), mask=_within(offs_n, N))


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
        _await_sent()
        mbarrier.expect(bar, preact_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(preact_desc, [m, n], bar, smem)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        acc = _product(acc, ring, turn, step, num_k, i, ME, B_IS_NK)
        acc = _finish(acc, ring, step + num_k)
        mbarrier.wait(bar, i & 1)
        left, right = _column_halves(acc, half)
        if STORE_ACT or STORE_PRODUCT:
            PUT: gl.constexpr = "act" if STORE_ACT else "product"
            left_rows = _dgelu_by_halves(left, left_smem, APPROXIMATE, PUT)
            right_rows = _dgelu_by_halves(right, right_smem, APPROXIMATE, PUT)
            _send(second_desc, pid_m, pid_n, smem)
            _await_sent()
            _store_rows(left_smem, left_rows[0], left_rows[1])
            _store_rows(right_smem, right_rows[0], right_rows[1])
        else:
            _dgelu(left, left_smem, APPROXIMATE, "dpreact")
            _dgelu(right, right_smem, APPROXIMATE, "dpreact")
        _send(dpreact_desc, pid_m, pid_n, smem)
        if SUM_ROWS:
            _column_sums(smem, partial_ptr + pid_m.to(gl.int64) * N, m, n, M, N)
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


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """Barriers that wait for one arrival each."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of `desc`."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, shape[0], shape[1]], desc.layout)


@gluon.jit
def _ring(a_desc, b_desc, STAGES: gl.constexpr):
    """STAGES slots for operand tiles, and the barriers that say when one is filled and when it is empty again."""
    return _tiles(a_desc, STAGES), _tiles(b_desc, STAGES), _barriers(STAGES), _barriers(STAGES)


@gluon.jit(do_not_specialize=["M", "num_programs"])
def _hopper_linear_gelu_fwd_kernel(
    x_desc, weight_desc, act_desc, preact_desc, bias_ptr, M, N, K, num_programs,
    APPROXIMATE: gl.constexpr, HAS_BIAS: gl.constexpr, STORE_PREACT: gl.constexpr, B_IS_NK: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """act = gelu(x @ weight + bias), and preact if asked for. A program computes every num_programs-th tile."""
    _follow(PDL)
    ring = _ring(x_desc, weight_desc, STAGES)
    turn = _barriers(2)
    out_smem = _tiles(act_desc, 2)
    # fmt: off
    gl.warp_specialize(
        [
            (_fwd_consumer, (ring, turn, out_smem, bias_ptr, act_desc, preact_desc, M, N, K, num_programs,
                             gl.constexpr(0), APPROXIMATE, HAS_BIAS, STORE_PREACT, B_IS_NK, GROUP_M)),
            (_fwd_consumer, (ring, turn, out_smem, bias_ptr, act_desc, preact_desc, M, N, K, num_programs,
                             gl.constexpr(1), APPROXIMATE, HAS_BIAS, STORE_PREACT, B_IS_NK, GROUP_M)),
            (_producer, (ring, x_desc, weight_desc, M, N, K, num_programs, B_IS_NK, GROUP_M)),
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
    ring = _ring(dy_desc, weight_desc, STAGES)
    turn = _barriers(2)
    loaded = _barriers(2)
    out_smem = _tiles(dpreact_desc, 2)
    # fmt: off
    gl.warp_specialize(
        [
            (_bwd_consumer, (ring, turn, out_smem, loaded, preact_desc, dpreact_desc, second_desc, partial_ptr,
                             M, N, K, num_programs,
                             gl.constexpr(0), APPROXIMATE, STORE_ACT, SUM_ROWS, STORE_PRODUCT, B_IS_NK, GROUP_M)),
            (_bwd_consumer, (ring, turn, out_smem, loaded, preact_desc, dpreact_desc, second_desc, partial_ptr,
                             M, N, K, num_programs,
                             gl.constexpr(1), APPROXIMATE, STORE_ACT, SUM_ROWS, STORE_PRODUCT, B_IS_NK, GROUP_M)),
            (_producer, (ring, dy_desc, weight_desc, M, N, K, num_programs, B_IS_NK, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
