"""Traces the big experiments on this machine's GPU and writes a record of what the traces say.

    python scripts/gpu_trace_check.py --out profiles/records/2026-01-01-traces
    python scripts/gpu_trace_check.py --out DIR --parts traces,nsys --impls native,triton --experiments lecture

Parts: `traces` (profile=torch for every experiment and impl, analysed, and each impl compared with the first), `graph`
(the first of them with step capture), `nsys` (once more under Nsight Systems; its kernel times against ours),
`overhead` (steps before and after a window, beside a run without profiler), `demo` (experiment=sync_demo with and
without reading the loss).
One process per run. The folder receives record.md, record.json, up to five pictures, nsys-stats.txt, and traces.tar.gz
with small traces, kernel tables and results. Exit code 1 if a run failed or was left out.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fusedmlp.errors import UserError  # noqa: E402
from fusedmlp.profiling import compare, cut, nsight, nsys_stats, picture, report, trace  # noqa: E402

PARTS = ("traces", "graph", "nsys", "overhead", "demo")
CAN_CAPTURE = "cuda_graph" in (ROOT / "configs" / "trainer" / "default.yaml").read_text()
EAGER, CAPTURED = (f"trainer.cuda_graph={value}" for value in ("false", "true"))
WAIT, WARMUP, ACTIVE, AFTER = 30, 3, 5, 12
CUT_STEPS = 3
QUIET = ("logger=none", "trainer.checkpoint=false", "trainer.val_every=0", "trainer.warmup_steps=10",
         *([EAGER] if CAN_CAPTURE else []))  # fmt: skip
KEPT = ("result.json", "kernels.csv", "metrics.csv", "config.yaml")


class Check:
    """What is common to the parts: where things go, how much time is left, the record so far."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.out: Path = options.out.resolve()
        self.work = self.out / "work"
        self.kept = self.work / "kept"
        self.kept.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        words = ["DIR" if Path(word) == options.out else word for word in sys.argv[1:]]
        self.record: dict[str, Any] = {"command": ["python", "scripts/gpu_trace_check.py", *words], "runs": {}}
        self.sections: list[str] = []
        self.failed = False

    def train(self, name: str, *overrides: str, **environment: str) -> Path | None:
        """One run of train.py; its directory, or None if it did not complete or there was no time for it."""
        folder = self.work / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        left = self.options.budget - (time.monotonic() - self.began)
        row: dict[str, Any] = {"overrides": overrides}
        self.record["runs"][name] = row
        if left < 10:
            return self._lost(name, row, "left out: the time was up")
        words = (*self.options.overrides, *QUIET, *overrides, f"hydra.run.dir={os.path.relpath(folder, ROOT)}")
        command = [sys.executable, "train.py", *words]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        try:
            with open(self.kept / f"{name}.txt", "w") as output:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment,
                    timeout=min(left, self.options.timeout),
                ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return self._lost(name, row, "ended: it took too long")
        row |= {"exit_code": code, "wall_s": round(time.monotonic() - began, 1)}
        found = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        row |= {key: found.get(key) for key in ("status", "reason", "trace", "throughput")}
        self.record.setdefault("environment", found.get("environment"))
        self.record.setdefault("git", found.get("git"))
        for file in KEPT:
            if (folder / file).exists():
                shutil.copy(folder / file, self.kept / f"{name}.{file}")
        if row["status"] != "completed":
            return self._lost(name, row, row["reason"] or f"exit code {code}")
        print(f"{name}: {row['wall_s']} s; {(row['trace'] or {}).get('sentence', 'no trace')}", flush=True)
        return folder

    def _lost(self, name: str, row: dict[str, Any], reason: str) -> None:
        self.failed = True
        row |= {"status": row.get("status") or "failed", "reason": reason}
        self.sections.append(f"## {name}\n\n{reason}")
        print(f"{name}: {reason}", flush=True)

    def section(self, title: str, lines: list[str]) -> None:
        """Adds to the record and writes it, so that a stop loses nothing."""
        self.sections.append(f"## {title}\n\n```\n" + "\n".join(lines) + "\n```")
        self.write()

    def write(self) -> None:
        environment, git = self.record.get("environment") or {}, self.record.get("git") or {}
        facts = [
            f"- {name}: {environment.get(name)}" for name in ("gpu", "driver", "cuda", "torch", "triton", "python")
        ]
        facts.append(f"- commit: {git.get('commit')}{' with changes' if git.get('dirty') else ''}")
        head = ["# What traces say", "", f"`{' '.join(self.record['command'])}`", "", *facts, ""]
        self.keep_text("record.md", "\n".join(head) + "\n" + "\n\n".join(self.sections))
        self.keep_text("record.json", json.dumps(self.record, indent=1, default=str))

    def keep_text(self, file: str, text: str) -> None:
        """Writes a file of the record, in which this machine's folders have no place."""
        for folder, name in ((f"{self.work / 'runs'}/", ""), (str(self.out), "DIR")):
            text = text.replace(folder, name)
        (self.out / file).write_text(text + "\n")

    def keep_trace(self, name: str, folder: Path) -> None:
        """A small trace for the archive; the whole one if asked for."""
        cut.cut(folder / trace.FILE, self.kept / f"{name}.json.gz", CUT_STEPS)
        if self.options.whole:
            shutil.copy(folder / trace.FILE, self.kept / f"{name}.whole.json.gz")


