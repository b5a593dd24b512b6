"""A plot as SVG for the inside of a page: text in the page's font and colour, names of its own."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fusedmlp.reporting.plots import Plot

# Drawn in a colour that nothing else has, which then becomes the page's, so that one picture suits light and dark.
_INK = "#010203"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10.0, "text.color": _INK, "axes.labelcolor": _INK,
    "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def render(plot: Plot, prefix: str) -> str:
    """One `<svg>` element; its ids begin with `prefix`, so that several fit on a page."""
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": prefix}):
        figure = Figure(figsize=(4.8, 3.3), layout="constrained")
        axes = figure.add_subplot()
        plot.draw(axes)
        axes.grid(axis="y", alpha=0.15, color=_INK)
        axes.set_axisbelow(True)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    # An image of the whole: what its parts say is in the tables.
    text = text.replace("<svg ", '<svg role="img" ', 1)
    return text.replace(_INK, "currentColor").strip()
