"""metrics.csv: one row per log point and per validation, readable while the run goes on."""

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
        self._formats: dict[tuple[str, ...], str] = {}
        self._file.write(",".join(COLUMNS) + "\r\n")
        self._file.flush()
        self._waiting = False

    def write(self, row: dict[str, float]) -> None:
        """Raises: KeyError if the row has what is in no column."""
        names = tuple(row)
        if names not in self._formats:
            self._formats[names] = _format(names)
        self._waiting = True
        try:
            self._file.write(self._formats[names] % row)
        except OSError as error:
            raise self._named(error) from error

    def tick(self, step: int, pause: bool = False) -> None:
        if self._waiting:
            self._waiting = False
            try:
                self._file.flush()
            except OSError as error:
                raise self._named(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        """With the file, which an open one does not say."""
        return OSError(error.errno, error.strerror, self._file.name)


def _format(names: tuple[str, ...]) -> str:
    """The line of a row that has these, for the operator %."""
    if unknown := set(names).difference(COLUMNS):
        raise KeyError(f"no column for {', '.join(sorted(unknown))}")
    # Text that gives the number back. The module csv takes 1.4 times as long for it.
    return ",".join(f"%({name})r" if name in names else "" for name in COLUMNS) + "\r\n"
