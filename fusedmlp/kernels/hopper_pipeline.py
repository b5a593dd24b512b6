"""What moves the tiles of `gemm_hopper.py`: the ring of operand tiles, its producer, products in turns, and stores.

A producer keeps the ring filled by TMA. Two consumers take output tiles in turn, each with accumulators and a tile of
shared memory of its own: while one multiplies, the other finishes the tile before. A pair of barriers, `turn`, passes
the tensor cores from one to the other.

    ring = operand tiles of a, of b, barriers that say when a slot is filled, and when it is empty again
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedmlp.kernels.gemm import tile_position

# Its name before Triton 3.7.
_thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """Barriers that wait for one arrival each."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def make_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of `desc`."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, shape[0], shape[1]], desc.layout)


@gluon.jit
def make_ring(a_desc, b_desc, STAGES: gl.constexpr):
    """STAGES slots for operand tiles, and the barriers that say when one is filled and when it is empty again."""
    return make_tiles(a_desc, STAGES), make_tiles(b_desc, STAGES), make_barriers(STAGES), make_barriers(STAGES)


@gluon.jit
def producer(ring, a_desc, b_desc, M, N, K, num_programs, B_IS_NK: gl.constexpr, GROUP_M: gl.constexpr):
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
def multiply(acc, ring, turn, step, num_k, i, ME: gl.constexpr, B_IS_NK: gl.constexpr):
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
def finish(acc, ring, next_step):
    """Wait for a tile's newest product and free its slot, the one before that of `next_step`."""
    emptied = ring[3]
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(emptied.index((next_step - 1) % emptied.shape[0]), count=1)
    return acc


@gluon.jit
def send(desc, pid_m, pid_n, smem):
    """Start writing `smem` to tile (pid_m, pid_n) of `desc`."""
    fence_async_shared()
    _thread_barrier()
    shape: gl.constexpr = desc.block_type.shape
    tma.async_copy_shared_to_global(desc, [pid_m * shape[0], pid_n * shape[1]], smem)


@gluon.jit
def await_sent():
    """Until this consumer's shared memory has been read by the stores that were started."""
    tma.store_wait(0)
    _thread_barrier()
