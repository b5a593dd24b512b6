"""The report on a set of runs: results.csv, report.md, report.html and throughput.png in one directory."""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedmlp.errors import UserError
from fusedmlp.reporting import agreement, machines, verdict
from fusedmlp.reporting.cells import Group, group
from fusedmlp.reporting.machines import Machine
from fusedmlp.reporting.runs import Run, load
from fusedmlp.reporting.tables import UNKNOWN, Column, Entry, Table, comparison, letter, results
from fusedmlp.sweep.ledger import COMPLETED, FILE, RUNNING, WAITING, Ledger

CSV, MARKDOWN, HTML, PNG = "results.csv", "report.md", "report.html", "throughput.png"
# A directory may have a name that is no UTF-8.
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


@dataclass(frozen=True)
class Report:
    """What a report says, whatever it is written as."""

    title: str
    state: str  # how many runs there are, and what became of them
    commands: list[str]
    environment: Table
    verdicts: list[str]  # one sentence per group
    notes: list[str]  # how to read them
    groups: list[Group]
    names: dict[Machine, str]
    tables: list[tuple[str, list[Table]]]  # per machine: its name, "" where there is one, and its tables
    comparison: Table | None


def build(folders: Sequence[Path]) -> Report:
    """Raises: UserError if a directory holds no runs."""
    runs = load(folders)
    groups = group(runs)
    names = machines.labels([one.machine for one in groups])
    several = len(names) > 1
    verdicts = []
    for one in groups:
        place = f"{names[one.machine]}: " if several else ""
        verdicts.append(place + verdict.judge(one).text)
    made = list(zip(groups, results(groups), strict=True))
    tables = [
        (names[machine] if several else "", [table for one, table in made if one.machine == machine])
        for machine in names
    ]
    impls = ", ".join(dict.fromkeys(cell.impl for one in groups for cell in one.cells))
    places = " and ".join(dict.fromkeys(machines.name_of(machine) for machine in names))
    return Report(
        title=f"{impls} on {places}" if groups else "nothing has begun",
        state=_state(runs),
        commands=_commands(folders, runs),
        environment=_environment(names),
        verdicts=verdicts,
        notes=[*machines.mixtures(runs), *_notes(groups)],
        groups=groups,
        names=names,
        tables=tables,
        comparison=comparison(groups, names),
    )


def write(folders: Sequence[Path], out: Path) -> Report:
    """Writes the four files into `out`, each in one step, so that a reader never meets half of one.

    Raises: UserError if there are no runs, or `out` cannot be written.
    """
    # matplotlib takes a second to import, which those who only want the words need not wait for.
    from fusedmlp.reporting import csv_file, html, markdown, plots

    report = build(folders)
    try:
        out.mkdir(parents=True, exist_ok=True)
        # In `out` itself, since a file can be moved in one step only within a file system.
        with tempfile.TemporaryDirectory(dir=out, prefix=".report-") as scratch:
            partial = Path(scratch)
            csv_file.write(partial / CSV, report.groups)
            plots.write_png(partial / PNG, plots.throughput(report.groups, report.names))
            (partial / MARKDOWN).write_text(markdown.render(report, PNG), **_TEXT)
            (partial / HTML).write_text(html.render(report), **_TEXT)
            for name in (CSV, PNG, MARKDOWN, HTML):
                os.replace(partial / name, out / name)
    except OSError as error:
        raise UserError(f"the report cannot be written to {out}: {error.strerror or error}") from error
    return report


def _state(runs: Sequence[Run]) -> str:
    counts = Counter(run.status for run in runs)
    order = (COMPLETED, *(status for status in counts if status not in (COMPLETED, RUNNING, WAITING)), RUNNING, WAITING)
    words = ", ".join(f"{counts[status]} {status}" for status in order if counts[status])
    return f"{len(runs)} run{'s' if len(runs) != 1 else ''}: {words}"


def _commands(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    """The commands of the sweeps; of runs outside of one, their own."""
    sweeps = [Ledger.read(file.parent) for folder in folders for file in sorted(folder.rglob(FILE))]
    roots = {sweep.folder for sweep in sweeps}
    alone = [str(run.fields["command"]) for run in runs if run.root not in roots and run.fields.get("command")]
    return list(dict.fromkeys([*(sweep.command for sweep in sweeps), *alone]))


def _environment(names: dict[Machine, str]) -> Table:
    columns = [Column("", number=False)]
    columns += [Column(letter(position) if len(names) > 1 else "", number=False) for position in range(len(names))]
    rows = []
    for position, field in enumerate(machines.FIELDS):
        values = [machine[position] for machine in names]
        if field == "dirty" or all(value is None for value in values):
            continue
        known = (UNKNOWN if value is None else str(value) for value in values)
        texts = map(machines.commit_of, names) if field == "commit" else known
        rows.append([Entry(field.replace("_", " ")), *(Entry(text) for text in texts)])
    return Table("Environment", columns, rows)


def _notes(groups: Sequence[Group]) -> list[str]:
    notes = []
    cells = [cell for one in groups for cell in one.cells if cell.completed]
    if any(len(cell.completed) < 2 for cell in cells):
        notes.append(
            "Where an impl ran once, how far its runs spread is unknown and no win is claimed; sweep.repeats=3 tells."
        )
    if any(len(cell.completed) > 1 for cell in cells):
        notes.append(verdict.RULE)
    if any(sum(bool(cell.completed) for cell in one.cells) > 1 for one in groups):
        notes.append(agreement.EXPLANATION)
    if any((run.config.get("data") or {}).get("source") == "synthetic" for cell in cells for run in cell.runs):
        notes.append("Random bytes (data=synthetic) cannot be learnt: there, losses agree whatever an impl computes.")
    return notes
