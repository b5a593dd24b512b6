"""The ending of a training run: its last numbers, its trace and how it ended, in result.json, metrics.csv and W&B."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusedmlp import auto, impls
from fusedmlp.profiling.session import Session
from fusedmlp.training import environment
from fusedmlp.training.adamw import TritonAdamW
from fusedmlp.training.failures import EXIT_FAILED, Diverged, Ending
from fusedmlp.training.monitor import Monitor

if TYPE_CHECKING:
    from fusedmlp.training.run import Run

log = logging.getLogger(__name__)


class Finish:
    """Records what a run has come to, however far that was.

    Attributes:
        unwritten: why the ending is not in result.json, or None.
    """

    def __init__(self, run: "Run"):
        self._run = run
        self.unwritten: OSError | None = None

    def __call__(self, ending: Ending) -> None:
        """Records the ending in result.json, metrics.csv and W&B."""
        run = self._run
        if run.monitor is not None and run.monitor.started is not None:
            self._try(self._collect, run.monitor)
        if run.profile is not None:
            self._try(self._trace, run.profile)
        self._try(run.progress.close)
        if run.csv is not None:
            self._try(run.csv.close)
        run.seconds["total"] = time.perf_counter() - run.began
        if run.config["impl"] == "auto" and (ran := auto.used()):
            run.result.fields |= {"impl_resolved": impls.resolved("auto"), "impl_choices": ran}
            if not run.peers.lost and not run.peers.same("choices", json.dumps(ran)):
                run.progress.say(
                    "warning: impl=auto chose otherwise on some ranks; give all hosts one $FUSEDMLP_CACHE, or the same "
                    "table with python -m fusedmlp.auto export and import"
                )
        self.record(ending)
        if run.wandb is not None:
            run.wandb.finish(self._summary(), ending.exit_code)
            self._try(run.result.write, wandb=run.wandb.folder)

    def record(self, ending: Ending) -> None:
        """Writes the ending into result.json; where that cannot be, `unwritten` says why."""
        run = self._run
        self.unwritten = None
        try:
            run.result.write(status=ending.status, reason=ending.reason, hint=ending.hint, seconds=run.seconds)
        except OSError as error:
            self.unwritten = error

    def unrecorded(self, ending: Ending) -> Ending:
        """The ending of a run of which result.json does not tell."""
        run = self._run
        assert self.unwritten is not None
        ran = "" if ending.status == "completed" else f"; the run had {ending.status}: {ending.reason}"
        reason = f"{self.unwritten.filename} cannot be written: {self.unwritten.strerror}{ran}"
        run.result.fields |= {"status": "failed", "reason": reason}
        return Ending("failed", reason, ending.hint, ending.exit_code or EXIT_FAILED)

    def _try(self, work: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        """The run has its ending already; what cannot be had besides, as on a full disk, does not change it."""
        try:
            work(*arguments, **keywords)
        except Exception:
            log.warning("%s is lost", getattr(work, "__name__", "something"), exc_info=True)

    def _trace(self, profile: Session) -> None:
        """Takes what the profiler recorded, and what it says."""
        run = self._run
        step_ms = (run.result.fields.get("throughput") or {}).get("step_ms_median")
        trace = profile.finish(step_ms, run.progress.say)
        if trace is not None:
            run.result.write(trace=trace)
        if run.wandb is not None and run.config["profile"]["artifact"]:
            for file in profile.artifacts:
                run.wandb.attach(file)

    def _summary(self) -> dict[str, Any]:
        """The result in W&B's summary, beside the last value of every metric."""
        run = self._run
        fields = run.result.fields
        summary = {
            name: fields.get(name) for name in ("status", "reason", "impl_resolved", "num_params", "final_val_loss")
        }
        summary |= {f"steady/{name}": value for name, value in (fields.get("throughput") or {}).items()}
        summary |= {f"cuda_graph/{name}": value for name, value in (fields.get("cuda_graph") or {}).items()}
        trace = fields.get("trace") or {}
        summary |= {f"trace/{name}": value for name, value in trace.items() if isinstance(value, str | int | float)}
        summary |= {f"trace/ms/{kind}": found["ms"] for kind, found in trace.get("kinds", {}).items()}
        return summary | {f"seconds/{name}": value for name, value in run.seconds.items()}

    def _collect(self, monitor: Monitor) -> None:
        """Takes the numbers of the loop, however it ended."""
        run = self._run
        assert run.task is not None
        try:
            if run.peers.lost:
                _write_all(monitor.give_up)
            else:
                _write_all(monitor.flush)
                if not run.peers.several:
                    # Several ranks would have to ask for it together.
                    monitor.request_rest(run.task)
                    _write_all(monitor.flush)
        except Exception:
            # The run has its ending already; after a GPU error or on a full disk this cannot be had.
            log.warning("the last metrics are lost", exc_info=True)
        assert run.trainer is not None
        assert run.checkpoints is not None
        assert monitor.started is not None
        throughput = monitor.throughput()
        if throughput is not None and (mfu := throughput.mfu_percent or 0.0) > 100:
            run.progress.say(
                f"warning: {mfu:.1f} % MFU: the device has done more than {throughput.peak_tflops:g} TFLOP/s, so that "
                "is not its peak; give the right one with trainer.peak_tflops"
            )
        if run.task.capture.requested is True and run.task.capture.warming:
            run.progress.say(f"warning: step not captured: {run.task.capture.reason}")
        first_steps, warmup = (throughput.first_steps_s, throughput.warmup_s) if throughput else (None, None)
        if first_steps is not None:
            first_steps += run.task.capture.capture_s or 0.0
        run.seconds |= {
            # W&B, model, device, checkpoint: all but the data until the loop begins
            "setup": monitor.started - run.began - (run.seconds["data"] or 0.0),
            # what the first steps take beyond the others: compilation, autotuning, building an extension, caches, and
            # recording the step
            "first_steps": first_steps,
            "warmup": warmup,
            # the steady steps, validation and checkpoints
            "train": time.perf_counter() - monitor.started - (first_steps or 0.0) - (warmup or 0.0),
        }
        run.result.write(
            steps=run.trainer.global_step,
            early_train_loss={"steps": monitor.early_steps, "loss": monitor.early_loss},
            final_train_loss=monitor.last.get("train/loss"),
            final_val_loss=monitor.last.get("val/loss"),
            throughput=dataclasses.asdict(throughput) if throughput else None,
            peak_memory_gib=environment.peak_memory_gib(run.device),
            adamw="triton" if isinstance(run.task.step.optimizer, TritonAdamW) else "native",
            cuda_graph=run.task.capture.facts(),
            checkpoint=run.checkpoints.written,
        )


def _write_all(write: Callable[[], None]) -> None:
    """Writes all rows. One that is not finite, or that a sink refuses, stops a run, and this one has ended."""
    while True:
        try:
            return write()
        except (Diverged, OSError) as error:
            log.info("%s", error)
