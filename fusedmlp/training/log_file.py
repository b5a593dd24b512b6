"""train.log: what libraries log and warn during a run, and the traceback of a failure nobody foresaw."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "lightning")


class _Handler(logging.FileHandler):
    """On a full disk it keeps quiet: what is said of that is the run's ending, and not a traceback per record."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Sends log records and warnings to `path` while active; Lightning's go there instead of to the terminal."""
    handler = _Handler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    level = root.level
    lightning = [(logger := logging.getLogger(name), logger.handlers[:], logger.propagate) for name in _LIGHTNING]
    showwarning = warnings.showwarning
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for logger, _, _ in lightning:
        logger.handlers, logger.propagate = [], True
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = showwarning
        for logger, handlers, propagate in lightning:
            logger.handlers, logger.propagate = handlers, propagate
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()
