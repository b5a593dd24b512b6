"""README's tables, generated from a committed record of scripts/bench.py.

A generated part stands between two comments; the first names the table and the record, relative to the README:

    <!-- bench gelu profiles/records/2026-01-01-h200-bench/bench.json -->
    <!-- end bench -->
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusedmlp.bench.console import text
from fusedmlp.bench.plots import ORDER
from fusedmlp.bench.selection import OPS
from fusedmlp.errors import UserError
from fusedmlp.impls import manual

_AXES = ("steps", "layers", "batch", "dim")
_PART = re.compile(r"(<!-- bench (?P<table>\w+) (?P<record>\S+) -->\n)(?P<content>.*?)(<!-- end bench -->)", re.S)

Record = Mapping[str, Any]


def render(readme: Path) -> str:
    """The README's text with every generated part as the records give it. Raises: UserError."""
    try:
        current = readme.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{readme} cannot be read as text: {error}") from error
    opened = len(re.findall(r"<!-- bench ", current))
    if opened != len(_PART.findall(current)):
        raise UserError(f"{readme}: a part that begins with <!-- bench TABLE RECORD --> has no <!-- end bench -->")
    return _PART.sub(lambda part: part[1] + generate(part["table"], readme.parent / part["record"]) + part[5], current)


def generate(table: str, record: Path) -> str:
    """One table as Markdown. Raises: UserError for an unknown table, or a record that lacks it."""
    if table not in TABLES:
        raise UserError(f"table {table!r} is unknown; accepted: {', '.join(TABLES)}")
    try:
        content = json.loads(record.read_text())
        if not isinstance(content["tables"], dict):
            raise ValueError("no tables in it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} cannot be read as a record of scripts/bench.py: {error}") from error
    needed, function = TABLES[table]
    if needed and not content["tables"].get(needed):
        raise UserError(f"{record} has no table {needed!r}; it has {', '.join(content['tables'])}")
    return function(content)


def _op_table(op: str, record: Record) -> str:
    """ms and share of the limit of each implementation; a case and direction a line. For the MLP also the memory."""
    rows = _measured(op, record)
    impls, memory = _impls(rows), op == "mlp"
    lines = [["case", "", "limit, ms", *impls, *(["peak memory / native's"] * memory)]]
    by_cell = _grouped(rows, lambda row: (_case(row), row["direction"]), lambda row: row["impl"])
    for (case, direction), by_impl in by_cell.items():
        limit = next(iter(by_impl.values()))["limit_ms"]
        cells = [_cell(by_impl.get(impl)) for impl in impls]
        lines.append([case, direction, _ms(limit), *cells, *([_peaks(by_impl, impls)] * memory)])
    return _markdown(lines)


def _share_table(op: str, record: Record) -> str:
    """Share of the limit of each implementation, all directions of a case in one cell."""
    rows = _measured(op, record)
    impls = _impls(rows)
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    lines = [[f"{op}: share of the limit, {' / '.join(directions)}", *impls]]
    for case, by_key in _grouped(rows, _case, lambda row: (row["impl"], row["direction"])).items():
        cells = [[by_key.get((impl, direction)) for direction in directions] for impl in impls]
        shares = [[f"{row['share_of_limit']:.2f}" if row else "-" for row in cell] for cell in cells]
        lines.append([case, *(" / ".join(cell) for cell in shares)])
    return _markdown(lines)


def _measured(op: str, record: Record) -> list[dict[str, Any]]:
    return [row for row in record["tables"][op] if row["ms"] is not None]


