"""Advice before a kernel is written: what bounds each op of a model, what fusing it can gain, and what to do.

    python scripts/advise.py --model gpt --dim 1024 --batch 16            # on this machine's GPU: measures too
    python scripts/advise.py --model mlp --dim 512 --card h100            # a prediction, no GPU needed
    python scripts/advise.py --op softmax --shape 4096x50257 --card a100
    python scripts/advise.py --calibrate RECORD/bench.json --out mine.json  # take the cost model's values from records

Times are of one training step. `fusedmlp.bench.advise` gives the same as an object. What the predictions rest on is
written in fusedmlp/bench/predict.py.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# Before PyTorch is imported: its profiler announces every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch

from fusedmlp import impls, streams
from fusedmlp.bench import advise, calibration
from fusedmlp.bench.cards import SHORT
from fusedmlp.bench.cases import DTYPES, SIZES, Case
from fusedmlp.bench.clock import Pace
from fusedmlp.bench.measure import Bench, measure_case
from fusedmlp.bench.models import MODELS
from fusedmlp.bench.traffic import static_uncached_compilation
from fusedmlp.errors import UserError

SIZE_NAMES = ("dim", "batch", "layers", "context", "heads", "vocab")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="advise.py", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", choices=list(MODELS), help="with the sizes below")
    what.add_argument("--op", choices=list(SIZES), help="with --shape")
    what.add_argument(
        "--calibrate", type=Path, metavar="RECORD", nargs="+",
        help="bench.json to take a calibration from; several of one kind of card count together",
    )  # fmt: skip
    parser.add_argument("--shape", help="of the op, for example 4096x50257")
    for name in SIZE_NAMES:
        defaults = ", ".join(f"{m} {model.defaults[name]}" for m, model in MODELS.items() if name in model.defaults)
        parser.add_argument(f"--{name}", type=int, help=f"default: {defaults}")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--approximate", default="tanh", choices=["none", "tanh"], help="kind of GELU")
    parser.add_argument("--card", help=f"predict for it: {', '.join(SHORT)}, or a whole name; default: the GPU here")
    parser.add_argument("--no-measure", action="store_true", help="predict only, though there is a GPU")
    parser.add_argument("--calibration", type=Path, help="values for the predictions: of --calibrate, or a bench.json")
    parser.add_argument("--out", type=Path, help="write JSON to this file")
    return parser.parse_args(arguments)


def measured_step_ms(case: Case) -> dict[str, float]:
    """Kernel ms of a training step by implementation, measured here."""
    names = [name for name in impls.names() if name != "auto" and impls.unavailable(name) is None]
    bench = Bench(torch.device("cuda"), Pace(), names, directions=("step",))
    with static_uncached_compilation():
        rows = measure_case(case, bench)
    torch.cuda.empty_cache()
    return {row["impl"]: row["ms"] for row in rows if row["ms"] is not None}


def calibrate(records: list[Path], out: Path | None) -> None:
    """Write the calibration that records give, with the built-in values for what they lack."""
    if out is None:
        raise UserError("--calibrate needs --out FILE to write the values to")
    found = calibration.from_records(records)
    entries = calibration.update(found, calibration.BUILT_IN)
    lacking = [f"for what is lacking there, {calibration.FILE.name} as it was before"] * (len(entries) > len(found))
    sources = [*map(str, records), *lacking]
    calibration.save(out, sources, entries)
    print(f"{len(entries)} values written to {out}; use them with --calibration {out}")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.calibrate:
            calibrate(args.calibrate, args.out)
            return 0
        entries = calibration.load(args.calibration) if args.calibration else calibration.BUILT_IN
        sizes = {name: getattr(args, name) for name in SIZE_NAMES if getattr(args, name) is not None}
        if args.model and args.shape:
            raise UserError(f"--shape belongs to an op; a model takes {', '.join(f'--{name}' for name in SIZE_NAMES)}")
        if sizes and args.op:
            raise UserError(f"--{next(iter(sizes))} belongs to a model; an op takes --shape")
        # Another card than the one here cannot be measured.
        here = torch.cuda.is_available() and args.card is None and not args.no_measure
        advice = advise(
            args.model, card=args.card, op=args.op, shape=args.shape, dtype=args.dtype, approximate=args.approximate,
            entries=entries, measure=measured_step_ms if here else None, **sizes,
        )  # fmt: skip
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(advice.text())
    if args.out:
        content = {"title": advice.title, "ops": advice.rows(), "step": advice.step}
        try:
            args.out.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"error: --out {args.out} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(streams.exit_code(main))
