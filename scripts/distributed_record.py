"""The record of bench_distributed.py: what the runs' traces say of communication, comparisons, table and plot."""

import json
import statistics
from pathlib import Path
from typing import Any

COLUMNS = (
    ("part", ""), ("trainer", ""), ("gpus", "d"), ("impl", ""), ("repeat", "d"), ("status", ""),
    ("step_ms_median", ".2f"), ("tokens_per_s", ",.0f"), ("mfu_percent", ".1f"), ("peak_gib", ".1f"),
    ("last_loss", ".3f"), ("cost_percent", "+.1f"), ("speedup", ".3f"), ("efficiency_percent", ".1f"),
    ("communication_percent", ".1f"), ("overlapped_percent", ".1f"), ("waits_per_step", ".1f"), ("wall_s", ".0f"),
)  # fmt: skip


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

    completed = [row for row in rows if row["status"] == "completed"]

    def median(key: str, **wanted: Any) -> float | None:
        found = [row[key] for row in completed if row.get(key) and wanted.items() <= row.items()]
        return statistics.median(found) if found else None

    for row in completed:
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
        "the CPU waited for the GPU. Trace of rank 0, 3 steps. Peak memory of rank 0. wall: from when its processes, "
        "which may have imported before, were let go.",
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
