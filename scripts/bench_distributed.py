"""Measures what several GPUs give, in training runs of experiment=gpt, one after another.

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

A run on several GPUs has one process per rank with torchrun's environment. While a run trains, the processes of the
next --preload runs import what they need; they touch no GPU before it is their turn.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments import at_least  # noqa: E402
from distributed_record import communication, table, write_record  # noqa: E402

from fusedmlp.errors import UserError  # noqa: E402
from fusedmlp.signals import Signals  # noqa: E402
from fusedmlp.sweep import outcome  # noqa: E402
from fusedmlp.sweep.ahead import Ahead, Run  # noqa: E402
from fusedmlp.sweep.job import Ended  # noqa: E402

KEPT = ("result.json", "metrics.csv", "config.yaml", "train.log", "trace.json.gz")
PARTS = ("overhead", "scaling", "devices")
SPEED = ("step_ms_median", "step_ms_p10", "step_ms_p90", "tokens_per_s", "tflops_per_s", "mfu_percent")


class Setting(NamedTuple):
    """What a run measures."""

    part: str
    trainer: str
    gpus: int
    impl: str
    repeat: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def run_of(setting: Setting, options: argparse.Namespace) -> Run:
    """The run of a setting, in an empty directory of its own."""
    folder = options.out / setting.name
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        "train.py", f"experiment={options.experiment}", f"impl={setting.impl}", f"trainer={setting.trainer}",
        f"trainer.devices={setting.gpus}", f"trainer.max_steps={options.steps}", "trainer.log_every=10",
        "trainer.val_every=0", "trainer.warmup_steps=10", "trainer.checkpoint=false", "trainer.cuda_graph=false",
        "trainer.rank_timeout=120", "logger=none", f"hydra.run.dir={os.path.relpath(folder, ROOT)}",
    ]  # fmt: skip
    if setting.part == "scaling":
        words += ["profile=torch", f"profile.wait={options.steps - 6}", "profile.active=3"]
    log = options.out / f"{setting.name}.txt"
    log.unlink(missing_ok=True)
    return Run([sys.executable, *words, *options.overrides], ROOT, log, folder, setting.gpus)


def row_of(setting: Setting, ended: Ended, options: argparse.Namespace, stopped: bool) -> dict[str, Any]:
    """What came of a run, as a row; of what it left, only the files that are kept stay."""
    folder = options.out / setting.name
    folder.mkdir(exist_ok=True)
    limit = f"--timeout={options.timeout:g} s"
    result = outcome.settle(folder, {"impl": setting.impl}, ended, limit, stopped)
    row = setting._asdict() | {"exit_code": ended.exit_code, "wall_s": ended.seconds} | read_run(folder, result)
    if row["status"] != "completed":
        text = (options.out / f"{setting.name}.txt").read_text(errors="replace")
        print(f"{setting.name}: {row['status']}: {row['reason']}\n{text[-3000:]}", flush=True)
    for path in folder.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return row


def measure(
    settings: Sequence[Setting], options: argparse.Namespace, signals: Signals, take: Callable[[dict[str, Any]], None]
) -> None:
    """Runs these settings one after another until a signal comes; `take` gets their rows, in a thread of its own."""
    runs = [run_of(setting, options) for setting in settings]

    def end(setting: Setting, ending: Future[Ended]) -> None:
        ended = ending.result()
        take(row_of(setting, ended, options, bool(signals.received)))

    # The rows wait for the ends of processes and read traces while the next run is under way.
    with ThreadPoolExecutor(1) as thread, Ahead(runs, options.preload, signals) as ahead:
        ahead.hold()
        if any(setting.impl == "cuda" for setting in settings):
            build()
        taken: list[Future[None]] = []
        for setting, run in zip(settings, runs, strict=True):
            if signals.received:
                break
            print(f"{setting.name}: {' '.join(run.command[1:])}", flush=True)
            taken.append(thread.submit(end, setting, ahead.follow(options.timeout)))
            for row in taken:
                if row.done():
                    row.result()
    for row in taken:
        row.result()


def build() -> None:
    """Builds the kernels of impl=cuda, so that no run waits for them; why that fails its runs will say."""
    subprocess.run([sys.executable, "-m", "fusedmlp.build", "--impl", "cuda"], cwd=ROOT, check=False)


def read_run(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run from its result and its trace."""
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
    try:
        return row | communication(file) if file.exists() else row
    except UserError as error:
        return row | {"reason": row["reason"] or f"no shares of communication: {error}"}


def second_device(out: Path, timeout: float, signals: Signals) -> dict[str, Any]:
    """The tests of all ops on a GPU that is not the current one, as a row."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "tests/impls/test_composition.py",
               "-k", "second_device"]  # fmt: skip
    log = out / "devices.txt"
    log.unlink(missing_ok=True)
    with Ahead([Run(command, ROOT, log)], 0, signals) as ahead:
        code = ahead.follow(timeout).result().exit_code
    text = log.read_text(errors="replace")
    print(text[-1500:], flush=True)
    good = code == 0 and "PASSED" in text and "SKIPPED" not in text
    last = (text.strip().splitlines() or ["it printed nothing"])[-1]
    return {
        "part": "devices", "trainer": "-", "gpus": 2, "impl": "all", "repeat": 0, "exit_code": code,
        "status": "completed" if good else "failed", "reason": None if good else last,
        "wall_s": time.perf_counter() - began,
    }  # fmt: skip


def plan(options: argparse.Namespace) -> list[Setting]:
    settings: list[Setting] = []
    if "overhead" in options.parts:
        # In turns, so that a card that drifts favours none.
        settings += [Setting("overhead", trainer, 1, impl, repeat) for repeat in range(options.repeats)
                     for impl in options.impls for trainer in ("default", *options.trainers)]  # fmt: skip
    if "scaling" in options.parts:
        settings += [Setting("scaling", trainer, gpus, impl, 0) for trainer in options.trainers
                     for impl in options.impls for gpus in options.devices]  # fmt: skip
    return settings


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
    parser.add_argument("--steps", type=at_least(7), default=60)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--timeout", type=float, default=240, help="seconds per run")
    parser.add_argument(
        "--preload", type=at_least(0), default=2, help="runs whose processes import while one trains; 0: none"
    )
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="records whose runs this one takes over")
    parser.add_argument("overrides", nargs="*", help="further overrides for train.py, such as data.batch_size=8")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts {','.join(sorted(unknown))}: accepted: {', '.join(PARTS)}")
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
    with Signals() as signals:
        if "devices" in options.parts:
            rows.append(second_device(options.out, options.timeout, signals))
            write_record(options.out, rows, commands)

        def take(row: dict[str, Any]) -> None:
            rows.append(row)
            write_record(options.out, rows, commands)

        measure(plan(options), options, signals, take)
    write_record(options.out, rows, commands)
    print("\n" + "\n".join(table(rows)))
    if signals.received:
        return 128 + signals.received[0]
    return 0 if all(row["status"] == "completed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
