"""Measures what several GPUs give, in training runs of experiment=gpt, one process group after another.

    python scripts/bench_distributed.py --out DIR --parts overhead             # one GPU: plain, DDP and FSDP2
    python scripts/bench_distributed.py --out DIR --parts scaling              # 1 and 2 GPUs, each impl
    python scripts/bench_distributed.py --out DIR --merge A/record.json B/record.json

Parts:
    overhead: trainer=default, ddp and fsdp on one GPU, in turns, --repeats times; the cost is that of the medians.
    scaling: DDP and FSDP2 on each number of --devices; tokens/s, efficiency, and from the trace of rank 0 how much of
        the GPU's time is communication, how much of that lies under other kernels, and how often the CPU waited.
    devices: every op on the second GPU while the first is current, forward and backward (a test of the suite).

DIR receives record.json, record.md, scaling.png and what each run left. Any override of train.py may follow, such as
data.batch_size=8. Exit code 1 if a run or a test failed.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
KEPT = ("result.json", "metrics.csv", "config.yaml", "train.log", "trace.json.gz")
GRACE_S = 90
SPEED = ("step_ms_median", "step_ms_p10", "step_ms_p90", "tokens_per_s", "tflops_per_s", "mfu_percent")
COLUMNS = (
    ("part", ""), ("trainer", ""), ("gpus", "d"), ("impl", ""), ("repeat", "d"), ("status", ""),
    ("step_ms_median", ".2f"), ("tokens_per_s", ",.0f"), ("mfu_percent", ".1f"), ("peak_gib", ".1f"),
    ("last_loss", ".3f"), ("cost_percent", "+.1f"), ("speedup", ".3f"), ("efficiency_percent", ".1f"),
    ("communication_percent", ".1f"), ("overlapped_percent", ".1f"), ("waits_per_step", ".1f"), ("wall_s", ".0f"),
)  # fmt: skip


def train(part: str, trainer: str, gpus: int, impl: str, repeat: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run in processes of its own, as a row; one that exceeds the time limit is ended with all of them."""
    name = f"{part}-{trainer}-{gpus}-{impl}-{repeat}"
    folder = options.out / name
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        "train.py", f"experiment={options.experiment}", f"impl={impl}", f"trainer={trainer}", f"trainer.devices={gpus}",
        f"trainer.max_steps={options.steps}", "trainer.log_every=10", "trainer.val_every=0", "trainer.warmup_steps=10",
        "trainer.checkpoint=false", "trainer.cuda_graph=false", "trainer.rank_timeout=120", "logger=none",
        f"hydra.run.dir={os.path.relpath(folder, ROOT)}",
    ]  # fmt: skip
    if part == "scaling":
        words += ["profile=torch", f"profile.wait={options.steps - 6}", "profile.active=3"]
    words += options.overrides
    print(f"{name}: {' '.join(words)}", flush=True)
    began = time.perf_counter()
    output = options.out / f"{name}.txt"
    code = run([sys.executable, *words], options.timeout, output)
    row: dict[str, Any] = {"part": part, "trainer": trainer, "gpus": gpus, "impl": impl, "repeat": repeat}
    row |= {"exit_code": code, "wall_s": time.perf_counter() - began} | read_run(folder)
    if code is None:
        row |= {"status": "ended", "reason": f"exceeded {options.timeout:.0f} s"}
    if row["status"] != "completed":
        print(f"{name}: {row['status']}: {row.get('reason')}\n{output.read_text()[-3000:]}", flush=True)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return row


