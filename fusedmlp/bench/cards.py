"""GPUs by name: multiprocessors, memory bandwidth, L2, and what a kernel can occupy; from the vendors' documents.

Dense peak rates stand in `fusedmlp.training.peaks`.
"""

from dataclasses import dataclass

import torch

from fusedmlp.errors import UserError
from fusedmlp.training.peaks import table_tflops


@dataclass(frozen=True)
class Card:
    """What a prediction needs to know of a GPU.

    Attributes:
        name: as `torch.cuda.get_device_name()` has it.  sm: compute capability times ten.  sms: multiprocessors.
        gb_per_s: bandwidth of its memory by the data sheet.  l2_mib: its L2 cache.
    """

    name: str
    sm: int
    sms: int
    gb_per_s: float
    l2_mib: int

    def tflops(self, dtype: str) -> float | None:
        """Dense peak for products of this dtype, "fp32" without TF32; None if unknown."""
        return table_tflops(self.name, dtype)


@dataclass(frozen=True)
class Occupancy:
    """Resources of one multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities")."""

    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 65536

    def blocks_of(self, threads: int, registers: int, shared: int) -> int:
        """Blocks that fit at once.

        Args:
            threads: of a block.  registers: of a thread.  shared: bytes of a block.

        Registers are given to warps in units of 256, shared memory in units of 128 bytes with 1 KiB for the system.
        """
        warps = -(-threads // 32)
        of_a_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_shared = self.shared_bytes // (-(-shared // 128) * 128 + 1024)
        return min(self.blocks, self.threads // (warps * 32), self.registers // (of_a_warp * warps), by_shared)


OCCUPANCY = {
    80: Occupancy(2048, 32, 164 * 1024),
    86: Occupancy(1536, 16, 100 * 1024),
    89: Occupancy(1536, 24, 100 * 1024),
    90: Occupancy(2048, 32, 228 * 1024),
    100: Occupancy(2048, 32, 228 * 1024),
    120: Occupancy(1536, 24, 100 * 1024),
}

CARDS = {
    card.name: card
    for card in (
        Card("NVIDIA A100-SXM4-40GB", 80, 108, 1555, 40),
        Card("NVIDIA A100-SXM4-80GB", 80, 108, 2039, 40),
        Card("NVIDIA A100 80GB PCIe", 80, 108, 1935, 40),
        Card("NVIDIA H100 80GB HBM3", 90, 132, 3350, 50),
        Card("NVIDIA H100 PCIe", 90, 114, 2000, 50),
        Card("NVIDIA H100 NVL", 90, 132, 3900, 50),
        Card("NVIDIA H200", 90, 132, 4800, 60),
        Card("NVIDIA H200 NVL", 90, 132, 4800, 60),
        Card("NVIDIA B200", 100, 148, 8000, 126),
        Card("NVIDIA L4", 89, 58, 300, 48),
        Card("NVIDIA L40S", 89, 142, 864, 96),
        Card("NVIDIA GeForce RTX 4090", 89, 128, 1008, 72),
        Card("NVIDIA GeForce RTX 5090", 120, 170, 1792, 96),
    )
}
# Short names for the command line.
SHORT = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5090": "NVIDIA GeForce RTX 5090",
}


def find_card(name: str | None) -> Card:
    """The card with this name, whole or short; None for the GPU of this machine. Raises: UserError."""
    known = f"accepted: {', '.join(SHORT)}, or a whole name: {', '.join(CARDS)}"
    if name is not None:
        card = CARDS.get(SHORT.get(name.lower(), name))
        if card is None:
            raise UserError(f"card {name!r} is unknown; {known}")
        return card
    if not torch.cuda.is_available():
        raise UserError(f"there is no GPU here; name the card to predict for, {known}")
    here = torch.cuda.get_device_name()
    if here not in CARDS:
        raise UserError(f"this GPU, {here!r}, is not in the table; name one that is like it, {known}")
    return CARDS[here]
