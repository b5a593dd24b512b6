"""Our training loop against a bare one, step capture, and what logging costs, on this machine's GPU.

    python scripts/bench_loop.py --out profiles/records/2026-01-01-loop
    python scripts/bench_loop.py --out DIR --parts overhead --dims 512 --turns 20
    python scripts/bench_loop.py --out DIR --parts lecture losses --impls native compiled

Parts: overhead (ours against the loop of bare_loop.py, eager and captured), logging (every step against never), lecture
(every impl captured, beside its limits), losses (captured against not, same seed). All on experiment=lecture: 64 x
Linear+GELU, batch 1024, bf16. Candidates take turns in one process; what they leave on the GPU, in TorchDynamo and in
the garbage is cleared between runs. A correctness gate comes first: both loops, captured and not, must have the same
losses. Writes loop.json, loop.md and losses.png; exit code 1 if the gate or a part fails.
"""

import argparse
import contextlib
import csv
import faulthandler
import gc
import itertools
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arguments import at_least, needs_gpu
from bare_loop import BareLoop, gemms_alone, optimizer_alone
from gate_loop import gate
from hydra import compose, initialize_config_dir
from loop_turns import BLOCK, TURN, compared, cost_of_logging, in_turns, logged_in_turns
from omegaconf import OmegaConf

from fusedmlp import impls
from fusedmlp.impls import compiled
from fusedmlp.profiling import timing
from fusedmlp.training.cli import register_impls
from fusedmlp.training.run import run

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("overhead", "logging", "lecture", "losses")
COMMON = ("experiment=lecture", "data=synthetic", "logger=none", "trainer.checkpoint=false", "trainer.val_every=0",
          "trainer.warmup_steps=10")  # fmt: skip

Row = dict[str, Any]