def run(command: list[str], timeout: float, output: Path) -> int | None:
    """Exit code of a command whose output goes to a file; None if it had to be ended."""
    with open(output, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None


def read_run(folder: Path) -> dict[str, Any]:
    """The numbers of a run from its result.json and its trace; status "failed" if it left none."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError) as error:
        return {"status": "failed", "reason": f"left no readable result: {error}"}
    speed, trace = result.get("throughput") or {}, result.get("trace") or {}
    row = {
        "status": result["status"],
        "reason": result["reason"],
        "last_loss": result.get("final_train_loss"),
        **{key: speed.get(key) for key in SPEED},
        "peak_gib": result.get("peak_memory_gib"),
        "waits_per_step": trace.get("blocking_calls_per_step"),
        "gpu_busy_percent": trace.get("gpu_busy_percent"),
        "seconds": result.get("seconds"),
        "environment": result.get("environment"),
        "git": result.get("git"),
    }
    file = folder / "trace.json.gz"
    return row | communication(file) if file.exists() else row


def communication(file: Path) -> dict[str, float | None]:
    """Shares of a trace's GPU time: communication, what of it lies under other kernels, and what does not."""
    import numpy as np

    from fusedmlp.profiling import kinds, trace
    from fusedmlp.profiling.intervals import overlap, total, union

    gpu = trace.read(file).gpu
    if not len(gpu):
        return {}
    sent = np.array([kinds.kind_of(name) == kinds.COMMUNICATION for name in gpu.names])
    window = float(gpu.end.max() - gpu.start.min())
    ours, others = gpu[sent], gpu[~sent]
    spans = union(ours.start, ours.end)
    time_us = total(spans)
    under = float(np.sum(overlap(union(others.start, others.end), spans))) if time_us else 0.0
    return {
        "communication_percent": 100 * time_us / window,
        "overlapped_percent": 100 * under / time_us if time_us else None,
        "exposed_percent": 100 * (time_us - under) / window,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row what it costs over the plain trainer, or gains over one GPU."""

    def median(key: str, **wanted: Any) -> float | None:
        found = [row[key] for row in rows if row.get(key) and all(row[name] == value for name, value in wanted.items())]
        return statistics.median(found) if found else None

    for row in rows:
        if row["part"] == "overhead" and row.get("step_ms_median"):
            plain = median("step_ms_median", part="overhead", trainer="default", impl=row["impl"])
            mine = median("step_ms_median", part="overhead", trainer=row["trainer"], impl=row["impl"])
            if plain and mine and row["trainer"] != "default":
                row["cost_percent"] = 100 * (mine / plain - 1)
        if row["part"] == "scaling" and row.get("tokens_per_s"):
            one = median("tokens_per_s", part="scaling", trainer=row["trainer"], impl=row["impl"], gpus=1)
            if one:
                row["speedup"] = row["tokens_per_s"] / one
                row["efficiency_percent"] = 100 * row["speedup"] / row["gpus"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, aligned so that it reads in a terminal too; without the columns that nobody has."""
    columns = [(name, form) for name, form in COLUMNS if any(row.get(name) is not None for row in rows)]
    cells = [[name for name, _ in columns]]
    cells += [["-" if row.get(name) is None else format(row[name], form) for name, form in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |"
             for line in cells]  # fmt: skip
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


def write_record(out: Path, rows: list[dict[str, Any]], commands: list[str]) -> None:
    """record.json, record.md and scaling.png, rewritten after every run so that a stop loses nothing."""
    compare(rows)
    environment = next((row["environment"] for row in rows if row.get("environment")), {})
    git = next((row["git"] for row in rows if row.get("git")), {})
    record = {"commands": commands, "environment": environment, "git": git, "runs": rows}
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    names = ("gpu", "driver", "cuda", "torch", "triton", "lightning", "python", "platform")
    lines = ["# Several GPUs", "", *(f"    {command}" for command in commands), ""]
    lines += [f"- {name}: {environment.get(name)}" for name in names]
    lines += [f"- commit: {git.get('commit')}{' with changes' if git.get('dirty') else ''}", "", *table(rows), ""]
    lines += [f"- {row['part']}, {row['trainer']}, {row['gpus']}, {row['impl']}: {row['reason']}"
              for row in rows if row.get("reason")]  # fmt: skip
    lines += [
        "",
        "cost: median step over that of trainer=default. efficiency: tokens/s over gpus times those of one GPU under "
        "the same trainer. communication: share of the GPU's time in which a kernel of NCCL ran, in which it may have "
        "waited for the other GPU; overlapped: the part of that in which another kernel ran too. waits: calls in which "
        "the CPU waited for the GPU. Trace of rank 0, 3 steps. Peak memory of rank 0.",
    ]  # fmt: skip
    (out / "record.md").write_text("\n".join(lines) + "\n")
    plot(out, [row for row in rows if row["part"] == "scaling" and row.get("tokens_per_s")])


def plot(out: Path, rows: list[dict[str, Any]]) -> None:
    """scaling.png: tokens/s against the number of GPUs, a panel per trainer, a line per impl; dashed, twice as fast."""
    if not rows:
        return
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    trainers = list(dict.fromkeys(row["trainer"] for row in rows))
    figure, panels = plt.subplots(1, len(trainers), figsize=(5 * len(trainers), 4), squeeze=False, sharey=True)
    for panel, trainer in zip(panels[0], trainers, strict=True):
        for impl in dict.fromkeys(row["impl"] for row in rows if row["trainer"] == trainer):
            points = sorted((row["gpus"], row["tokens_per_s"]) for row in rows
                            if (row["trainer"], row["impl"]) == (trainer, impl))  # fmt: skip
            (line,) = panel.plot(*zip(*points, strict=True), "o-", label=impl)
            ideal = [(gpus, points[0][1] * gpus / points[0][0]) for gpus, _ in points]
            panel.plot(*zip(*ideal, strict=True), "--", color=line.get_color(), alpha=0.5)
        panel.set(title=f"trainer={trainer}", xlabel="GPUs", ylabel="tokens/s", ylim=(0, None))
        panel.set_xticks(sorted({row["gpus"] for row in rows}))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(out / "scaling.png", dpi=120)
    plt.close(figure)


def second_device(out: Path, timeout: float) -> dict[str, Any]:
    """The tests of all ops on a GPU that is not the current one, as a row."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "tests/impls/test_composition.py",
               "-k", "second_device"]  # fmt: skip
    code = run(command, timeout, out / "devices.txt")
    text = (out / "devices.txt").read_text()
    print(text[-1500:], flush=True)
    good = code == 0 and "PASSED" in text and "SKIPPED" not in text
    return {
        "part": "devices", "trainer": "-", "gpus": 2, "impl": "all", "repeat": 0, "exit_code": code,
        "status": "completed" if good else "failed", "reason": None if good else text.strip().splitlines()[-1],
        "wall_s": time.perf_counter() - began,
    }  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[str, str, int, str, int]]:
    runs: list[tuple[str, str, int, str, int]] = []
    if "overhead" in options.parts:
        # In turns, so that a card that drifts favours none.
        runs += [("overhead", trainer, 1, impl, repeat) for repeat in range(options.repeats)
                 for impl in options.impls for trainer in ("default", *options.trainers)]  # fmt: skip
    if "scaling" in options.parts:
        runs += [("scaling", trainer, gpus, impl, 0) for impl in options.impls for trainer in options.trainers
                 for gpus in options.devices]  # fmt: skip
    return runs


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--parts", type=words, default=[], help="overhead,scaling,devices")
    parser.add_argument("--impls", type=words, default=["native"])
    parser.add_argument("--trainers", type=words, default=["ddp", "fsdp"])
    parser.add_argument("--devices", type=lambda text: list(map(int, words(text))), default=[1, 2])
    parser.add_argument("--experiment", default="gpt")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240, help="seconds per run")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="records whose runs this one takes over")
    parser.add_argument("overrides", nargs="*", help="further overrides for train.py, such as data.batch_size=8")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - {"overhead", "scaling", "devices"}
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: accepted: overhead, scaling, devices")
    options.out = options.out.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    commands: list[str] = []
    for file in options.merge:
        record = json.loads(file.read_text())
        rows += record["runs"]
        commands += record["commands"]
    if options.parts:
        commands.append(" ".join(["python", "scripts/bench_distributed.py", *(arguments or sys.argv[1:])]))
    if "devices" in options.parts:
        rows.append(second_device(options.out, options.timeout))
        write_record(options.out, rows, commands)
    for settings in plan(options):
        rows.append(train(*settings, options))
        write_record(options.out, rows, commands)
    write_record(options.out, rows, commands)
    print("\n" + "\n".join(table(rows)))
    return 0 if all(row["status"] == "completed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
