"""The report's tables as rows of texts, each with the value that it is sorted by."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusedmlp.reporting import machines
from fusedmlp.reporting.agreement import agrees, difference, early_difference, final_loss, parted
from fusedmlp.reporting.cells import Cell, Group, Spread, title
from fusedmlp.reporting.verdict import separated

UNKNOWN = "-"


@dataclass(frozen=True)
class Entry:
    """One entry of a table: its text, what it sorts by, and a word on how to show it (CSS class, "" for none)."""

    text: str
    value: float | str | None = None
    kind: str = ""


@dataclass(frozen=True)
class Column:
    """A column: its head, a word on what it holds, whether it holds numbers, and how its texts break in the page.

    `breaks` is "" (nowhere), "phrases" (after a comma or a semicolon), "anywhere", or "below" (texts of any length, in
    lines of their own beneath the row).
    """

    head: str
    note: str = ""
    number: bool = True
    breaks: str = ""


@dataclass(frozen=True)
class Table:
    """`rows[i][j]` belongs to `columns[j]`."""

    heading: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]


COLUMNS = (
    Column("impl", "requested, and what it resolved to where that is another", number=False),
    Column("captured", "whether steps were replayed from a CUDA graph", number=False),
    Column("ms/step", "median step; of several runs the median of their medians"),
    Column("spread", "lowest to highest run; of a single run p10 to p90 of its steps", breaks="phrases"),
    Column("tokens/s", "over all steady steps, the slow ones too"),
    Column("TFLOP/s"),
    Column("MFU %", "share of the dense peak of the device"),
    Column("times native", "speed: native's median step over this one"),
    Column("peak GiB", "peak memory: allocated on the GPU, or resident in a run on the CPU"),
    Column("first steps s", "what the first steps took beyond the others: compiling, tuning, building"),
    Column("loss", "final validation loss, or training loss where there was no validation; nats per token"),
    Column("loss agrees", "with native's", number=False, breaks="phrases"),
    Column("status", number=False, breaks="phrases"),
    Column("why", "what its trace says, or why it did not complete", number=False, breaks="below"),
)
ALWAYS = ("impl", "ms/step", "status")


def results(groups: Sequence[Group]) -> list[Table]:
    """A table per group, one row per impl; what is not known of any of them has no column."""
    rows = [[_row(group, cell) for cell in group.cells] for group in groups]
    used = [
        position
        for position, column in enumerate(COLUMNS)
        if column.head in ALWAYS or any(row[position].text not in (UNKNOWN, "") for some in rows for row in some)
    ]
    columns = [COLUMNS[position] for position in used]
    return [
        Table(title(group.setting), columns, [[row[position] for position in used] for row in some])
        for group, some in zip(groups, rows, strict=True)
    ]


def _row(group: Group, cell: Cell) -> list[Entry]:
    step, within = cell.step_ms, cell.within()
    return [
        Entry(_impl(cell), _impl(cell)),
        Entry(cell.captured or UNKNOWN, cell.captured),
        _number(step.median if step else None, 3),
        _spread(step, within),
        _number(_median(cell, "tokens_per_s"), 0),
        _number(_median(cell, "tflops_per_s"), 3),
        _number(_median(cell, "mfu_percent"), 3),
        _number(group.speed_up(cell), 2, exact=True),
        _number(cell.peak_gib, 3),
        _number(cell.median(lambda run: run.speed.get("first_steps_s")), 2),
        _number(final_loss(cell), 3, exact=True),
        _agreement(group, cell),
        Entry(cell.status, cell.status, _mood(cell)),
        Entry(why(cell), why(cell)),
    ]  # fmt: skip


def _mood(cell: Cell) -> str:
    return "" if len(cell.completed) == len(cell.runs) else "pending" if cell.pending else "bad"


def why(cell: Cell) -> str:
    """What its trace says, and why runs of it did not complete."""
    return "; ".join([*cell.reasons, *([cell.trace["sentence"]] if cell.trace.get("sentence") else [])])


def _impl(cell: Cell) -> str:
    return cell.impl if cell.resolved in (None, cell.impl) else f"{cell.impl} → {cell.resolved}"


def _median(cell: Cell, name: str) -> float | None:
    found = cell.spread(name)
    return found.median if found else None


def _spread(step: Spread | None, within: tuple[float, float] | None) -> Entry:
    if step is None:
        return Entry(UNKNOWN)
    if step.runs > 1:
        return Entry(f"{digits(step.low)} to {digits(step.high)}", (step.high - step.low) / step.median)
    if within is None:
        return Entry(UNKNOWN)
    return Entry(f"p10 {digits(within[0])}, p90 {digits(within[1])}", (within[1] - within[0]) / step.median, "faint")


def _agreement(group: Group, cell: Cell) -> Entry:
    if cell is group.baseline:
        return Entry("baseline", 0.0, "faint")
    answer, apart = agrees(group, cell), difference(group, cell)
    if answer is None or apart is None:
        return Entry(UNKNOWN)
    text = f"{'yes' if answer else 'no'}, {100 * apart:+.2f} %"
    early = early_difference(group, cell)
    if early is not None and (parted(group, cell) or not answer):
        text = f"{'at first' if answer else 'no'}, {100 * early:+.2f} %; at the end {100 * apart:+.2f} %"
    return Entry(text, abs(apart), "" if answer else "bad")


def digits(value: float, significant: int = 3) -> str:
    """With so many significant digits, never fewer than the integer part has: 0.0123, 12.3, 12,345."""
    if value == 0 or abs(value) >= 10 ** (significant - 1):
        return f"{value:,.0f}"
    text = f"{value:.{significant}g}"
    if "e" in text:
        return text
    missing = significant - len(text.lstrip("-0.").replace(".", ""))
    return text + ("." if "." not in text and missing > 0 else "") + "0" * max(0, missing)


def _number(value: float | None, places: int, *, exact: bool = False) -> Entry:
    """With so many significant digits; `exact`: so many after the point; 0: an integer."""
    if value is None:
        return Entry(UNKNOWN)
    return Entry(f"{value:.{places}f}" if exact else digits(value, places) if places else f"{value:,.0f}", value)


def comparison(groups: Sequence[Group], names: dict[machines.Machine, str]) -> Table | None:
    """The same configurations on several machines or commits beside each other; None if there are none."""
    found = list(dict.fromkeys(group.machine for group in groups))
    if len(found) < 2:
        return None
    letters = [letter(position) for position in range(len(found))]
    columns = [Column("configuration", number=False, breaks="anywhere"), Column("impl", number=False)]
    columns += [Column(f"ms/step, {name}") for name in letters]
    columns += [Column(f"{name} over A", "step time there over that at A") for name in letters[1:]]
    rows = []
    for setting in dict.fromkeys(group.setting for group in groups):
        placed = {group.machine: group for group in groups if group.setting == setting}
        if len(placed) < 2:
            continue
        for impl in dict.fromkeys(cell.impl for group in placed.values() for cell in group.cells):
            cells = [placed[machine].cell(impl) if machine in placed else None for machine in found]
            steps = [cell.step_ms if cell and cell.completed else None for cell in cells]
            ratios = [_ratio(steps[0], step) for step in steps[1:]]
            medians = [_number(step.median if step else None, 3) for step in steps]
            rows.append([Entry(title(setting), title(setting)), Entry(impl, impl), *medians, *ratios])
    heading = "; ".join(f"{name}: {names[machine]}" for name, machine in zip(letters, found, strict=True))
    return Table(heading, columns, rows) if rows else None


def letter(position: int) -> str:
    """A, B, C and so on; after Z numbers."""
    return chr(ord("A") + position) if position < 26 else str(position + 1)


def _ratio(first: Spread | None, other: Spread | None) -> Entry:
    if first is None or other is None:
        return Entry(UNKNOWN)
    ratio = other.median / first.median
    fast, slow = (first, other) if first.median < other.median else (other, first)
    apart = separated(fast, slow)
    word = "one run" if apart is None else ("slower" if ratio > 1 else "faster") if apart else "within the spread"
    return Entry(f"{ratio:.2f} ({word})", ratio)
