"""Tile configurations of the GEMM kernels: which exist, which suit a problem, and which one the rule takes.

The rule: the largest tile that still keeps most multiprocessors busy, among those that fit the card's shared memory;
backward on Hopper, another kernel where all tiles are computed at once. It depends on the problem and the card alone.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

# Gluon changes from release to release: the versions of Triton with which gemm_hopper.py was correct on an H200.
HOPPER_TRITON = ("3.6",)
TRITON = ".".join(triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class GemmConfig:
    """Constants of a GEMM kernel: `kernel` is "plain" (gemm.py) or "hopper" (gemm_hopper.py).

    READ_FIRST (plain): a program for every tile, which reads its preact, forward its bias, before the products.
    """

    kernel: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    num_stages: int
    num_warps: int
    READ_FIRST: bool = False

    def tiles(self, problem: "Problem") -> int:
        return triton.cdiv(problem.M, self.BLOCK_M) * triton.cdiv(problem.N, self.BLOCK_N)

    def shared_bytes(self, itemsize: int, use_tma: bool, backward: bool) -> int:
        """Shared memory of one program: operand tiles in flight, and tiles of the result on their way through TMA."""
        operands = self.num_stages * (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K
        result = self.BLOCK_M * self.BLOCK_N
        if self.kernel == "hopper":
            return itemsize * (operands + 2 * result) + (4608 if backward else 512)
        if self.READ_FIRST:
            # Results take the place of operands that are no longer needed.
            return itemsize * max(operands, (1 + backward) * result) + 2048
        # Each matrix of the result's shape takes a tile; fp32 ones one more to change the layout of the products.
        tiles = 1 + backward + (backward and itemsize == 4) if use_tma else 0
        return itemsize * (operands + tiles * result) + 2048


@dataclass(frozen=True)
class Problem:
    """What a choice depends on.

    Attributes:
        M, N, K: rows, columns, and what is summed over.  dtype: of operands and results.
        precision: of fp32 products, "ieee" or "tf32".
        use_tma: every matrix can be a tensor descriptor.
        backward: the epilogue reads the preact.  flags: what else the epilogue does, for the key.
        device: index of the GPU, -1 for the interpreter.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    precision: str
    use_tma: bool
    backward: bool
    flags: str
    device: int


