"""Trains the big experiments for a few steps on this machine's GPU and writes a record of what came of it.

    python scripts/gpu_train_check.py --out profiles/records/2026-01-01-training
    python scripts/gpu_train_check.py --out DIR --impls native,compiled,triton --experiments lecture --steps 50

One process per run, one after another. The folder receives record.json, record.md, losses.png and, per run,
result.json, metrics.csv and the output. Exit code 1 if a run did not complete.
"""

import argparse
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 30
KEPT = ("result.json", "metrics.csv", "config.yaml", "train.log")
SPEED = ("step_ms_median", "step_ms_p10", "step_ms_p90", "tokens_per_s", "tflops_per_s", "mfu_percent")
COLUMNS = (
    ("experiment", ""),
    ("impl", ""),
    ("status", ""),
    ("first_loss", ".3f"),
    ("last_loss", ".3f"),
    ("val_loss", ".3f"),
    ("step_ms_median", ".2f"),
    ("step_ms_p10", ".2f"),
    ("step_ms_p90", ".2f"),
    ("tokens_per_s", ",.0f"),
    ("tflops_per_s", ".1f"),
    ("mfu_percent", ".1f"),
    ("peak_gib", ".1f"),
    ("wall_s", ".0f"),
)


def train(experiment: str, impl: str, steps: int, timeout: float, out: Path, extra: list[str]) -> dict[str, Any]:
    """One run in a process of its own; what it left, as a row. A run that exceeds `timeout` seconds is ended."""
    name = f"{experiment}-{impl}"
    folder, kept = out / "runs" / name, out / name
    shutil.rmtree(folder, ignore_errors=True)
    kept.mkdir(exist_ok=True)
    command = [
        "train.py", f"experiment={experiment}", f"impl={impl}", f"trainer.max_steps={steps}", "trainer.log_every=10",
        f"trainer.val_every={steps}", "trainer.warmup_steps=10", "trainer.checkpoint=false", "logger=none",
        f"hydra.run.dir={os.path.relpath(folder, ROOT)}", *extra,
    ]  # fmt: skip
    print(f"{name}: {' '.join(command)}", flush=True)
    began = time.perf_counter()
    exit_code = run([sys.executable, *command], timeout, kept / "output.txt")
    row: dict[str, Any] = {"experiment": experiment, "impl": impl, "exit_code": exit_code}
    row["wall_s"] = time.perf_counter() - began
    for file in KEPT:
        if (folder / file).exists():
            shutil.copy(folder / file, kept / file)
    row |= read_run(kept)
    if exit_code is None:
        row |= {"status": "ended", "reason": f"exceeded {timeout:.0f} s"}
    reason = f": {row['reason']}" if row.get("reason") else ""
    print(f"{name}: {row['status']}{reason}", flush=True)
    return row


def run(command: list[str], timeout: float, output: Path) -> int | None:
    """Exit code of a command whose output goes to a file; None if it had to be ended."""
    with open(output, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def read_run(folder: Path) -> dict[str, Any]:
    """The numbers of a run from its result.json and metrics.csv; status "failed" if it left none."""
    try:
        result = json.loads((folder / "result.json").read_text())
        losses = list(training_losses(folder / "metrics.csv").values())
    except (OSError, ValueError) as error:
        return {"status": "failed", "reason": f"left no readable result: {error}"}
    speed = result.get("throughput") or {}
    return {
        "status": result["status"],
        "reason": result["reason"],
        "impl_resolved": result.get("impl_resolved"),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "val_loss": result.get("final_val_loss"),
        **{key: speed.get(key) for key in SPEED},
        "peak_gib": result.get("peak_memory_gib"),
        "seconds": result.get("seconds"),
        "num_params": result.get("num_params"),
        "environment": result.get("environment"),
        "git": result.get("git"),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, aligned so that it reads in a terminal too."""
    cells = [[name for name, _ in COLUMNS]]
    for row in rows:
        cells.append(["-" if row.get(name) is None else format(row[name], form) for name, form in COLUMNS])
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]

    def line(texts: list[str]) -> str:
        return "| " + " | ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return [line(cells[0]), rule, *map(line, cells[1:])]


def write_record(out: Path, rows: list[dict[str, Any]], command: list[str]) -> None:
    """record.json and record.md, rewritten after every run so that a stop loses nothing."""
    environment = next((row["environment"] for row in rows if row.get("environment")), {})
    git = next((row["git"] for row in rows if row.get("git")), {})
    record = {"command": command, "environment": environment, "git": git, "runs": rows}
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    names = ("gpu", "driver", "cuda", "torch", "triton", "lightning", "python", "platform")
    lines = ["# Training on a GPU", "", f"`{' '.join(command)}`", ""]
    lines += [f"- {name}: {environment.get(name)}" for name in names]
    lines += [f"- commit: {git.get('commit')}{' with changes' if git.get('dirty') else ''}", "", *table(rows)]
    reasons = [f"- {row['experiment']}, {row['impl']}: {row['reason']}" for row in rows if row.get("reason")]
    (out / "record.md").write_text("\n".join([*lines, "", *reasons]) + "\n")


def plot_losses(out: Path, rows: list[dict[str, Any]]) -> None:
    """losses.png: training loss against step, one panel per experiment, one line per impl."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    experiments = list(dict.fromkeys(row["experiment"] for row in rows))
    figure, panels = plt.subplots(1, len(experiments), figsize=(6 * len(experiments), 4), squeeze=False)
    for panel, experiment in zip(panels[0], experiments, strict=True):
        impls = [row["impl"] for row in rows if row["experiment"] == experiment]
        for impl, style in zip(impls, itertools.cycle(("-", ":", "-.", "--"))):
            points = training_losses(out / f"{experiment}-{impl}" / "metrics.csv")
            panel.plot(points.keys(), points.values(), style, label=impl, linewidth=2, alpha=0.8)
        panel.set(title=experiment, xlabel="optimizer step", ylabel="training loss, nats per token")
        panel.legend()
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "losses.png", dpi=120)
    plt.close(figure)


def training_losses(metrics: Path) -> dict[int, float]:
    """Step -> training loss of a metrics.csv; empty if there is none."""
    if not metrics.exists():
        return {}
    with open(metrics, newline="") as file:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--impls", default="native,compiled")
    parser.add_argument("--experiments", default="lecture,gpt")
    parser.add_argument("--steps", type=at_least(1), default=50)
    parser.add_argument("--timeout", type=float, default=300, help="seconds per run")
    parser.add_argument("overrides", nargs="*", help="further overrides for train.py, such as dim=256")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for experiment in options.experiments.split(","):
        for impl in options.impls.split(","):
            rows.append(train(experiment, impl, options.steps, options.timeout, out, options.overrides))
            write_record(out, rows, ["python", "scripts/gpu_train_check.py", *sys.argv[1:]])
            plot_losses(out, rows)
    shutil.rmtree(out / "runs", ignore_errors=True)
    print("\n" + "\n".join(table(rows)))
    return 0 if all(row["status"] == "completed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
