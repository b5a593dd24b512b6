"""metrics.csv: one row per log point and per validation, readable while the run goes on."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COLUMNS = (
    "step",
    "time/elapsed_s",
    "train/loss",  # nats per token, mean since the row before
    "train/grad_norm",  # before clipping, mean since the row before
    "lr",
    "val/loss",  # nats per token
    "time/step_ms",  # median since the row before
    "time/data_wait_percent",  # of the steps' time, in which the next batch was waited for
    "time/replayed_percent",  # of the steps since the row before, replayed from a CUDA graph
    "throughput/samples_per_s",
    "throughput/tokens_per_s",  # tokens that the loss is taken over
    "throughput/tflops_per_s",  # by the model's analytic count, the same for every impl
    "throughput/mfu_percent",  # of the device's dense peak; empty where that is not known
    "memory/peak_gib",  # allocated on the GPU; on a CPU, resident in the process; half a second old at most
)


class CsvSink:
    """Appends rows to metrics.csv, on disk with the step that they come in; what a row does not have stays empty."""

    def __init__(self, path: Path):
        self._file = open(path, "w", newline="")  # noqa: SIM115 - lives as long as the run
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._file.flush()
        self._waiting = False

    def write(self, row: dict[str, float]) -> None:
        self._waiting = True
        with self._named():
            self._writer.writerow(row)

    def tick(self, step: int, pause: bool = False) -> None:
        if self._waiting:
            self._waiting = False
            with self._named():
                self._file.flush()

    def close(self) -> None:
        with self._named():
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Which file could not be written, an open one does not say."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error