@dataclass(frozen=True)
class StackConfig:
    """Constants of the kernel for a layer within a stack (gemm_stack.py), whose programs compute tiles of two kinds.

    dx: of dx and dpreact; GROUP_M and num_warps hold for all.  dweight: BLOCK_K is a step over the rows of x.
    DX_FIRST: programs with the lowest ids, which start first, compute tiles of dx, else of dweight.
    """

    dx: GemmConfig
    dweight: GemmConfig
    DX_FIRST: bool = False

    kernel = "stack"

    def tiles(self, M: int, N: int, K: int) -> tuple[int, int]:
        """Tiles of dx (M, N) and of dweight (K, N)."""
        dx, dweight = self.dx, self.dweight
        num_dx = triton.cdiv(M, dx.BLOCK_M) * triton.cdiv(N, dx.BLOCK_N)
        return num_dx, triton.cdiv(K, dweight.BLOCK_M) * triton.cdiv(N, dweight.BLOCK_N)

    def programs(self, M: int, N: int, K: int) -> int:
        return sum(self.tiles(M, N, K)) + triton.cdiv(K, STACK_COLUMNS)

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of one program, of whichever kind: results take the place of operands."""
        both = (self.dx, self.dweight)
        operands = max(c.num_stages * (c.BLOCK_M + c.BLOCK_N) * c.BLOCK_K for c in both)
        return itemsize * max(operands, *(2 * c.BLOCK_M * c.BLOCK_N for c in both)) + 2048


# In the order in which the rule asks: largest tiles first. The backward epilogue holds more values than the forward
# one, so its tiles are smaller. Narrow tiles take longer steps over K where the card's shared memory allows.
_FORWARD = {
    # Before "hopper", whose programs hide the epilogue of one tile behind the products of another: here there is none.
    "one wave, sm_90": [
        GemmConfig("plain", 64, 128, 128, 8, 4, 8, READ_FIRST=True),
        # All of K = 512 in flight at once, and two programs share a multiprocessor.
        GemmConfig("plain", 64, 32, 128, 8, 4, 4, READ_FIRST=True),
    ],
    "hopper": [GemmConfig("hopper", 128, 128, 64, 8, 5, 4)],
    # Other cards have not the registers or the shared memory for it.
    "16 bit, sm_90": [GemmConfig("plain", 128, 256, 64, 8, 3, 8)],
    "16 bit": [
        GemmConfig("plain", 128, 128, 64, 8, 3, 8),
        GemmConfig("plain", 64, 128, 128, 8, 3, 4),
        GemmConfig("plain", 64, 128, 64, 8, 4, 4),
        GemmConfig("plain", 64, 64, 128, 8, 4, 4),
        GemmConfig("plain", 64, 64, 64, 8, 4, 4),
    ],
    "tf32": [GemmConfig("plain", 128, 128, 32, 8, 3, 8), GemmConfig("plain", 64, 64, 32, 8, 4, 4)],
    # Products in full fp32 run on the ordinary cores, from registers.
    "ieee": [GemmConfig("plain", 128, 64, 16, 8, 3, 8), GemmConfig("plain", 64, 64, 16, 8, 3, 4)],
}
_BACKWARD = {
    "one wave, sm_90": [
        GemmConfig("plain", 64, 128, 64, 8, 6, 8, READ_FIRST=True),
        # Two programs share a multiprocessor, and hide each other's.
        GemmConfig("plain", 64, 128, 64, 8, 4, 8, READ_FIRST=True),
        GemmConfig("plain", 128, 128, 64, 8, 4, 8, READ_FIRST=True),
        # All of K = 512 in flight at once.
        GemmConfig("plain", 64, 32, 128, 8, 4, 4, READ_FIRST=True),
    ],
    "hopper": [GemmConfig("hopper", 128, 128, 64, 16, 4, 4)],
    "16 bit, sm_90": [],
    "16 bit": [GemmConfig("plain", 64, 128, 64, 8, 4, 8), GemmConfig("plain", 64, 64, 64, 8, 4, 4)],
    "tf32": [
        GemmConfig("plain", 64, 128, 32, 8, 3, 8),
        GemmConfig("plain", 64, 64, 32, 8, 4, 4),
        # For cards with TMA and 99 KB of shared memory (12.x).
        GemmConfig("plain", 64, 64, 32, 8, 3, 4),
    ],
    "ieee": [GemmConfig("plain", 128, 64, 16, 8, 3, 8), GemmConfig("plain", 64, 64, 16, 8, 3, 4)],
}
_INTERPRETER = GemmConfig("plain", 64, 64, 32, 8, 1, 4)
# Rows of a tile of dx, in every configuration, and columns that a program sums for dbias.
STACK_ROWS, STACK_COLUMNS = 64, 128
# Through TMA alone, and for 16-bit dtypes.
_STACK = {
    "one wave, sm_90": [
        StackConfig(GemmConfig("plain", 64, 128, 64, 8, 4, 8, True), GemmConfig("plain", 64, 128, 64, 8, 4, 8)),
        StackConfig(GemmConfig("plain", 64, 64, 128, 8, 3, 4, True), GemmConfig("plain", 64, 64, 128, 8, 3, 4)),
    ],
    # Less to read from L2, but only where the second wave is as full as the first.
    "two waves, sm_90": [
        StackConfig(GemmConfig("plain", 64, 128, 64, 8, 4, 8, True), GemmConfig("plain", 128, 128, 64, 8, 3, 8)),
    ],
}
_STACK_INTERPRETER = StackConfig(
    GemmConfig("plain", 64, 64, 32, 8, 1, 4, True), GemmConfig("plain", 32, 64, 64, 8, 1, 4)
)
# Beyond, few tiles of dweight have long sums, which cuBLAS splits.
_MOST_STACK_ROWS = 2048


@cache
def card(device: int) -> tuple[tuple[int, int], int, int, str]:
    """Compute capability, multiprocessors, shared memory of a block in bytes, name."""
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_block_optin
    return (properties.major, properties.minor), properties.multi_processor_count, shared, properties.name


def multiprocessors(device: int) -> int:
    return 1 if device < 0 else card(device)[1]


def has_tma(device: int) -> bool:
    return device >= 0 and card(device)[0] >= (9, 0)


def candidates(problem: Problem) -> list[GemmConfig]:
    """Configurations that suit the problem, in the order in which the rule asks.

    Raises: RuntimeError if the card has not the shared memory for any of them.
    """
    if problem.device < 0:
        return [_INTERPRETER]
    capability = card(problem.device)[0]
    known = _BACKWARD if problem.backward else _FORWARD
    if problem.dtype == torch.float32:
        configs = known[problem.precision]
    elif capability == (9, 0) and problem.use_tma:
        gluon = known["hopper"] if TRITON in HOPPER_TRITON else []
        configs = known["one wave, sm_90"] + gluon + known["16 bit, sm_90"] + known["16 bit"]
    else:
        configs = known["16 bit"]
    suitable = [config for config in configs if _suits(config, problem)]
    if not suitable:
        _, _, shared, name = card(problem.device)
        raise RuntimeError(
            f"no configuration of Triton's GEMM kernels fits the {shared // 1024} KB of shared memory "
            f"that a block has on {name} ({capability[0]}.{capability[1]}); use impl=native"
        )
    return suitable


def _suits(config: GemmConfig, problem: Problem) -> bool:
    """Whether the card has the shared memory, and the problem is of the kind that the configuration is for."""
    _, multiprocessors, shared, _ = card(problem.device)
    needed = config.shared_bytes(problem.dtype.itemsize, problem.use_tma, problem.backward)
    # A multiprocessor has 1 KB more than a block can ask for, and keeps 1 KB of each block for itself.
    at_once = multiprocessors * ((shared + 1024) // (needed + 1024))
    one_wave = config.tiles(problem) <= at_once
    # A step longer than K would multiply zeros.
    longest_step = max(64, problem.K)
    return needed <= shared and longest_step >= config.BLOCK_K and (one_wave or not config.READ_FIRST)


def by_rule(problem: Problem) -> GemmConfig:
    """The first whose tiles keep three quarters of the multiprocessors busy, else the smallest."""
    configs = candidates(problem)
    for config in configs:
        if 4 * config.tiles(problem) >= 3 * multiprocessors(problem.device):
            return config
    return min(configs, key=lambda config: config.BLOCK_M * config.BLOCK_N)


@cache
def for_stack(M: int, N: int, K: int, itemsize: int, device: int, always: bool = False) -> StackConfig | None:
    """For the backward pass of a layer with K out_features, N in_features and M rows, in one kernel.

    None where a kernel for each product is faster, or where the card has not what that one needs. It is faster where
    all programs run at once, or in two full waves, and hide one another's waiting; `always` asks only whether the card
    can run it.
    """
    if device < 0:
        return _STACK_INTERPRETER
    capability, multiprocessors, shared, _ = card(device)
    if capability != (9, 0) or itemsize != 2:
        return None

    def fitting(waves: str) -> list[StackConfig]:
        return [config for config in _STACK[waves] if config.shared_bytes(itemsize) <= shared]

    def waves(config: StackConfig) -> float:
        a_multiprocessor = (shared + 1024) // (config.shared_bytes(itemsize) + 1024)
        return config.programs(M, N, K) / (multiprocessors * a_multiprocessor)

    one, two = fitting("one wave, sm_90"), fitting("two waves, sm_90")
    suitable = [config for config in one if waves(config) <= 1] or [
        config for config in two if 1.9 <= waves(config) <= 2
    ]
    if M > _MOST_STACK_ROWS:
        suitable = []
    if always:
        suitable = suitable or one
    busy = [config for config in suitable if 4 * sum(config.tiles(M, N, K)) >= 3 * multiprocessors]
    return next(iter(busy + suitable[-1:]), None)