class Bench:
    """Runs trainings in this process and keeps what they took."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.tables: dict[str, list[Row]] = {}
        torch._dynamo.config.automatic_dynamic_shapes = False
        register_impls()

    def config(self, *overrides: str) -> Any:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            return compose("train", [*COMMON, *self.options.overrides, *overrides])

    def ours(self, *overrides: str) -> Row:
        """One training with our loop: its result.json, and "losses", step -> loss."""
        self.clear()
        folder = self.out / "runs" / "run"
        shutil.rmtree(folder, ignore_errors=True)
        with open(self.out / "console.txt", "a") as console, contextlib.redirect_stdout(console):
            result, ending = run(self.config(*overrides), folder, list(overrides))
        if ending.status != "completed":
            raise RuntimeError(f"{' '.join(overrides)}: {ending.status}: {ending.reason}")
        with open(folder / "metrics.csv", newline="") as file:
            losses = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
        return result.fields | {"losses": losses}

    def bare(self, captured: bool, *overrides: str) -> BareLoop:
        self.clear()
        config = OmegaConf.to_container(self.config(*overrides), resolve=True)
        return BareLoop(config, captured, self.device)  # type: ignore[arg-type]

    def clear(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        compiled.forget()

    def write(self) -> None:
        timing.write_record(self.out, "loop", self.tables, {"steps": self.options.steps})


def overhead(bench: Bench) -> None:
    """Ours against bare in turns of a few steps, eager and captured, for every dim, with PyTorch's AdamW and with what
    trainer.adamw=auto picks; the bare loop has PyTorch's.

    A second bare loop takes turns too: its ratio to the first says what a ratio of two equal loops is worth.
    """
    rows: list[Row] = []
    bench.tables["overhead over a bare loop"] = rows
    steps = BLOCK * (bench.options.turns + 1)
    # Kind by kind, so that what ends the process in one of them leaves the others.
    for loop, dim, adamw in itertools.product(bench.options.loops, bench.options.dims, bench.options.adamw):
        captured = loop == "captured"
        others = [bench.bare(captured, "impl=native", f"dim={dim}") for _ in range(2)]
        words = ("impl=native", f"dim={dim}", f"trainer.max_steps={steps}", "trainer.log_every=10",
                 f"trainer.cuda_graph={str(captured).lower()}", f"trainer.adamw={adamw}")  # fmt: skip
        turns = in_turns(partial(bench.ours, *words), others, bench.device)
        del others
        row = {"dim": dim, "loop": loop, "adamw": adamw, "turns": len(turns)}
        rows.append(row | compared(turns) | {"goal %": 2 if captured else 5})
        bench.write()


def logging(bench: Bench) -> None:
    """Every step logged against none, in turns within one run, eager and captured, for every dim."""
    rows: list[Row] = []
    bench.tables["logging every step against never"] = rows
    steps = TURN * (bench.options.turns + 1) + 1
    for loop, dim in itertools.product(bench.options.loops, bench.options.dims):
        words = ("impl=native", f"dim={dim}", f"trainer.max_steps={steps}", f"trainer.log_every={steps}",
                 f"trainer.cuda_graph={str(loop == 'captured').lower()}")  # fmt: skip
        turns = logged_in_turns(partial(bench.ours, *words))
        cost = cost_of_logging(turns, host_bound=loop == "eager")
        rows.append({"dim": dim, "loop": loop, "turns": len(turns)} | cost | {"goal %": 1})
        bench.write()


def lecture(bench: Bench) -> None:
    """Every impl with a captured step, beside what its GEMMs and its optimizer alone take."""
    rows: list[Row] = []
    bench.tables["experiment=lecture trainer.cuda_graph=true"] = rows
    for dim in bench.options.dims:
        loop = bench.bare(True, "impl=native", f"dim={dim}")
        limits = {
            "GEMMs alone ms": gemms_alone(dim, 64, 1024, bench.device),
            "AdamW alone ms": optimizer_alone(loop, "triton"),
        }
        native = optimizer_alone(loop, "native")
        del loop
        for impl in bench.options.impls:
            row: Row = {"dim": dim, "impl": impl, "ms": None, "p10, p90": None, **limits, "share of both": None,
                        "PyTorch's AdamW alone ms": native, "first steps s": None, "peak GiB": None,
                        "note": ""}  # fmt: skip
            rows.append(row)
            row |= attempt(lambda impl=impl, dim=dim: _lecture_run(bench, impl, dim))
            if row["ms"]:
                row["share of both"] = sum(limits.values()) / row["ms"]
        bench.write()


def _lecture_run(bench: Bench, impl: str, dim: int) -> Row:
    found = bench.ours(
        f"impl={impl}", f"dim={dim}", f"trainer.max_steps={bench.options.steps}", "trainer.log_every=20",
        "trainer.cuda_graph=true",
    )  # fmt: skip
    speed = found["throughput"]
    return {
        "ms": speed["step_ms_median"], "p10, p90": f"{speed['step_ms_p10']:.2f}, {speed['step_ms_p90']:.2f}",
        "first steps s": found["seconds"]["first_steps"], "peak GiB": found["peak_memory_gib"],
    }  # fmt: skip


def losses(bench: Bench) -> None:
    """Losses of every step with and without capture, same seed, and a plot of both and of their difference.

    On text: on random bytes there is nothing to learn, and all curves are alike.
    """
    rows: list[Row] = []
    bench.tables["losses over 200 steps, captured against not"] = rows
    curves: dict[str, tuple[dict[int, float], dict[int, float]]] = {}
    for impl in bench.options.impls:
        row: Row = {"impl": impl, "dim": 512, "first loss": None, "last loss": None, "last, captured": None,
                    "largest difference": None, "equal steps": None, "largest from the first impl": None,
                    "note": ""}  # fmt: skip
        rows.append(row)
        pair: list[dict[int, float]] = []
        row |= attempt(lambda impl=impl, pair=pair: _losses_run(bench, impl, pair))
        if len(pair) == 2:
            curves[impl] = pair[0], pair[1]
            first = next(iter(curves.values()))[0]
            row["largest from the first impl"] = max(abs(pair[0][step] - first[step]) for step in first)
        bench.write()
        plot(bench.out / "losses.png", curves)


def _losses_run(bench: Bench, impl: str, pair: list[dict[int, float]]) -> Row:
    for captured in ("false", "true"):
        found = bench.ours(
            f"impl={impl}",
            "dim=512",
            "data=stdlib",
            "trainer.max_steps=200",
            "trainer.log_every=1",
            f"trainer.cuda_graph={captured}",
        )
        pair.append(found["losses"])
    eager, replayed = pair
    differences = [abs(eager[step] - replayed[step]) for step in eager]
    return {
        "first loss": eager[1], "last loss": eager[200], "last, captured": replayed[200],
        "largest difference": max(differences), "equal steps": sum(difference == 0 for difference in differences),
    }  # fmt: skip


def attempt(measure: Callable[[], Row]) -> Row:
    """What `measure` gives, or a note of why it could not: the other impls go on."""
    try:
        return measure()
    except RuntimeError as error:
        return {"note": " ".join(str(error).split())[:160]}


def plot(path: Path, curves: dict[str, tuple[dict[int, float], dict[int, float]]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    for impl, (eager, replayed) in curves.items():
        (line,) = above.plot(eager.keys(), eager.values(), label=f"{impl}, eager", linewidth=2, alpha=0.5)
        above.plot(replayed.keys(), replayed.values(), "--", color=line.get_color(), label=f"{impl}, captured")
        below.plot(eager.keys(), [abs(eager[step] - replayed[step]) for step in eager], color=line.get_color())
    above.set(ylabel="training loss, nats per token", title="experiment=lecture, dim 512: the step captured and not")
    below.set(xlabel="optimizer step", ylabel="difference, nats")
    above.legend(ncols=2)
    for panel in (above, below):
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    runnable = [name for name in impls.names() if impls.unavailable(name) is None and name != "auto"]
    parser.add_argument("--impls", nargs="+", default=runnable)
    parser.add_argument("--dims", nargs="+", type=at_least(1), default=[512, 1024, 2048])
    parser.add_argument("--steps", type=at_least(5), default=100, help="optimizer steps per run")
    parser.add_argument("--turns", type=at_least(2), default=12,
                        help=f"of {BLOCK} steps in the part overhead, of {TURN} in logging")  # fmt: skip
    parser.add_argument("--loops", nargs="+", choices=("eager", "captured"), default=["eager", "captured"],
                        help="of the parts overhead and logging")  # fmt: skip
    parser.add_argument("--adamw", nargs="+", choices=("native", "auto"), default=["native", "auto"],
                        help="of the part overhead")  # fmt: skip
    parser.add_argument("--overrides", nargs="*", default=[], help="further overrides, such as model.num_layers=8")
    options = parser.parse_args()
    needs_gpu(parser)
    faulthandler.enable()
    bench = Bench(options)
    if not gate(bench):
        bench.write()
        print(timing.markdown_table(bench.tables[next(iter(bench.tables))]))
        print("the loops do not train alike; nothing was measured", file=sys.stderr)
        return 1
    failed = []
    for part in options.parts:
        try:
            globals()[part](bench)
        except Exception:
            # What the other parts measure is not lost for it.
            failed.append(part)
            traceback.print_exc()
        bench.write()
    shutil.rmtree(bench.out / "runs", ignore_errors=True)
    for title, rows in bench.tables.items():
        print(f"\n{title}\n\n{timing.markdown_table(rows)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
