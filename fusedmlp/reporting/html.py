"""The report as one HTML file that needs nothing else: styles, script and plots are in it."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fusedmlp.reporting import plots, svg
from fusedmlp.reporting.report import Report

_HERE = Path(__file__).parent


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["phrases"] = _phrases
    drawn = (plots.throughput, plots.speed_up, plots.kinds, plots.memory)
    pictures = [
        # matplotlib escapes the texts in what it draws.
        (plot.name, plot.heading, Markup(svg.render(plot, f"plot{number}-{position}")))
        for number, draw in enumerate(drawn)
        for position, plot in enumerate(draw(report.groups, report.names))
    ]
    return environment.get_template("report.html.j2").render(
        report=report,
        pictures=pictures,
        style=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
    )


def _phrases(text: str) -> Markup:
    """`text` with a new line after each semicolon; it may break after a comma and nowhere else."""
    lines = [re.split("(?<=,) ", line) for line in re.split("(?<=;) ", text)]
    return Markup("<br>").join(Markup(" ").join(map(Markup("<span>{}</span>").format, line)) for line in lines)
