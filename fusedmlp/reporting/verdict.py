"""Who wins, in words, and never more than the measurements carry."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusedmlp.reporting.agreement import agrees, difference, parted
from fusedmlp.reporting.cells import Cell, Group, Spread, title

RULE = (
    "A wins over B when each has at least two runs, every run of A was faster than every run of B, and their medians "
    "differ by more than the wider of the two spreads (lowest to highest run)."
)


@dataclass(frozen=True)
class Verdict:
    """The winner of a group, None if there is none, and a sentence."""

    winner: str | None
    text: str


def separated(fast: Spread, slow: Spread) -> bool | None:
    """Whether `fast` is faster than `slow` beyond their spreads (`RULE`); None if one of them ran only once."""
    if min(fast.runs, slow.runs) < 2:
        return None
    widest = max(fast.high - fast.low, slow.high - slow.low)
    return fast.high < slow.low and slow.median - fast.median > widest


def judge(group: Group) -> Verdict:
    """The verdict on one group, over the impls that completed and whose loss does not differ from the baseline's."""
    ranked = sorted(
        (cell for cell in group.cells if cell.completed and cell.step_ms and agrees(group, cell) is not False),
        key=_median,
    )
    winner, text = _ranking(group, ranked)
    others = [cell for cell in group.cells if cell not in ranked]
    wrong = [cell for cell in others if cell.completed and cell.step_ms]
    apart = [f"{cell.impl} {100 * (difference(group, cell) or 0.0):+.1f} %" for cell in ranked if parted(group, cell)]
    if apart:
        text += f"; losses that began as native's and ended apart: {', '.join(apart)}"
    if wrong:
        named = ", ".join(f"{cell.impl} ({_median(cell):.3g} ms)" for cell in wrong)
        text += f"; left out, because the final loss is not native's: {named}"
    left = [cell.impl for cell in others if cell not in wrong and cell.pending]
    untimed = [cell.impl for cell in others if cell not in wrong and not cell.pending and cell.completed]
    failed = [cell.impl for cell in others if not cell.pending and not cell.completed]
    text += f"; still to come: {', '.join(left)}" if left else ""
    text += f"; too few steps to time: {', '.join(untimed)}" if untimed else ""
    text += f"; did not complete: {', '.join(failed)}" if failed else ""
    return Verdict(winner, f"{title(group.setting)}: {text}.")


def _ranking(group: Group, ranked: Sequence[Cell]) -> tuple[str | None, str]:
    if not ranked:
        return None, "nothing to rank"
    first = ranked[0]
    if len(ranked) == 1:
        return None, f"only {first.impl} has been measured, {_median(first):.3g} ms a step"
    second = ranked[1]
    apart = separated(_spread(first), _spread(second))
    if apart is None:
        return None, f"{first.impl} was fastest, {_lead(group, first, second)}; {_hint(first, second)}"
    if apart:
        runs = min(_spread(cell).runs for cell in ranked[:2])
        return first.impl, f"{first.impl} wins, {_lead(group, first, second)}; {runs} runs each, all apart"
    level = [cell for cell in ranked if separated(_spread(first), _spread(cell)) is False]
    named = " and ".join(f"{cell.impl} ({_median(cell):.3g} ms)" for cell in level)
    text = f"no winner, {named} are within the spread of their runs"
    base = group.baseline
    if base is not None and base not in level and separated(_spread(first), _spread(base)):
        text += f", all at least {_median(base) / _median(level[-1]):.2f} times native"
    return None, text


def _lead(group: Group, first: Cell, second: Cell) -> str:
    """How far the first is ahead of the baseline and of the next."""
    base = group.baseline
    times = f"{_median(second) / _median(first):.2f} times {second.impl}"
    steps = f"{_median(first):.3g} against {_median(second):.3g} ms a step"
    if base is None or base is first or base is second:
        return f"{times} ({steps})"
    return f"{_median(base) / _median(first):.2f} times native, {times}, the next ({steps})"


def _hint(first: Cell, second: Cell) -> str:
    """What one run each says, which is how the steps within a run spread and not how runs do."""
    inside = first.within(), second.within()
    hint = "one run each, so how far runs spread is unknown"
    if inside[0] is None or inside[1] is None:
        return hint
    touching = inside[0][1] >= inside[1][0]
    return f"{hint} (within the runs p10 to p90 of the steps {'overlap' if touching else 'do not overlap'})"


def _spread(cell: Cell) -> Spread:
    assert cell.step_ms is not None
    return cell.step_ms


def _median(cell: Cell) -> float:
    return _spread(cell).median
