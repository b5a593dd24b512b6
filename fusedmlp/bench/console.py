"""The tables of a run in a terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fusedmlp.bench.record import Rows, for_people

# Columns that only the files have, so that a line fits.
_LEFT_OUT = {"op", "ms_p20", "ms_p80", "limit_ms", "bytes_moved", "bytes_least", "intensity", "names", "bytes"}
_WHOLE = {"case", "direction", "impl", "size", "dtype", "M,K,N"}
_TITLES = {
    "share_of_limit": "of limit",
    "gb_per_s": "GB/s",
    "tflops_per_s": "TFLOP/s",
    "bytes_ratio": "bytes / least",
    "peak_mib": "peak MiB",
    "host_us": "host us",
    "wave_efficiency": "waves filled",
    "share_of_peak": "of peak",
    "x_base": "x base",
    "x_as_it_is": "x as it is",
}


def make_console() -> Console:
    """A console as wide as the terminal, and wide enough for the tables where the output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def show(console: Console, name: str, rows: Rows) -> None:
    """Print one table."""
    people = for_people([_with_case(row) for row in rows])
    if not people:
        return
    table = Table(title=name, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    keys = [key for key in people[0] if key not in _LEFT_OUT or (name == "kernels" and key == "op")]
    for key in keys:
        numeric = all(isinstance(row[key], int | float | None) and not isinstance(row[key], bool) for row in people)
        table.add_column(
            _TITLES.get(key, key), justify="right" if numeric else "left", no_wrap=key in _WHOLE, overflow="fold"
        )
    for row in people:
        table.add_row(*(text(row[key]) for key in keys))
    console.print(table)


def _with_case(row: Mapping[str, Any]) -> dict[str, Any]:
    """Shape, dtype and kind of GELU of an op's row in one column."""
    if not {"shape", "dtype", "approximate"} <= set(row):
        return dict(row)
    kind = {"none": " erf", "tanh": " tanh"}.get(row["approximate"] or "", "")
    rest = {key: value for key, value in row.items() if key not in ("shape", "dtype", "approximate")}
    return {"case": f"{row['shape']} {row['dtype']}{kind}", **rest}


def show_header(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what the run is made on."""
    shown = ("gpu", "driver", "torch", "cuda", "triton", "python", "commit", "dirty")
    console.print(", ".join(f"{key} {facts[key]}" for key in shown if facts.get(key) is not None), soft_wrap=True)


def text(value: Any) -> str:
    """A value as a table shows it: three digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
