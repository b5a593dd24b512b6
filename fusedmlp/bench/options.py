"""The command line of scripts/bench.py."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from fusedmlp import impls
from fusedmlp.bench.candidates import PEERS, installed
from fusedmlp.bench.cases import DIRECTIONS, DTYPES, SIZES
from fusedmlp.bench.clock import Pace
from fusedmlp.bench.selection import OPS, TABLES
from fusedmlp.errors import UserError
from fusedmlp.functional import APPROXIMATE


@dataclass(frozen=True)
class Options:
    """What a run measures, how, and where to."""

    tables: list[str]
    impls: list[str]
    peers: list[str]
    shapes: list[str]
    sizes: list[int]
    dtypes: list[str]
    kinds: list[str]
    directions: list[str]
    full: bool
    device: torch.device
    pace: Pace
    calibration: Path | None
    out: Path
    plots: bool


def parse(arguments: Sequence[str] | None, description: str) -> Options:
    """Raises: UserError for what argparse cannot know to be wrong."""
    parser = _parser(description)
    args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA GPU here; accepted: cpu")
    if args.shape and not (args.tables and set(args.tables) <= set(OPS)):
        named = ", ".join(f"{op} ({SIZES[op]})" for op in OPS)
        raise UserError(f"--shape belongs to ops; name those that it fits before it: {named}")
    for name, value in (("rounds", args.rounds), ("rep", args.rep), ("settle", args.settle + 1)):
        if not 0 < value < float("inf"):
            raise UserError(f"--{name} must be {'at least 0' if name == 'settle' else 'more than 0'}, and finite")
    if any(not 1 <= size <= 2**24 for size in args.size):
        raise UserError(f"--size must be at least 1, and at most {2**24}")
    peers = [name for name in PEERS if installed(name)] if args.peers else []
    if args.peers and not peers:
        names = "liger-kernel quack-kernels nvmath-python[cu13]"
        raise UserError(f"--peers: none is installed; pip install {names}, or leave the flag out")
    pace = Pace(args.rounds, args.settle if device.type == "cuda" else 0.0, args.rep, not args.warm, args.seed)
    out = args.out or Path("profiles/runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-bench")
    return Options(
        args.tables or list(TABLES), _impls(args.impl), peers, args.shape, args.size,
        args.dtype, args.approximate, args.direction, args.full, device, pace, args.calibration, out, not args.no_plots,
    )  # fmt: skip


def _impls(named: Sequence[str]) -> list[str]:
    """The implementations that are named, or all that can run here; auto is one of the others."""
    for name in named:
        if name not in impls.names():
            raise UserError(f"--impl {name}: unknown; accepted: {', '.join(impls.names())}")
    return list(named) or [n for n in impls.names() if n != "auto" and impls.unavailable(n) is None]


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.py", description=description)
    parser.add_argument("tables", nargs="*", metavar="TABLE", type=_one_of(TABLES), help=f"{', '.join(TABLES)}; all")
    what = parser.add_argument_group("what")
    what.add_argument("--impl", nargs="+", default=[], metavar="IMPL", help="default: all that run here")
    what.add_argument("--peers", action="store_true", help=f"also {', '.join(PEERS)}, where they are installed")
    what.add_argument("--shape", nargs="+", default=[], metavar="MxN", help="sizes of the named ops: 4096x50257, ...")
    what.add_argument("--size", nargs="+", default=[], type=int, help="sizes of copy, matmul and kernels")
    what.add_argument("--dtype", nargs="+", default=[], choices=list(DTYPES))
    what.add_argument("--approximate", nargs="+", default=[], choices=list(APPROXIMATE), help="kinds of GELU")
    what.add_argument("--direction", nargs="+", default=[], choices=list(DIRECTIONS))
    what.add_argument("--full", action="store_true", help="more cases: odd widths, larger sizes, both kinds of GELU")
    how = parser.add_argument_group("how")
    how.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    how.add_argument("--warm", action="store_true", help="leave the inputs in the caches; default: cold")
    how.add_argument("--rounds", type=int, default=3, help="turns of every candidate")
    how.add_argument("--settle", type=float, default=50.0, help="ms of running alone before measuring, on a GPU")
    how.add_argument("--rep", type=float, default=10.0, help="ms of measuring in each turn")
    how.add_argument("--seed", type=int, default=0, help="of tensors and of the order")
    how.add_argument("--calibration", type=Path, help="file for the predictions; see scripts/advise.py --calibrate")
    where = parser.add_argument_group("where")
    where.add_argument("--out", type=Path, help="folder for the record; default: profiles/runs/<date>/<time>-bench")
    where.add_argument("--no-plots", action="store_true")
    return parser


def _one_of(names: Sequence[str]):
    def known(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; accepted: {', '.join(names)}")
        return text

    return known