def _impls(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(row["impl"] for row in rows)
    return [n for n in ORDER if n in names] + [n for n in names if n not in ORDER]


def _case(row: Mapping[str, Any]) -> str:
    kind = {"none": " erf", "tanh": " tanh"}.get(row["approximate"] or "", "")
    return f"{' x '.join(row['shape'].split('x'))} {row['dtype']}{kind}"


def _grouped(rows: Sequence[dict[str, Any]], group: Callable, key: Callable) -> dict[Any, dict[Any, dict[str, Any]]]:
    """group(row) -> key(row) -> row, in the order of the record."""
    found: dict[Any, dict[Any, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(group(row), {})[key(row)] = row
    return found


def _peaks(by_impl: Mapping[str, Mapping[str, Any]], impls: Sequence[str]) -> str:
    """Peak memory over native's of the implementations that fuse."""
    native = by_impl.get("native", {}).get("peak_mib")
    others = [impl for impl in impls if impl not in ("manual", "native") and by_impl.get(impl, {}).get("peak_mib")]
    return ", ".join(f"{impl} {by_impl[impl]['peak_mib'] / native:.2f}" for impl in others) if native else ""


def _cell(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{_ms(row['ms'])} ({row['share_of_limit']:.2f})"


def _ms(value: float) -> str:
    """Three digits, with their zeros."""
    return f"{value:#.3g}".rstrip(".")


def _columns(table: str, columns: Mapping[str, str]) -> Callable[[Record], str]:
    """Chosen columns of a table, all rows."""

    def render_columns(record: Record) -> str:
        rows = record["tables"][table]
        kept = [key for key in columns if any(row.get(key) is not None for row in rows)]
        return _markdown([[columns[k] for k in kept], *([text(row.get(k)) for k in kept] for row in rows)])

    return render_columns


def _scaling(record: Record) -> str:
    """Kernel ms and host ms of the lecture's MLP: an implementation a column, one size varied at a time."""
    rows = _measured("mlp_scaling", record)
    impls = _impls(rows)
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        # Each axis has the base sizes again; their first measurement stands for all.
        cells.setdefault(tuple(str(row[key]) for key in _AXES), {}).setdefault(row["impl"], row)
    lines = [[*_AXES, *impls]]
    for sizes, by_impl in cells.items():
        host = {n: f" / {row['host_us'] / 1e3:.2f}" if row["host_us"] is not None else "" for n, row in by_impl.items()}
        shown = [f"{by_impl[n]['ms']:.3f}{host[n]}" if n in by_impl else "" for n in impls]
        lines.append([*sizes, *shown])
    return _markdown(lines)


def _ledger(record: Record) -> str:
    """What manual's operations read and write, what is the least, and bytes moved over the least as measured."""
    lines = [["op, M x N", "manual reads", "manual writes", "least reads", "least writes", "bytes moved / least"]]
    for op, approximate in (("softmax", "none"), ("gelu", "none"), ("gelu", "tanh")):
        # Sizes so far apart that the coefficients of M N and of M can be read off.
        M, N = 10**3, 10**6
        formulas = [_formula(count, M, N) for count in manual.ledger(op, M, N, approximate=approximate)]
        least = [_formula(count, M, N) for count in manual.ledger(op, M, N, approximate=approximate, fused=True)]
        name = op if op == "softmax" else f"{op} ({'erf' if approximate == 'none' else 'tanh'})"
        lines.append([name, *formulas, *least, _moved(record, op, approximate)])
    return _markdown(lines)


def _moved(record: Record, op: str, approximate: str) -> str:
    """The ratios of the op's first case that was measured, forward; in fp32 if that is among them.

    In 16 bits manual moves more than the formula says, because it computes in fp32.
    """
    forward = [r for r in record["tables"].get(op, ()) if r["direction"] == "forward" and r["bytes_ratio"]]
    rows = [row for row in forward if op == "softmax" or row["approximate"] == approximate]
    if not rows:
        return ""
    first = next((row for row in rows if row["dtype"] == "fp32"), rows[0])
    alike = [row for row in rows if (row["shape"], row["dtype"]) == (first["shape"], first["dtype"])]
    ratios = {row["impl"]: row["bytes_ratio"] for row in alike}
    return ", ".join(f"{impl} {ratios[impl]:.3g}" for impl in _impls(alike)) + f" ({first['dtype']})"


def _formula(elements: int, M: int, N: int) -> str:
    whole, rest = divmod(elements, M * N)
    parts = [f"{whole if whole > 1 else ''}MN"] + ([f"{rest // M}M"] if rest else [])
    return " + ".join(parts)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]) + "\n"


def _of(op: str, table: Callable[[str, Record], str]) -> tuple[str, Callable[[Record], str]]:
    return op, lambda record: table(op, record)


_SIZE = {"size": "size", "dtype": "dtype"}
_PRODUCT = {"M,K,N": "M, K, N", "dtype": "dtype"}
_SPEED = {"ms": "ms", "gb_per_s": "GB/s", "tflops_per_s": "TFLOP/s"}
_SHOWN: dict[str, dict[str, str]] = {
    "copy": {**_SIZE, **_SPEED},
    "matmul": {**_SIZE, **_SPEED, "share_of_peak": "of peak", "wave_efficiency": "waves filled", "kernel": "kernel"},
    "padding": {"padded": "odd", **_PRODUCT, **_SPEED, "x_as_it_is": "speed-up", "kernel": "kernel"},
    "waves": {**_PRODUCT, "tile": "tile", "waves": "waves", **_SPEED, "wave_efficiency": "waves filled"},
    "kernels": {"op": "op", **_SIZE, "ms": "ms", "kernels": "kernels", "longest": "longest"},
    "advice": {"case": "case", "direction": "", "predicted": "predicted", "measured": "measured", "note": "note"},
}
# Name -> the record's table that it needs, and the function that renders it.
TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    **{op: _of(op, _op_table) for op in OPS},
    **{f"{op}_shares": _of(op, _share_table) for op in OPS},
    **{name: (name, _columns(name, columns)) for name, columns in _SHOWN.items()},
    "mlp_scaling": ("mlp_scaling", _scaling),
    "ledger": ("", _ledger),
}
