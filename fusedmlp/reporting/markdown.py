"""The report as Markdown."""

from collections.abc import Sequence

from fusedmlp.reporting.report import Report
from fusedmlp.reporting.tables import Table


def render(report: Report, picture: str) -> str:
    """The whole report.

    Args:
        picture: path of the throughput plot, relative to the report.
    """
    lines = [f"# {report.title}", "", f"{report.state}.", ""]
    lines += [f"    {command}" for command in report.commands]
    lines += [
        "",
        "## Verdict",
        "",
        *(f"- {sentence}" for sentence in report.verdicts),
        "",
        *(f"{note}\n" for note in report.notes),
    ]
    lines += [f"![tokens/s of every impl]({picture})", ""]
    if report.comparison is not None:
        lines += ["## Side by side", "", f"{report.comparison.heading}.", "", *table(report.comparison), ""]
    lines += ["## Results", ""]
    for place, tables in report.tables:
        lines += [f"### {place}", ""] if place else []
        for one in tables:
            lines += [f"{'####' if place else '###'} {one.heading}", "", *table(one), ""]
    columns = report.tables[0][1][0].columns if report.tables else []
    legend = "; ".join(f"{column.head}: {column.note}" for column in columns if column.note)
    lines += [f"{legend}.", "", "## Environment", "", *table(report.environment), ""]
    return "\n".join(lines)


def table(content: Table) -> list[str]:
    """The lines of one table."""
    head = [column.head for column in content.columns]
    rule = ["---:" if column.number else "---" for column in content.columns]
    return [_line(head), _line(rule), *(_line([entry.text for entry in row]) for row in content.rows)]


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