def window(tool: str, wait: int = WAIT, after: int = AFTER) -> list[str]:
    steps = wait + WARMUP + ACTIVE + after
    return [
        f"profile={tool}", f"profile.wait={wait}", f"profile.warmup={WARMUP}", f"profile.active={ACTIVE}",
        f"trainer.max_steps={steps}", "trainer.log_every=10",
    ]  # fmt: skip


def traces(check: Check) -> None:
    for experiment in check.options.experiments:
        first = None
        for impl in check.options.impls:
            name = f"{experiment}-{impl}"
            folder = check.train(name, f"experiment={experiment}", f"impl={impl}", *window("torch"))
            if folder is None:
                continue
            check.keep_trace(name, folder)
            analysis = report.analyse_file(folder)
            check.section(f"{experiment}, {impl}", report.lines(analysis, 15))
            if first is None:
                first = (impl, analysis)
                target, title = check.out / f"{experiment}.png", f"{experiment}, {impl}"
                picture.draw(trace.read(folder / trace.FILE), target, 1, title, report.step_ms_of_run(folder))
            else:
                check.section(
                    f"{experiment}: {first[0]} and {impl}", compare.lines(first[1], analysis, (first[0], impl), 20)
                )


def graph(check: Check) -> None:
    """The first experiment and impl with the whole step in a CUDA graph, against the same without."""
    experiment, impl = check.options.experiments[0], check.options.impls[0]
    if not CAN_CAPTURE:
        return
    name = f"{experiment}-{impl}-graph"
    folder = check.train(name, f"experiment={experiment}", f"impl={impl}", *window("torch"), CAPTURED)
    if folder is None:
        return
    check.keep_trace(name, folder)
    analysis, eager = report.analyse_file(folder), check.work / "runs" / f"{experiment}-{impl}"
    check.section(f"{experiment}, {impl}, captured", report.lines(analysis, 15))
    target, title = check.out / f"{experiment}-graph.png", f"{experiment}, {impl}, captured"
    picture.draw(trace.read(folder / trace.FILE), target, 1, title, report.step_ms_of_run(folder))
    if (eager / trace.FILE).exists():
        names = ("eager", "captured")
        check.section(f"{experiment}: captured", compare.lines(report.analyse_file(eager), analysis, names, 5))


def demo(check: Check) -> None:
    analyses = {}
    for name, reads in (("ahead", "false"), ("sync", "true")):
        folder = check.train(
            f"demo-{name}", "experiment=sync_demo", f"trainer.read_loss_every_step={reads}", *window("torch")
        )
        if folder is not None:
            check.keep_trace(f"demo-{name}", folder)
            analyses[name] = report.analyse_file(folder)
            title = f"the loss is {'read in every step' if name == 'sync' else 'not read'}"
            picture.draw(
                trace.read(folder / trace.FILE), check.out / f"demo-{name}.png", 3, title, report.step_ms_of_run(folder)
            )
    if len(analyses) == 2:
        names = ("loss not read", "loss read in every step")
        check.section("sync_demo", compare.lines(analyses["ahead"], analyses["sync"], names, 5))


def overhead(check: Check) -> None:
    """Median step before and after the window, against the same steps of a run without profiler."""
    experiment, impl = check.options.experiments[0], check.options.impls[0]
    # Kineto can take CUPTI out of the process when it is done; by default it leaves it in.
    variants: dict[str, tuple[str, dict[str, str]]] = {
        "none": ("none", {}), "torch": ("torch", {}), "torch-teardown": ("torch", {"TEARDOWN_CUPTI": "1"})
    }  # fmt: skip
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    lines = []
    for turn in range(check.options.turns):
        for name, (tool, environment) in variants.items():
            wanted = [f"experiment={experiment}", f"impl={impl}", *window(tool, wait=97, after=105)]
            folder = check.train(f"overhead-{name}-{turn}", *wanted, **environment)
            if folder is not None:
                before, after = halves(folder / "metrics.csv")
                ratios[name].append(after / before)
                lines.append(f"{name:14} steps 31 to 90: {before:.3f} ms, steps 121 to 210: {after:.3f} ms")
    for name in ("torch", "torch-teardown"):
        if ratios[name] and ratios["none"]:
            percent = 100 * (statistics.median(ratios[name]) / statistics.median(ratios["none"]) - 1)
            check.record[f"overhead_percent_after_window_{name}"] = percent
            lines.append(f"{name}: after the window against before it, relative to a run without: {percent:+.2f} %")
    cost = cost_of_ranges_when_off_us()
    check.record["ranges_off_us_per_step"] = cost
    lines.append(f"ranges when no window is open: {cost:.2f} us a step (three empty contexts)")
    check.section(f"Overhead, {experiment}, {impl}", lines)


