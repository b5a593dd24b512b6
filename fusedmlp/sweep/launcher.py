"""What Hydra launchers of sweeps share: the list of jobs, their endings, progress, the report, going on later."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from fusedmlp.errors import UserError
from fusedmlp.signals import Signals
from fusedmlp.sweep import lost_run, outcome, progress
from fusedmlp.sweep.command import job_command, of_the_job, resume_command
from fusedmlp.sweep.job import Ended
from fusedmlp.sweep.ledger import COMPLETED, RUNNING, Job, Ledger, labels
from fusedmlp.sweep.reporter import Reporter, guarded
from fusedmlp.training.explain import of_config
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.options import SweepOptions, build

CONSOLE = "console.log"
# What keeps a job from beginning: its directory cannot be made, or its config does not resolve.
CANNOT_BEGIN = (OSError, OmegaConfBaseException)


class SweepLauncher(Launcher):
    """Runs the jobs that Hydra's sweeper composes; how they run is `run_all` of a subclass."""

    # Told the fields of result.json of every job that has ended.
    report: Callable[[dict[str, Any]], None]
    # Whether the jobs run here, one after another: what they print is shown, and how long the rest takes can be told.
    in_turn = True

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Raises: UserError for a wrong value in `sweep`, or a directory that cannot be gone on with or begun in."""
        if any(os.environ.get(name, "") not in ("", "1") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
            raise UserError(
                "each of the processes that torchrun or srun started would run this sweep: start train.py -m without "
                "them; its jobs start their own"
            )
        self.loader, self.config = hydra_context.config_loader, config
        values: Any = OmegaConf.to_container(config.sweep, resolve=True)
        self.options: SweepOptions = build("sweep", values, SweepOptions)
        if self.options.resume is not None:
            self.ledger = Ledger.read(Path(self.options.resume).expanduser())
            self._take_up()
            with read_write(config), open_dict(config):
                config.hydra.sweep.dir = str(self.ledger.folder)
        else:
            self.ledger = Ledger.new(Path(config.hydra.sweep.dir), shlex.join(["python", *sys.argv]))
        timeout = self.options.timeout
        self.limit = None if timeout is None else f"sweep.timeout={timeout:g} s"
        self.group = "-".join(self.ledger.folder.absolute().parts[-2:])
        self.reporter = Reporter(self.ledger.folder, self.group)
        self.measured: list[float] = []
        self.speeds: dict[int, float] = {}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs every job that has not completed. Raises: Interrupted once the user has stopped the sweep."""
        setup_globals()
        if not job_overrides:
            raise UserError("the sweep has no jobs: one of the lists or ranges that it runs over is empty")
        for words in zip(*job_overrides, strict=True):
            if words[0].lstrip("+").startswith("sweep.") and len(set(words)) > 1:
                raise UserError(
                    f"{', '.join(dict.fromkeys(words))}: expected one value, which holds for the whole sweep"
                )
        self.jobs = self._plan([of_the_job(words) for words in job_overrides])
        self.names = labels(self.jobs)
        self.ledger.folder.mkdir(parents=True, exist_ok=True)
        self.ledger.write()
        for job in self.jobs:
            if job.done:
                self._told(job, outcome.read(self.ledger.folder / str(job.folder)))
        if self.speeds:
            self._show_progress()
        with Signals() as signals:
            self.run_all([job for job in self.jobs if not job.done], signals)
            # With signals still held: a second Ctrl-C must not cost the report.
            for line in self.reporter.close():
                print(line, flush=True)
        self.reporter.summarize()
        if not all(job.done for job in self.jobs):
            again = resume_command(self.config, self.ledger.folder, self.options.timeout)
            print(f"next       {again}   # what has not completed", flush=True)
        if signals.received:
            raise Interrupted(signals.received[0])
        return [_returned() for _ in job_overrides]

    def run_all(self, jobs: Sequence[Job], signals: Signals) -> None:
        """Begins and ends every job, until a signal is received."""
        raise NotImplementedError

    def begin(self, job: Job) -> tuple[list[str], Path]:
        """Makes the directory of a job; returns the command that runs it there, and that directory."""
        composed = self.loader.load_sweep_config(self.config, job.overrides)
        with read_write(composed), open_dict(composed):
            composed.hydra.job.id = str(job.index)
            composed.hydra.job.num = job.index
        job.start = {name: composed.get(name) for name in ("impl", "dim", "seed")}
        job.logger = OmegaConf.to_container(composed.logger, resolve=True)
        folder = self.ledger.claim(job, str(composed.hydra.sweep.subdir))
        if self.reporter.logger is None or composed.logger.mode != "disabled":
            self.reporter.logger = job.logger
        command = job_command(self.config, job.overrides, folder.absolute(), job.index)
        job.start |= {"command": shlex.join(["python", *command[1:]]), "overrides": job.overrides, "group": self.group}
        return command, folder

    def set_running(self, job: Job) -> None:
        job.status, job.reason = RUNNING, None
        self._record()

    def _record(self) -> None:
        guarded("record of the sweep", self.ledger.folder, self.ledger.write)

    def refuse(self, job: Job, error: OSError | OmegaConfBaseException) -> None:
        """Records a job that could not begin (`CANNOT_BEGIN`)."""
        cannot = f"its directory cannot be made: {error.strerror}" if isinstance(error, OSError) else of_config(error)
        job.folder, job.status, job.reason = None, "failed", cannot
        self._record()
        self.reporter.update()
        print(self.prefix(job), f"{job.status}: {job.reason}", flush=True)
        self._told(job, job.start | {"status": job.status, "reason": job.reason})
        self._show_progress()

    def end(self, job: Job, ended: Ended, signals: Signals) -> None:
        """Records what came of a job, and says so if it could not say it itself."""
        folder = self.ledger.folder / str(job.folder)
        said = outcome.read(folder).get("status")
        fields = outcome.settle(folder, job.start, ended, self.limit, bool(signals.received))
        job.status, job.reason, job.seconds = fields["status"], fields["reason"], round(ended.seconds, 3)
        if self.in_turn:
            self.measured.append(ended.seconds)
        self._record()
        guarded("Weights & Biases run", self.ledger.folder, lambda: lost_run.record(folder, fields, job.logger))
        self.reporter.update()
        if job.status != said or not self.in_turn:
            print(self.prefix(job), job.status + (f": {job.reason}" if job.reason else ""), flush=True)
        self._told(job, fields)
        self._show_progress()

    def prefix(self, job: Job) -> str:
        """What a line about a job begins with."""
        return f"[{self.jobs.index(job) + 1}/{len(self.jobs)} {self.names[job.index]}".rstrip() + "]"

    def _take_up(self) -> None:
        """Jobs that completed after their sweep had been killed have completed."""
        for job in self.ledger.jobs:
            if job.status == RUNNING and outcome.read(self.ledger.folder / str(job.folder)).get("status") == COMPLETED:
                job.status = COMPLETED

    def _plan(self, overrides: list[list[str]]) -> list[Job]:
        if self.options.resume is None:
            return self.ledger.plan(overrides, self.options.repeats)
        if overrides == [[]]:
            return self.ledger.plan_again(self.options.repeats)
        known = len(self.ledger.jobs)
        jobs = self.ledger.plan(overrides, self.options.repeats)
        if all(job.index >= known for job in jobs):
            raise UserError(
                f"sweep.resume={self.options.resume}: none of its jobs has these overrides; give none, or those of "
                f"{self.ledger.command}"
            )
        return jobs

    def _told(self, job: Job, fields: dict[str, Any]) -> None:
        speed = fields.get("throughput") or {}
        if job.done and speed.get("tokens_per_s") is not None:
            self.speeds[job.index] = speed["tokens_per_s"]
        if fields:
            type(self).report(fields)

    def _show_progress(self) -> None:
        print(f"\n{progress.line(self.jobs, self.speeds, self.names, self.measured)}\n", flush=True)


def _returned() -> JobReturn:
    """What Hydra's sweeper asks of a job; how it ended is in sweep.json."""
    result = JobReturn()
    result.return_value, result.status = None, JobStatus.COMPLETED
    return result
