"""Two traces side by side: which kernels came, which went, and what that saved per step."""

from dataclasses import dataclass

from fusedmlp.profiling import kinds
from fusedmlp.profiling.analysis import Analysis, KernelRow
from fusedmlp.profiling.report import merged
from fusedmlp.profiling.verdict import judge

# Percent by which a kernel's time per step must differ to be told as changed.
CHANGED = 2.0


@dataclass(frozen=True)
class Change:
    """A kernel in A and in B, per step; None where it does not run."""

    name: str
    kind: str
    before: KernelRow | None
    after: KernelRow | None

    @property
    def ms(self) -> float:
        """What B takes more than A."""
        return (self.after.ms if self.after else 0.0) - (self.before.ms if self.before else 0.0)

    @property
    def word(self) -> str:
        if self.before is None or self.after is None:
            return "came" if self.before is None else "went"
        return "changed"


def changes(a: Analysis, b: Analysis) -> list[Change]:
    """All kernels of both, those that came and went and those whose time changed most first."""
    before, after = ({(row.name, row.kind): row for row in merged(analysis.rows)} for analysis in (a, b))
    found = [Change(*key, before.get(key), after.get(key)) for key in dict.fromkeys((*before, *after))]
    return sorted(found, key=lambda change: -abs(change.ms))


def lines(a: Analysis, b: Analysis, names: tuple[str, str], top: int = 12) -> list[str]:
    """What B does differently from A. Of traces without GPU activity there is nothing to compare but the step."""
    text = [f"A  {names[0]}: {judge(a).sentence}", f"B  {names[1]}: {judge(b).sentence}", "", *_numbers(a, b)]
    if not (a.on_gpu and b.on_gpu):
        return text
    found = changes(a, b)
    text += ["", *_kinds(a, b), "", _summary(a, b, found), ""]
    text.append(f"{'':8} {'ms A':>9} {'ms B':>9} {'B - A':>9} {'count A':>8} {'count B':>8}  {'kind':13} kernel")
    told = [change for change in found if change.word != "changed" or _percent(change) >= CHANGED]
    text += [_line(change) for change in told[:top]]
    return [*text, f"... {len(told) - top} more, {len(found) - len(told)} unchanged"] if len(told) > top else text


def _summary(a: Analysis, b: Analysis, found: list[Change]) -> str:
    came = [change for change in found if change.word == "came"]
    went = [change for change in found if change.word == "went"]
    difference = b.kernel_ms - a.kernel_ms
    went_ms, came_ms = -sum(change.ms for change in went), sum(change.ms for change in came)
    rest = difference - came_ms + went_ms
    verb = "saves" if difference < 0 else "costs"
    return (
        f"B {verb} {abs(difference):.3f} ms of kernels a step ({100 * difference / max(a.kernel_ms, 1e-9):+.1f} %): "
        f"{len(went)} kernels with {went_ms:.3f} ms went, {len(came)} with {came_ms:.3f} ms came, the others "
        f"{'+' if rest >= 0 else '-'}{abs(rest):.3f} ms"
    )


def _numbers(a: Analysis, b: Analysis) -> list[str]:
    rows: list[tuple[str, float | None, float | None, str]] = [
        ("step without profiler, ms", a.unprofiled_step_ms, b.unprofiled_step_ms, ".2f"),
        ("step traced, ms", a.step_ms, b.step_ms, ".2f"),
        ("GPU busy, ms", a.busy_ms, b.busy_ms, ".2f"),
        ("GPU idle, ms", a.idle_ms, b.idle_ms, ".2f"),
        ("kernels", a.kernels, b.kernels, ",.0f"),
        ("launches", a.launches, b.launches, ",.0f"),
        ("CPU waits for the GPU, ms", a.blocked_ms, b.blocked_ms, ".2f"),
        ("launch to start, ms", a.ahead_ms[0] if a.ahead_ms else None, b.ahead_ms[0] if b.ahead_ms else None, ".3f"),
    ]
    if not (a.on_gpu and b.on_gpu):
        rows = rows[:2]
    text = [f"{'per step':26} {'A':>10} {'B':>10} {'B - A':>10}"]
    for label, before, after, form in rows:
        if before is None and after is None:
            continue
        difference = "" if before is None or after is None else format(after - before, f"+{form}")
        text.append(f"{label:26} {_shown(before, form):>10} {_shown(after, form):>10} {difference:>10}")
    return text


def _kinds(a: Analysis, b: Analysis) -> list[str]:
    text = [f"{'kind, ms per step':26} {'A':>10} {'B':>10} {'B - A':>10}"]
    for kind in kinds.KINDS:
        before, after = a.kinds.get(kind, 0.0), b.kinds.get(kind, 0.0)
        if before or after:
            text.append(f"{kind:26} {before:10.3f} {after:10.3f} {after - before:+10.3f}")
    return text


def _line(change: Change) -> str:
    def cells(row: KernelRow | None) -> tuple[str, str]:
        return ("-", "-") if row is None else (f"{row.ms:.3f}", f"{row.count:.1f}")

    (ms_a, count_a), (ms_b, count_b) = cells(change.before), cells(change.after)
    times, counts = f"{ms_a:>9} {ms_b:>9} {change.ms:+9.3f}", f"{count_a:>8} {count_b:>8}"
    return f"{change.word:8} {times} {counts}  {change.kind:13} {change.name}"


def _percent(change: Change) -> float:
    assert change.before is not None
    return 100 * abs(change.ms) / max(change.before.ms, 1e-9)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
