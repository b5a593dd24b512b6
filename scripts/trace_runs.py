"""Runs of train.py, one after another, and the record of what they left: for gpu_trace_check.py."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedmlp.profiling import cut, picture, report, trace
from fusedmlp.signals import Signals
from fusedmlp.sweep import outcome
from fusedmlp.sweep.ahead import Ahead, Run
from fusedmlp.sweep.job import Ended

ROOT = Path(__file__).resolve().parents[1]
LOG_EVERY = WARM = 10
WAIT, WARMUP, ACTIVE, AFTER = 20, 3, 5, 7
CUT_STEPS = 3
QUIET = ("logger=none", "trainer.checkpoint=false", "trainer.val_every=0", f"trainer.warmup_steps={WARM}",
         "trainer.cuda_graph=false")  # fmt: skip
KEPT = ("result.json", "kernels.csv", "metrics.csv", "config.yaml")


@dataclass(frozen=True)
class Wanted:
    """A run of train.py to come."""

    name: str
    overrides: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


def choice(experiment: str, impl: str) -> tuple[str, str]:
    return f"experiment={experiment}", f"impl={impl}"


def window(tool: str, wait: int = WAIT, after: int = AFTER) -> list[str]:
    steps = wait + WARMUP + ACTIVE + after
    return [
        f"profile={tool}", f"profile.wait={wait}", f"profile.warmup={WARMUP}", f"profile.active={ACTIVE}",
        f"trainer.max_steps={steps}", f"trainer.log_every={LOG_EVERY}",
    ]  # fmt: skip


class Check:
    """What is common to the parts: where things go, how much time is left, the record so far."""

    def __init__(self, options: argparse.Namespace, signals: Signals):
        self.options, self.signals = options, signals
        self.out: Path = options.out.resolve()
        self.work = self.out / "work"
        self.kept = self.work / "kept"
        self.kept.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        words = ["DIR" if Path(word) == options.out else word for word in sys.argv[1:]]
        self.record: dict[str, Any] = {"command": ["python", "scripts/gpu_trace_check.py", *words], "runs": {}}
        self.sections: list[str] = []
        self.failed = False
        self.endings: dict[str, Future[Ended]] = {}

    def train(
        self, wanted: Sequence[Wanted], preload: int | None = None, quiet: bool = False
    ) -> Iterator[tuple[str, Path | None]]:
        """Name of each run and its directory, None if it did not complete or there was no time for it.

        Args:
            preload: instead of the option.
            quiet: nothing imports while a run is under way.
        """
        runs = [self._run(each) for each in wanted]
        preload = self.options.preload if preload is None else preload
        with Ahead(runs, preload, self.signals, quiet) as ahead:
            ahead.hold()
            if any("impl=cuda" in each.overrides for each in wanted):
                # So that no run waits for it; why it fails the run will say.
                subprocess.run([sys.executable, "-m", "fusedmlp.build", "--impl", "cuda"], cwd=ROOT, check=False)
            for each in wanted:
                yield each.name, self._train(each, ahead)
        for name, ending in self.endings.items():
            self.record["runs"][name]["exit_code"] = ending.result().exit_code
        self.endings.clear()

    def _run(self, wanted: Wanted) -> Run:
        folder, log = self.work / "runs" / wanted.name, self.kept / f"{wanted.name}.txt"
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
        words = (*self.options.overrides, *QUIET, *wanted.overrides, f"hydra.run.dir={os.path.relpath(folder, ROOT)}")
        return Run([sys.executable, "train.py", *words], ROOT, log, folder, environment=wanted.environment)

    def _train(self, wanted: Wanted, ahead: Ahead) -> Path | None:
        name, folder = wanted.name, self.work / "runs" / wanted.name
        row: dict[str, Any] = {"overrides": wanted.overrides}
        self.record["runs"][name] = row
        left = self.options.budget - (time.monotonic() - self.began)
        if left < 10 or self.signals.received:
            return self._lost(name, row, f"left out: {'stopped' if self.signals.received else 'the time was up'}")
        print(f"{name}: {' '.join(wanted.overrides)}", flush=True)
        began, timeout = time.monotonic(), min(left, self.options.timeout)
        self.endings[name] = ahead.follow(timeout)
        found = outcome.read(folder)
        if found.get("status") != "completed":
            folder.mkdir(parents=True, exist_ok=True)
            ended = self.endings[name].result()
            found = outcome.settle(folder, {}, ended, f"{timeout:.0f} s", bool(self.signals.received))
        row |= {"wall_s": round(time.monotonic() - began, 1)}
        row |= {key: found.get(key) for key in ("status", "reason", "trace", "throughput")}
        for key in ("environment", "git"):
            self.record[key] = self.record.get(key) or found.get(key)
        for file in KEPT:
            if (folder / file).exists():
                shutil.copy(folder / file, self.kept / f"{name}.{file}")
        if row["status"] != "completed":
            return self._lost(name, row, row["reason"])
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

    def draw(self, image: str, folder: Path, steps: int, title: str) -> None:
        picture.draw(trace.read(folder / trace.FILE), self.out / image, steps, title, report.step_ms_of_run(folder))


class InTurn:
    """Work in a thread beside what this one does, whose results are taken here, in order; an active context.

    Args:
        take: called with a name and the result, when the next work is added or the context ends.
    """

    def __init__(self, take: Callable[[Any, Any], None]):
        self._take, self._threads = take, ThreadPoolExecutor(1)
        self._work: list[tuple[Any, Future[Any]]] = []

    def add(self, name: Any, work: Callable[..., Any], *arguments: Any) -> None:
        self._work.append((name, self._threads.submit(work, *arguments)))
        while self._work[0][1].done():
            self._pop()
            if not self._work:
                break

    def _pop(self) -> None:
        name, result = self._work.pop(0)
        self._take(name, result.result())

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._work and kind is None:
                self._pop()
        finally:
            self._threads.shutdown(cancel_futures=True)
