"""The summary of a sweep as a W&B run of its own, in the group of its jobs: the table, the plots, the verdict."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusedmlp.reporting import plots
from fusedmlp.reporting.report import HTML, Report
from fusedmlp.training.options import LoggerOptions, build
from fusedmlp.training.wandb_sink import WandbSink

JOB_TYPE = "summary"


def send(report: Report, folder: Path, group: str, logger: Mapping[str, Any]) -> None:
    """Makes the run, offline unless `logger` says otherwise; if W&B breaks, one line is printed and that is all.

    Args:
        folder: the sweep's directory, which has the report; the W&B files go into its wandb/.
        group: of the sweep's runs.
        logger: section `logger` of their config.
    """
    options: LoggerOptions = build("logger", logger, LoggerOptions)
    if options.mode == "disabled":
        return
    config = {"commands": report.commands}
    with tempfile.TemporaryDirectory() as scratch, _data_in(folder / "wandb"):
        sink = WandbSink(options, folder, f"{group}-summary", JOB_TYPE, group, config, print, "the report is complete")
        sink.show(lambda wandb: _contents(wandb, report, folder, Path(scratch)))
        sink.finish({"verdict": report.verdicts, "state": report.state}, 0)


@contextmanager
def _data_in(folder: Path) -> Iterator[None]:
    """W&B keeps the table's file with the run, where `wandb sync` needs it, and not in the user's home."""
    name = "WANDB_DATA_DIR"
    chosen = name in os.environ
    os.environ.setdefault(name, str(folder))
    try:
        yield
    finally:
        if not chosen:
            del os.environ[name]


def _contents(wandb: Any, report: Report, folder: Path, scratch: Path) -> dict[str, Any]:
    """Names and W&B objects."""
    tables = [table for _, several in report.tables for table in several]
    heads = [column.head for column in tables[0].columns] if tables else []
    columns = ["configuration", *heads]
    rows = [[table.heading, *(entry.text for entry in row)] for table in tables for row in table.rows]
    contents: dict[str, Any] = {"results": wandb.Table(columns=columns, data=rows)}
    for name, draw in (("throughput", plots.throughput), ("speed_up", plots.speed_up), ("memory", plots.memory),
                       ("time_by_kind", plots.kinds)):  # fmt: skip
        drawn = draw(report.groups, report.names)
        if drawn:
            plots.write_png(scratch / f"{name}.png", drawn)
            contents[name] = wandb.Image(str(scratch / f"{name}.png"))
    return contents | {"report": wandb.Html((folder / HTML).read_text(encoding="utf-8"), inject=False)}
