"""The four tables: GELU, softmax, Linear+GELU and MLP, every implementation side by side, in one run on one GPU.

    python scripts/bench_tables.py --out profiles/records/2026-01-01-h200-tables

Correctness first, then times. What each table holds, and further options, are in the two scripts that this one calls,
`bench_ops.py` and `bench_gemm.py`; each writes its part to --out as it goes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--impl", nargs="*", default=["manual", "native", "compiled", "triton"])
    parser.add_argument("--quick", action="store_true", help="a gate in bf16 alone, and shorter measurements")
    args = parser.parse_args()
    quick_ops = ["--rounds", "2", "--rep", "15"] if args.quick else []
    quick_gemm = ["--gate", "bfloat16", "--rounds", "2", "--settle", "40", "--rep", "15"] if args.quick else []
    others = ",".join(name for name in args.impl if name != "triton")
    commands = (
        ["bench_ops.py", "--out", str(args.out), "--impl", *args.impl, *quick_ops],
        ["bench_gemm.py", "--out", str(args.out), "--impls", others, *quick_gemm],
    )
    # One after the other, in processes of their own: what one compiles or allocates is nothing to the other's times.
    return max(subprocess.run([sys.executable, str(FOLDER / name), *rest]).returncode for name, *rest in commands)


if __name__ == "__main__":
    sys.exit(main())
