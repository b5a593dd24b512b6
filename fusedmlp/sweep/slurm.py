"""Hydra launcher `slurm`: every job of a sweep as a job of Slurm, through submitit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusedmlp.errors import UserError
from fusedmlp.signals import Signals
from fusedmlp.sweep import job as processes
from fusedmlp.sweep.job import GRACE_S, Ended, run_alone
from fusedmlp.sweep.launcher import CANNOT_BEGIN, CONSOLE, SweepLauncher
from fusedmlp.sweep.ledger import WAITING, Job

CLUSTERS = ("slurm", "local")
_POLL_S = 1.0


class SlurmLauncher(SweepLauncher):
    """Submits the jobs and waits for all of them.

    The stock launcher of hydra-submitit-launcher waits for them in their order and raises at the first that was killed;
    here its keys are used, and each job ends as in `isolated`.

    Args:
        cluster: "slurm", or "local" for processes on this machine, all at once.
        params: keys of hydra-submitit-launcher's configuration of Slurm.
    """

    # Where Hydra finds it; see fusedmlp/sweep/plugin.py.
    __module__ = "hydra_plugins.fusedmlp"
    in_turn = False

    def __init__(self, cluster: str, **params: Any):
        self.cluster, self.params = cluster, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Raises: UserError for a wrong value, or where submitit or Slurm is missing."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if self.cluster not in CLUSTERS:
            raise UserError(f"hydra.launcher.cluster={self.cluster} is unknown; accepted: {', '.join(CLUSTERS)}")
        self.executor, limit_s = make_executor(self.cluster, self.params, self.ledger.folder / ".submitit")
        # Before Slurm's own limit, so that a job that reaches it has the time for a checkpoint and its result.
        self.limit_s = self.options.timeout or limit_s
        if limit_s < self.limit_s or self.limit is None:
            self.limit_s, self.limit = limit_s, f"hydra.launcher.timeout_min={self.params.get('timeout_min')}"

    def run_all(self, jobs: Sequence[Job], signals: Signals) -> None:
        if not jobs:
            return
        began = time.monotonic()
        running = self._submit(jobs)
        by_index = {job.index: job for job in jobs}
        stop_at: float | None = None
        while running:
            if signals.received and stop_at is None:
                stop_at = time.monotonic() + 2 * GRACE_S
                for submitted in running.values():
                    submitted.cancel(check=False)
            given_up = stop_at is not None and time.monotonic() > stop_at
            for index in [index for index, submitted in running.items() if given_up or submitted.done()]:
                self.end(by_index[index], ending(running.pop(index), time.monotonic() - began), signals)
            if running:
                time.sleep(_POLL_S)

    def _submit(self, jobs: Sequence[Job]) -> dict[int, Any]:
        """Index -> submitit's job, for all of them as one array. Raises: UserError if the cluster refuses them."""
        running: dict[int, Any] = {}
        try:
            with _by_value(), self.executor.batch():
                for job in jobs:
                    try:
                        command, folder = self.begin(job)
                    except CANNOT_BEGIN as error:
                        self.refuse(job, error)
                        continue
                    self.set_running(job)
                    console = folder.absolute() / CONSOLE
                    running[job.index] = self.executor.submit(run_alone, command, self.group, console, self.limit_s)
        except RuntimeError as error:  # submitit's, with what sbatch said
            for job in (job for job in jobs if not job.ended):
                job.status = WAITING
            self.ledger.write()
            raise UserError(f"{self.cluster} does not take the jobs: {' '.join(str(error).split())}") from error
        for job in (job for job in jobs if job.index in running):
            print(self.prefix(job), f"{self.cluster} job {running[job.index].job_id}", flush=True)
        return running


def make_executor(cluster: str, params: dict[str, Any], folder: Path) -> tuple[Any, float]:
    """submitit's executor with these parameters, and the seconds that a job may take within Slurm's time limit.

    Raises: UserError.
    """
    try:
        import submitit
        from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, SlurmQueueConf
    except ImportError as error:
        raise UserError(f"hydra/launcher=slurm needs submitit ({error}): pip install 'fusedmlp[slurm]'") from error
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(SlurmQueueConf(submitit_folder="", name="fusedmlp")), params)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.launcher: {str(error).splitlines()[0]}") from error
    values: Any = OmegaConf.to_container(merged, resolve=True)
    # At Slurm's signal submitit gives up on a job; by then it has to be through.
    limit_s = 60.0 * values["timeout_min"] - values["signal_delay_s"] - GRACE_S
    if limit_s <= 0:
        raise UserError(
            f"hydra.launcher.timeout_min={values['timeout_min']} leaves no time for a job: {GRACE_S:g} s are for its "
            f"last checkpoint and signal_delay_s={values['signal_delay_s']} s for Slurm"
        )
    own = {"submitit_folder", "max_num_timeout", "_target_"}
    shared = set(BaseQueueConf.__dataclass_fields__)
    given = {
        name if name in shared else f"slurm_{name}": value
        for name, value in values.items()
        if name not in own and value is not None
    }
    try:
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=cluster, slurm_max_num_timeout=0)
        executor.update_parameters(**given)
    except Exception as error:
        raise UserError(f"hydra/launcher=slurm cannot be used here: {str(error).splitlines()[0]}") from error
    return executor, limit_s


def ending(submitted: Any, seconds: float) -> Ended:
    """How a job that is done ended; what Slurm says of one that could not tell it."""
    failure = submitted.exception()
    if failure is None:
        # With a task on each of several hosts, the first one's: its ranks include the one that writes the result.
        return Ended(**vars(submitted.results()[0]))
    state = f"{submitted.state}".lower().replace("_", " ")
    return Ended(1, False, "", seconds, lost=f"lost by the cluster: {state}; {submitted.paths.stderr}")


@contextmanager
def _by_value() -> Iterator[None]:
    """What submitit sends is complete: what starts a job elsewhere imports neither this package nor torch."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(processes)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(processes)
