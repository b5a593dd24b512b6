"""The cost model's predicted winner against the measured one, cell by cell."""

from collections.abc import Sequence
from typing import Any

from fusedmlp.bench.cases import Case
from fusedmlp.bench.predict import Entry, Rates, predict, winner
from fusedmlp.bench.record import Rows

# Two implementations this close are a tie: one run's median of the same kernel differs from the next one's by as much.
TIE = 1.02


def verdicts(rows: Rows, card: Rates, entries: Sequence[Entry], impls: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each case and direction in which at least two of `impls` were measured.

    The prediction agrees where the implementation that it names took at most 2 % longer than the fastest one.
    """
    cells: dict[tuple[Case, str], dict[str, float]] = {}
    for row in rows:
        if row.get("ms") and row["impl"] in impls and row.get("direction"):
            case = Case(row["op"], tuple(map(int, row["shape"].split("x"))), row["dtype"], row["approximate"] or "none")
            cells.setdefault((case, row["direction"]), {})[row["impl"]] = row["ms"]
    return [_verdict(case, way, times, card, entries) for (case, way), times in cells.items() if len(times) > 1]


def agreement(verdict_rows: Rows) -> tuple[int, int]:
    """Cells in which prediction and measurement agree, and all cells with a prediction."""
    judged = [row for row in verdict_rows if row["predicted"] is not None]
    return sum(row["agrees"] for row in judged), len(judged)


def _verdict(case: Case, direction: str, times: dict[str, float], card: Rates, entries) -> dict[str, Any]:
    predictions = {impl: predict(case, direction, impl, card, entries) for impl in times}
    predicted, best = winner(predictions), min(times, key=lambda name: times[name])
    agrees = predicted is not None and times[predicted] <= TIE * times[best]
    chosen = predictions[predicted] if predicted else None
    note = ""
    if predicted is not None and not agrees:
        note = f"{best} took {times[best]:.4g} ms, {predicted} {times[predicted] / times[best]:.2f} times as long"
    unknown = [impl for impl, prediction in predictions.items() if prediction is None]
    if unknown:
        note = "; ".join(filter(None, [note, f"not predicted: {', '.join(unknown)}"]))
    return {
        "case": str(case),
        "direction": direction,
        "predicted": predicted,
        "predicted_ms": chosen.kernel_ms if chosen else None,
        "measured": best,
        "measured_ms": times[best],
        "agrees": agrees,
        "note": note or None,
    }