def halves(metrics: Path) -> tuple[float, float]:
    """Median of the steps' medians in the intervals that lie well before and well after the window of `overhead`."""
    with open(metrics, newline="") as file:
        rows = [(int(row["step"]), float(row["time/step_ms"])) for row in csv.DictReader(file) if row["time/step_ms"]]
    before = [ms for step, ms in rows if 40 <= step <= 90]
    return statistics.median(before), statistics.median(ms for step, ms in rows if 130 <= step <= 210)


def cost_of_ranges_when_off_us(steps: int = 100_000) -> float:
    from fusedmlp.profiling.ranges import no_range

    began = time.perf_counter()
    for _ in range(steps):
        for name in ("forward", "backward", "optimizer"):
            with no_range(name):
                pass
    return 1e6 * (time.perf_counter() - began) / steps


def nsys(check: Check) -> None:
    experiment, impl = check.options.experiments[0], check.options.impls[0]
    executable = nsight.find("nsys")
    if executable is None:
        check.failed = True
        check.section("nsys", ["not found on this machine"])
        return
    name = f"nsys-{experiment}-{impl}"
    folder = check.train(name, f"experiment={experiment}", f"impl={impl}", *window("nsys"))
    if folder is None:
        return
    found, lines = folder / "trace.nsys-rep", [executable, output([executable, "--version"])]
    if not found.exists():
        lines += import_by_hand(folder)
    for left in sorted(folder.glob("trace.*")):
        lines.append(f"{left.name}: {left.stat().st_size / 2**20:.1f} MiB")
        if left.stat().st_size < 24 * 2**20:
            shutil.copy(left, check.kept / f"{name}{left.suffix}")
    if found.exists():
        text = output([executable, "stats", *nsys_stats.REPORTS, str(found)])
        check.keep_text("nsys-stats.txt", text)
        lines += agreement(check, text, experiment, impl)
    check.failed |= not found.exists()
    check.section("nsys", lines)


def import_by_hand(folder: Path) -> list[str]:
    """Where nsys itself made no report of its recording: with an importer, if this machine has one anywhere."""
    listed = output(["find", "/opt/nvidia", "/usr/local", "/usr/lib", "-name", "QdstrmImporter*", "-type", "f"])
    importers = [line for line in listed.splitlines() if line.startswith("/") and os.access(line, os.X_OK)]
    lines = [f"nsys left no report; importers on this machine: {', '.join(importers) or 'none'}"]
    if importers and (folder / "trace.qdstrm").exists():
        lines.append(output([importers[0], "--input-file", str(folder / "trace.qdstrm")]))
    return lines


def output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def agreement(check: Check, text: str, experiment: str, impl: str) -> list[str]:
    """Kernels and their time per step: nsys against the trace of the same experiment and impl."""
    theirs, folder = nsys_stats.kernel_sum(text, ACTIVE), check.work / "runs" / f"{experiment}-{impl}"
    if theirs is None or not (folder / trace.FILE).exists():
        return ["nothing to compare: the part traces did not run, or nsys stats printed no table of kernels"]
    ours = nsys_stats.kernels_of(report.analyse_file(folder))
    check.record["nsys_agreement"] = {"ours": asdict(ours), "nsys": asdict(theirs)}
    return [
        f"kernels per step: {ours.count:.1f} in our trace, {theirs.count:.1f} in nsys stats",
        f"their time per step: {ours.ms:.3f} ms in our trace, {theirs.ms:.3f} ms in nsys stats: "
        f"{100 * (ours.ms / theirs.ms - 1):+.2f} %",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--impls", default="native,manual,compiled,triton,cuda")
    parser.add_argument("--experiments", default="lecture,gpt")
    parser.add_argument("--turns", type=int, default=2, help="pairs of runs that measure the overhead")
    parser.add_argument("--timeout", type=float, default=150, help="seconds per run")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all; what does not fit is left out")
    parser.add_argument("--whole", action="store_true", help="keep the whole traces too")
    parser.add_argument("overrides", nargs="*", help="further overrides for train.py, such as dim=256")
    options = parser.parse_args()
    options.impls, options.experiments = options.impls.split(","), options.experiments.split(",")
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    check = Check(options)
    for part in PARTS:
        if part in options.parts.split(","):
            try:
                globals()[part](check)
            except UserError as error:
                check.failed = True
                check.section(part, [f"error: {error}"])
    check.write()
    with tarfile.open(check.out / "traces.tar.gz", "w:gz") as archive:
        archive.add(check.kept, "traces")
    shutil.rmtree(check.work)
    print((check.out / "record.md").read_text())
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
