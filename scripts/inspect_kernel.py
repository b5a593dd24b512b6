"""Read the kernels that an implementation runs for an op: PTX, SASS, and what they say.

    python scripts/inspect_kernel.py gelu --impl triton                              # on this machine's GPU
    python scripts/inspect_kernel.py softmax --shape 4096x50257 --arch sm_90         # no GPU needed
    python scripts/inspect_kernel.py mlp --impl compiled --direction step --card a100 --show source
    python scripts/inspect_kernel.py linear_gelu --show sass --out DIR

For triton and cuda the kernels are compiled for the card with the sizes at hand, and read: widths of loads and stores,
elements per thread, tensor cores, registers, shared memory, spills, occupancy, waves. For compiled the Triton source
that torch.compile generates.
"""

import argparse
import sys
from pathlib import Path

import torch

from fusedmlp.bench.cards import CARDS, OCCUPANCY, Card, find_card
from fusedmlp.bench.cases import DIRECTIONS, SIZES, Case, parse_case
from fusedmlp.bench.console import make_console, show
from fusedmlp.bench.inspection import Kernel, inspect_op, read
from fusedmlp.bench.inspection.compiled_source import reading, triton_sources
from fusedmlp.errors import UserError

# The card that stands for an architecture.
ARCHS = {
    80: "NVIDIA A100-SXM4-80GB",
    89: "NVIDIA GeForce RTX 4090",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    120: "NVIDIA GeForce RTX 5090",
}
SHAPES = {"gelu": "16384x16384", "softmax": "16384x8192", "linear_gelu": "16384x1024x4096", "mlp": "16384x1024"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="inspect_kernel.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", choices=list(SIZES))
    parser.add_argument("--impl", default="triton", help="triton (default), cuda, compiled, or one of your own")
    parser.add_argument("--shape", help="default: " + ", ".join(f"{op} {shape}" for op, shape in SHAPES.items()))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--approximate", default="none", help="kind of GELU: none (erf) or tanh")
    parser.add_argument("--direction", default="forward", choices=DIRECTIONS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--arch", help=f"compile for it: {', '.join(f'sm_{sm}' for sm in ARCHS)}; default: the GPU here")
    where.add_argument("--card", help="compile for a card: a100, h100, h200, b200, ...")
    parser.add_argument("--show", default="reading", choices=["reading", "ptx", "sass", "source"])
    parser.add_argument("--out", type=Path, help="folder for .ptx, .sass and generated sources")
    return parser.parse_args(arguments)


def choose_card(arch: str | None, card: str | None) -> Card:
    """The card that is named, or this machine's GPU. Raises: UserError."""
    if card is not None:
        return find_card(card)
    if arch is not None:
        number = arch.removeprefix("sm_").removeprefix("compute_")
        if not number.isdigit() or int(number) not in ARCHS:
            raise UserError(f"--arch {arch} is unknown; accepted: {', '.join(f'sm_{sm}' for sm in ARCHS)}")
        return CARDS[ARCHS[int(number)]]
    if not torch.cuda.is_available():
        raise UserError(f"there is no GPU here; name one: --arch {' or '.join(f'sm_{sm}' for sm in ARCHS)}")
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    sm = 10 * here.major + here.minor
    if sm not in OCCUPANCY:
        raise UserError(f"compute capability {here.major}.{here.minor} is not known here; name a card with --card")
    known = CARDS.get(here.name)
    bandwidth, l2 = (known.gb_per_s, known.l2_mib) if known else (0.0, here.L2_cache_size >> 20)
    return Card(here.name, sm, here.multi_processor_count, bandwidth, l2)


def report(case: Case, kernels: list[Kernel], modules: dict[str, str], card: Card, what: str) -> None:
    """Print what was asked for."""
    console = make_console()
    if what in ("ptx", "sass"):
        if not kernels:
            raise UserError(f"--show {what}: there is only generated source; accepted: reading, source")
        print("\n".join(getattr(kernel, what) for kernel in kernels))
        return
    if what == "source":
        if not modules:
            raise UserError("--show source is for impl=compiled; the kernels of the others stand in fusedmlp/kernels")
        print("\n\n".join(modules.values()))
        return
    console.print(f"{case} for {card.name} (sm_{card.sm}, {card.sms} multiprocessors)")
    if kernels:
        show(console, "kernels read", [kernel.row() for kernel in kernels])
    for kernel in kernels:
        console.print(f"[bold]{kernel.name}[/bold]", *(f"  {line}" for line in read(kernel, card.sms)), sep="\n")
    for name, module in modules.items():
        console.print(f"[bold]{name}[/bold]", *(f"  {line}" for line in reading(module)), sep="\n")
        for source in triton_sources(module).values():
            console.print(source, markup=False)


def write(folder: Path, kernels: list[Kernel], modules: dict[str, str]) -> None:
    """One .ptx and one .sass for each kernel, one .py for each generated module. Raises: UserError."""
    try:
        _write(folder, kernels, modules)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}") from error


def _write(folder: Path, kernels: list[Kernel], modules: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, kernel in enumerate(kernels):
        name = "".join(c if c.isalnum() else "_" for c in kernel.name).strip("_")
        (folder / f"{number}-{name}.ptx").write_text(kernel.ptx)
        (folder / f"{number}-{name}.sass").write_text(kernel.sass)
    for name, module in modules.items():
        (folder / f"{name}.py").write_text(module)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        case = parse_case(args.op, args.shape or SHAPES[args.op], args.dtype, args.approximate)
        card = choose_card(args.arch, args.card)
        kernels, modules = inspect_op(case, args.impl, args.direction, card)
        report(case, kernels, modules, card, args.show)
        if args.out:
            write(args.out, kernels, modules)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
