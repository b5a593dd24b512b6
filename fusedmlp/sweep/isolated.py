"""Hydra launcher `isolated`: every job of a sweep in a fresh process, one after another, whatever becomes of each."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from fusedmlp.errors import UserError
from fusedmlp.sweep import outcome, progress
from fusedmlp.sweep.job import Signals, environment_of, run_process
from fusedmlp.sweep.ledger import RUNNING, Job, Ledger, labels
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.options import SweepOptions, build

CONSOLE = "console.log"
# What concerns the sweep and not a job of it.
_OF_THE_SWEEP = re.compile(r"[+~]*(sweep\.|hydra[./](sweep|launcher|mode|run\.dir|job\.(num|id)))")


def register(ended: Callable[[dict[str, Any]], None]) -> None:
    """Makes the launcher known to Hydra; `ended` is told the fields of result.json of every job."""
    IsolatedLauncher.report = staticmethod(ended)
    plugins = Plugins.instance()
    # Hydra instantiates what it can find in the namespace hydra_plugins and nothing else. It may not exist.
    namespace = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    setattr(namespace, "fusedmlp", sys.modules[__name__])  # noqa: B010
    plugins.register(IsolatedLauncher)


class IsolatedLauncher(Launcher):
    """Runs the jobs that Hydra's sweeper composes."""

    # Where Hydra finds it; see `register`.
    __module__ = "hydra_plugins.fusedmlp"

    report: Callable[[dict[str, Any]], None]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Raises: UserError for a wrong value in `sweep`, or a directory that cannot be gone on with or begun in."""
        self.loader, self.config = hydra_context.config_loader, config
        values: Any = OmegaConf.to_container(config.sweep, resolve=True)
        self.options: SweepOptions = build("sweep", values, SweepOptions)
        if self.options.resume is not None:
            self.ledger = Ledger.read(Path(self.options.resume).expanduser())
            with read_write(config), open_dict(config):
                config.hydra.sweep.dir = str(self.ledger.folder)
        else:
            self.ledger = Ledger.new(Path(config.hydra.sweep.dir), shlex.join(["python", *sys.argv]))
        self.measured: list[float] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs every job that has not completed. Raises: Interrupted once the user has stopped the sweep."""
        setup_globals()
        jobs = self._plan([[word for word in words if not _OF_THE_SWEEP.match(word)] for words in job_overrides])
        names = labels(jobs)
        self.ledger.folder.mkdir(parents=True, exist_ok=True)
        self.ledger.write()
        speeds: dict[int, float] = {}
        for job in (job for job in jobs if job.done):
            self._told(job, outcome.read(self.ledger.folder / str(job.folder)), speeds)
        if speeds:
            print(progress.line(jobs, speeds, names, self.measured), flush=True)
        with Signals() as signals:
            for position, job in enumerate(jobs, 1):
                if job.done:
                    continue
                if signals.received:
                    break
                prefix = f"[{position}/{len(jobs)} {names[job.index]}".rstrip() + "]"
                self._told(job, self._run(job, prefix, signals), speeds)
                print(f"\n{progress.line(jobs, speeds, names, self.measured)}\n", flush=True)
        if not all(job.done for job in jobs):
            print(f"next       {self._again()}   # what has not completed", flush=True)
        if signals.received:
            raise Interrupted(signals.received[0])
        return [_returned() for _ in job_overrides]

    def _plan(self, overrides: list[list[str]]) -> list[Job]:
        if self.options.resume is None:
            return self.ledger.plan(overrides, self.options.repeats)
        if overrides == [[]]:
            return self.ledger.jobs
        known = len(self.ledger.jobs)
        jobs = self.ledger.plan(overrides, self.options.repeats)
        if all(job.index >= known for job in jobs):
            raise UserError(
                f"sweep.resume={self.options.resume}: none of its jobs has these overrides; give none, or those of "
                f"{self.ledger.command}"
            )
        return jobs

    def _run(self, job: Job, prefix: str, signals: Signals) -> dict[str, Any]:
        """Runs one job to its end and returns its fields."""
        composed = self.loader.load_sweep_config(self.config, job.overrides)
        with read_write(composed), open_dict(composed):
            composed.hydra.job.id = str(job.index)
            composed.hydra.job.num = job.index
        folder = self.ledger.claim(job, str(composed.hydra.sweep.subdir))
        job.status, job.reason = RUNNING, None
        self.ledger.write()
        command = self._command(job, folder.absolute())
        group = "-".join(self.ledger.folder.absolute().parts[-2:])
        ended = run_process(
            command, environment_of(group), folder / CONSOLE, lambda line: print(prefix, line, flush=True), signals,
            self.options.timeout,
        )  # fmt: skip
        start = {"command": shlex.join(["python", *command[1:]]), "overrides": job.overrides, "group": group}
        start |= {name: composed.get(name) for name in ("impl", "dim", "seed")}
        said = outcome.read(folder).get("status")
        fields = outcome.settle(folder, start, ended, self.options.timeout, bool(signals.received))
        job.status, job.reason, job.seconds = fields["status"], fields["reason"], round(ended.seconds, 3)
        self.measured.append(ended.seconds)
        self.ledger.write()
        if job.status != said:
            print(prefix, f"{job.status}: {job.reason}", flush=True)
        return fields

    def _told(self, job: Job, fields: dict[str, Any], speeds: dict[int, float]) -> None:
        speed = fields.get("throughput") or {}
        if job.done and speed.get("tokens_per_s") is not None:
            speeds[job.index] = speed["tokens_per_s"]
        if fields:
            type(self).report(fields)

    def _command(self, job: Job, folder: Path) -> list[str]:
        """The same program with the overrides of one job."""
        own = [f"hydra.run.dir={_written(folder)}", f"hydra.job.num={job.index}"]
        return [
            sys.executable,
            str(Path(sys.argv[0]).absolute()),
            *self._sources(),
            *job.overrides,
            *self._kept(),
            *own,
        ]

    def _again(self) -> str:
        """The command that goes on with this sweep."""
        words = ["python", sys.argv[0], *self._sources(), "-m", f"sweep.resume={_written(self.ledger.folder)}"]
        if self.options.timeout is not None:
            words.append(f"sweep.timeout={self.options.timeout:g}")
        return shlex.join([*words, *self._kept()])

    def _kept(self) -> list[str]:
        """Hydra's own overrides that hold for a job too."""
        return [word for word in self.config.hydra.overrides.hydra if not _OF_THE_SWEEP.match(word)]

    def _sources(self) -> list[str]:
        """Options of Hydra's command line that say where the configs are."""
        words = []
        for source in self.config.hydra.runtime.config_sources:
            if source.provider == "command-line":
                words += ["--config-dir", source.path]
            elif source.provider == "main" and Path(source.path) != Path(sys.argv[0]).absolute().parent / "configs":
                words += ["--config-path", source.path]
        name = self.config.hydra.job.config_name
        return words if name == "train" else [*words, "--config-name", name]


def _written(path: Path) -> str:
    """A path as the value of an override, in quotes where Hydra's grammar needs them."""
    if re.fullmatch(r"[\w./-]+", str(path)):
        return str(path)
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _returned() -> JobReturn:
    """What Hydra's sweeper asks of a job; how it ended is in sweep.json."""
    result = JobReturn()
    result.return_value, result.status = None, JobStatus.COMPLETED
    return result
