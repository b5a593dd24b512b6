"""Traces the big experiments on this machine's GPU and writes a record of what the traces say.

    python scripts/gpu_trace_check.py --out profiles/records/2026-01-01-traces
    python scripts/gpu_trace_check.py --out DIR --parts traces,nsys --impls native,triton --experiments lecture

Parts: `traces` (profile=torch for every experiment and impl, analysed, and each impl compared with the first), `graph`
(the first of them with step capture), `nsys` (once more under Nsight Systems; its kernel times against ours, which
leave out what Triton kernels wait that are launched early: FUSEDMLP_PDL=0 for equal ones),
`overhead` (steps before and after a window, beside a run without profiler), `demo` (experiment=sync_demo with and
without reading the loss).
One process per run; while one trains, those of the next --preload runs of its part import what they need. The folder
receives record.md, record.json, up to five pictures, nsys-stats.txt, and traces.tar.gz with small traces, kernel tables
and results. Exit code 1 if a run failed or was left out.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments import at_least  # noqa: E402
from trace_overhead import overhead  # noqa: E402, F401 - a part
from trace_runs import ACTIVE, Check, InTurn, Wanted, choice, window  # noqa: E402

from fusedmlp.errors import UserError  # noqa: E402
from fusedmlp.profiling import compare, nsight, nsys_stats, report, trace  # noqa: E402
from fusedmlp.signals import Signals  # noqa: E402

PARTS = ("traces", "graph", "nsys", "overhead", "demo")


def traces(check: Check) -> None:
    names = [(experiment, impl) for experiment in check.options.experiments for impl in check.options.impls]
    wanted = [Wanted("-".join(both), (*choice(*both), *window("torch"))) for both in names]
    first: dict[str, tuple[str, Any]] = {}

    def take(both: tuple[str, str], analysis: Any) -> None:
        experiment, impl = both
        if isinstance(analysis, UserError):
            check.failed = True
            return check.section(f"{experiment}, {impl}", [f"error: {analysis}"])
        check.section(f"{experiment}, {impl}", report.lines(analysis, 15))
        before, reference = first.setdefault(experiment, (impl, analysis))
        if before != impl:
            title = f"{experiment}: {before} and {impl}"
            check.section(title, compare.lines(reference, analysis, (before, impl), 20))
        return None

    drawn: set[str] = set()
    with InTurn(take) as analyses:
        for both, (name, folder) in zip(names, check.train(wanted), strict=True):
            if folder is not None:
                # One picture per experiment.
                analyses.add(both, analyse, check, name, folder, None if both[0] in drawn else f"{both[0]}.png")
                drawn.add(both[0])


def analyse(check: Check, name: str, folder: Path, image: str | None) -> Any:
    """What a run's trace says, or why it says nothing; a part of it is kept, and a picture made if that has a name."""
    try:
        check.keep_trace(name, folder)
        if image is not None:
            check.draw(image, folder, 1, name.replace("-", ", "))
        return report.analyse_file(folder)
    except UserError as error:
        return error


def graph(check: Check) -> None:
    """The first experiment and impl with the whole step in a CUDA graph, against the same without."""
    experiment, impl = check.options.experiments[0], check.options.impls[0]
    overrides = (*choice(experiment, impl), *window("torch"), "trainer.cuda_graph=true")
    for name, folder in check.train([Wanted(f"{experiment}-{impl}-graph", overrides)]):
        if folder is None:
            return
        check.keep_trace(name, folder)
        analysis, eager = report.analyse_file(folder), check.work / "runs" / f"{experiment}-{impl}"
        check.section(f"{experiment}, {impl}, captured", report.lines(analysis, 15))
        check.draw(f"{experiment}-graph.png", folder, 1, f"{experiment}, {impl}, captured")
        if (eager / trace.FILE).exists():
            names = ("eager", "captured")
            check.section(f"{experiment}: captured", compare.lines(report.analyse_file(eager), analysis, names, 5))


def demo(check: Check) -> None:
    analyses = {}
    overrides = {
        name: ("experiment=sync_demo", f"trainer.read_loss_every_step={reads}", *window("torch"))
        for name, reads in (("demo-ahead", "false"), ("demo-sync", "true"))
    }
    for name, folder in check.train([Wanted(*both) for both in overrides.items()]):
        if folder is not None:
            check.keep_trace(name, folder)
            analyses[name] = report.analyse_file(folder)
            title = f"the loss is {'read in every step' if name == 'demo-sync' else 'not read'}"
            check.draw(f"{name}.png", folder, 3, title)
    if len(analyses) == 2:
        names = ("loss not read", "loss read in every step")
        check.section("sync_demo", compare.lines(analyses["demo-ahead"], analyses["demo-sync"], names, 5))


def nsys(check: Check) -> None:
    experiment, impl = check.options.experiments[0], check.options.impls[0]
    executable = nsight.find("nsys")
    if executable is None:
        check.failed = True
        check.section("nsys", ["not found on this machine"])
        return
    name = f"nsys-{experiment}-{impl}"
    # nsys starts the run itself: what it imports cannot be done before.
    ((_, folder),) = check.train([Wanted(name, (*choice(experiment, impl), *window("nsys")))], preload=0)
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


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--parts", type=words, default=list(PARTS))
    parser.add_argument("--impls", type=words, default=["native", "manual", "compiled", "triton", "cuda"])
    parser.add_argument("--experiments", type=words, default=["lecture", "gpt"])
    parser.add_argument("--overhead", type=words, default=["experiment=gpt", "impl=native"],
                        help="of the part overhead: overrides that make a step which the GPU bounds")  # fmt: skip
    parser.add_argument("--variants", type=words, default=["none", "torch"],
                        help="of the part overhead: none, torch, torch-teardown (with TEARDOWN_CUPTI=1)")  # fmt: skip
    parser.add_argument("--turns", type=at_least(1), default=2, help="how often each variant of the overhead is run")
    parser.add_argument("--preload", type=at_least(0), default=2, help="runs whose processes import while one trains, "
                        "in the part overhead all of them before the first; 0: none")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=150, help="seconds per run")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all; what does not fit is left out")
    parser.add_argument("--whole", action="store_true", help="keep the whole traces too")
    parser.add_argument("overrides", nargs="*", help="further overrides for train.py, such as dim=256")
    options = parser.parse_args(arguments)
    for name, accepted in (("parts", PARTS), ("variants", ("none", "torch", "torch-teardown"))):
        unknown = set(getattr(options, name)) - set(accepted)
        if unknown:
            parser.error(f"--{name} {','.join(sorted(unknown))}: accepted: {', '.join(accepted)}")
    return options


def main() -> int:
    options = parse()
    with Signals() as signals:
        check = Check(options, signals)
        for part in PARTS:
            if part in options.parts and not signals.received:
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
    return 128 + signals.received[0] if signals.received else int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
