"""Weights & Biases: one run per training run, offline unless asked. Training goes on if it cannot start or breaks."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusedmlp.training.options import LoggerOptions

log = logging.getLogger(__name__)
# Where there is no train.log, as of a sweep's summary, Python would print the traceback.
log.addHandler(logging.NullHandler())


class WandbSink:
    """Sends rows to a W&B run.

    Args:
        folder: the run's directory; the W&B files go into its wandb/.
        job_type: the impl of a training run.
        group: the sweep that the run belongs to, or None.
        config: the resolved config.
        warn: prints one line to the user.
        without: what becomes of the rest when W&B breaks, for that line.
    """

    def __init__(
        self,
        options: LoggerOptions,
        folder: Path,
        name: str,
        job_type: str,
        group: str | None,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        without: str = "training goes on",
    ):
        self._warn, self._without, self._run = warn, without, None
        self._service_lost = False
        self.folder: Path | None = None
        if options.mode == "disabled":
            return
        if options.mode != "online":
            # Its crash reports would go out even though the run's data stays here.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb

            self._run = wandb.init(
                project=options.project,
                entity=options.entity,
                name=name,
                group=group,
                job_type=job_type,
                tags=[str(tag) for tag in options.tags],
                config=dict(config),
                # W&B's service may be that of a process which started this one in another directory.
                dir=folder.absolute(),
                mode="online" if options.mode == "online" else "offline",
                reinit="finish_previous",
                # Console capture would wrap stdout, which the progress line owns.
                settings=wandb.Settings(console="off", silent=True, init_timeout=60),
            )
            # Rows arrive late, so W&B's own step, which may only grow, would drop some.
            self._run.define_metric("*", step_metric="step")
            self.folder = Path(self._run.dir).parent
        except Exception as error:
            self._give_up(error)

    def write(self, row: dict[str, float]) -> None:
        self._call("log", dict(row))

    def tick(self, step: int, pause: bool = False) -> None:
        pass

    def attach(self, file: Path) -> None:
        """Keeps a file with the W&B run as an artifact, named by the run and the file."""
        if self._run is not None:
            name = f"{self._run.id}-{file.name.partition('.')[0]}"
            self._call("log_artifact", str(file), name, "trace")

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Ends the W&B run; it is marked failed unless `exit_code` is 0."""
        if self._run is not None:
            self._call("summary.update", dict(summary))
            self._call("finish", exit_code=exit_code)
            self._run = None
        if self._service_lost:
            self._service_lost = False
            # The next run would ask it again, and W&B's own ending of the process would fail with a traceback.
            with suppress(Exception):
                import wandb

                wandb.teardown()

    def show(self, make: Callable[[Any], dict[str, Any]]) -> None:
        """Logs tables and pictures by name, which `make` makes with the module wandb."""
        if self._run is None:
            return
        try:
            import wandb

            contents = make(wandb)
        except Exception as error:
            self._give_up(error)
        else:
            self._call("log", contents)

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> None:
        if self._run is None:
            return
        try:
            method: Any = self._run
            for part in name.split("."):
                method = getattr(method, part)
            method(*arguments, **keywords)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._service_lost = isinstance(error, ConnectionError)
        log.warning("Weights & Biases stopped", exc_info=error)
        # Of an environment variable that W&B cannot read, the first line says nothing but that there is one.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = ": ".join(lines[: 3 if "validation error" in str(error) else 1]) or type(error).__name__
        self._warn(f"warning: no Weights & Biases log ({reason}); {self._without}")
