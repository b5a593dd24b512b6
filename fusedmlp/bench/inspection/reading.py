"""What a compiled kernel says about itself, in numbers and in words.

From the PTX and the machine code (SASS): how wide its loads and stores are, how many elements a thread has, whether it
uses tensor cores, registers, shared memory and spills, and how many blocks of it fit on a multiprocessor.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fusedmlp.bench.cards import OCCUPANCY, Card

# An instruction's line in a disassembly: /*0010*/ @P0 LDG.E.128 R4, desc[...] ;
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[\w:]+)*)", re.MULTILINE)
_TENSOR_CORE = ("HMMA", "IMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
_PACKED_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "256": 32}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name, sm: of the kernel and the architecture (90 for 9.0).
        threads: of a block.  blocks: of the launch; None if unknown.
        registers: of a thread.  spill_bytes: local memory of a thread.  shared_bytes: of a block.
        loads, stores: instructions that access global memory in the SASS, by width in bytes.
        bulk: transfers by the tensor memory accelerator (TMA).
        tensor_core: matrix instructions, by name.  instructions: of the whole kernel.
        elements: of one tensor in each thread; None if unknown.  itemsize: of the tensors' elements.
        resident: blocks on one multiprocessor.  occupancy: share of its threads that they are.
    """

    name: str
    sm: int
    threads: int
    blocks: int | None
    registers: int
    spill_bytes: int
    shared_bytes: int
    loads: Counter[int]
    stores: Counter[int]
    bulk: int
    tensor_core: Counter[str]
    instructions: int
    elements: float | None
    itemsize: int
    resident: int
    occupancy: float
    ptx: str = field(repr=False)
    sass: str = field(repr=False)

    def row(self) -> dict[str, Any]:
        """The numbers, for a table."""
        return {
            "kernel": self.name,
            "threads": self.threads,
            "blocks": self.blocks,
            "registers": self.registers,
            "spill bytes": self.spill_bytes,
            "shared KiB": round(self.shared_bytes / 1024, 1),
            "loads": _widths(self.loads),
            "stores": _widths(self.stores),
            "TMA": self.bulk,
            "tensor core": " ".join(f"{n}x{name}" for name, n in self.tensor_core.items()) or None,
            "elements per thread": self.elements,
            "instructions": self.instructions,
            "blocks per SM": self.resident,
            "occupancy": self.occupancy,
        }


def from_report(report: Any, card: Card, warps: int, blocks: int, elements: float | None, itemsize: int) -> Kernel:
    """From what `fusedmlp.kernels.aot` has compiled."""
    # Kernels with groups of warps have more than they are launched with.
    threads = 32 * (int(found[1]) // 32 if (found := re.search(r"\.reqntid (\d+)", report.ptx)) else warps)
    return from_code(
        report.name, card, threads, blocks, report.registers, report.stack_bytes, report.shared_bytes, report.ptx,
        report.sass(), elements, itemsize,
    )  # fmt: skip


def from_code(
    name: str, card: Card, threads: int, blocks: int | None, registers: int, spill_bytes: int, shared_bytes: int,
    ptx: str, sass: str, elements: float | None, itemsize: int,
) -> Kernel:  # fmt: skip
    """From a kernel's machine code and what the compiler says it needs."""
    loads, stores, tensor_core = Counter[int](), Counter[int](), Counter[str]()
    instructions = _INSTRUCTION.findall(sass)
    bulk = 0
    for instruction in instructions:
        base = instruction.split(".")[0]
        if base == "LDG":
            loads[_width(instruction)] += 1
        elif base == "STG":
            stores[_width(instruction)] += 1
        elif base in _TENSOR_CORE:
            tensor_core[base] += 1
        elif base in ("UTMALDG", "UTMASTG", "UBLKCP"):
            bulk += 1
    limits = OCCUPANCY[card.sm]
    resident = limits.blocks_of(threads, registers, shared_bytes)
    return Kernel(
        name, card.sm, threads, blocks, registers, spill_bytes, shared_bytes, loads, stores, bulk, tensor_core,
        len([i for i in instructions if not i.startswith("NOP")]), elements, itemsize, resident,
        resident * threads / limits.threads, ptx, sass,
    )  # fmt: skip


def read(kernel: Kernel, sms: int) -> list[str]:
    """What the numbers mean, a sentence each."""
    lines = []
    widest = max([*kernel.loads, *kernel.stores], default=0)
    if kernel.bulk:
        lines.append(f"moves tiles by TMA ({kernel.bulk} transfers in its code): no thread computes addresses")
        if widest:
            lines.append(f"what it reads and writes beside them, bias or sums, {widest} bytes at a time")
    elif widest == 16:
        narrow = sum(n for counts in (kernel.loads, kernel.stores) for width, n in counts.items() if width < 16)
        rest = f"; {narrow} narrower ones at edges or for sums" if narrow else ""
        lines.append(f"reads and writes 16 bytes at a time, {16 // kernel.itemsize} elements an access{rest}")
    elif widest:
        lines.append(f"widest access {widest} bytes: 16 would need aligned rows and masks that are alike for a vector")
    if kernel.elements is not None:
        grain = "one thread, one element" if kernel.elements <= 1 else "thread coarsening"
        lines.append(f"{kernel.elements:g} elements of each tensor in a thread ({grain})")
    elif kernel.loads[16] and not kernel.bulk:
        together = kernel.loads[16] * 16 // kernel.itemsize
        lines.append(f"{kernel.loads[16]} such loads in its code: {together} elements of all tensors in a thread")
    if kernel.tensor_core:
        used = ", ".join(f"{n} {name}" for name, n in kernel.tensor_core.items())
        lines.append(f"multiplies on tensor cores ({used})")
    if kernel.spill_bytes:
        lines.append(f"spills or indexes {kernel.spill_bytes} bytes of a thread in local memory: fewer values or warps")
    lines.append(
        f"{kernel.registers} registers, {kernel.shared_bytes / 1024:.1f} KiB shared memory: {kernel.resident} blocks "
        f"of {kernel.threads} threads on a multiprocessor, {100 * kernel.occupancy:.0f} % of its threads"
    )
    if kernel.blocks is not None and kernel.resident:
        at_once = sms * kernel.resident
        waves = kernel.blocks / at_once
        lines.append(f"{kernel.blocks:,} blocks, {at_once:,} at once on {sms} multiprocessors: {waves:.2f} waves")
    if not kernel.resident:
        lines.append("does not fit on a multiprocessor of this card")
    return lines


def _width(instruction: str) -> int:
    """Bytes of one access: LDG.E.128 -> 16, LDG.E.U16 -> 2, LDG.E -> 4."""
    return next((_PACKED_WIDTHS[part] for part in instruction.split(".")[1:] if part in _PACKED_WIDTHS), 4)


def _widths(counts: Counter[int]) -> str | None:
    return ", ".join(f"{n} x {width} B" for width, n in sorted(counts.items(), reverse=True)) or None
