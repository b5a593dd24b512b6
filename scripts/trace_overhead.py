"""What a profiler costs outside its window: the part `overhead` of gpu_trace_check.py."""

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trace_runs import ACTIVE, LOG_EVERY, WARM, WARMUP, Check, Wanted, window

# Steps before the window, and after it.
BEFORE, REST = 40, 32


def overhead(check: Check) -> None:
    """Median step before and after the window, against the same steps of a run without profiler.

    The step has to be one that the GPU bounds: the host's time for an eager step varies by more than is looked for.
    """
    options = check.options
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in options.variants}
    wanted, lines = in_turns(options.variants, options.turns, options.overhead), []
    for name, folder in check.train(wanted, len(wanted) if options.preload else 0, quiet=True):
        if folder is not None:
            variant = name.split("-", 1)[1].rpartition("-")[0]
            before, after = halves(folder / "metrics.csv")
            found[variant].append((before, after))
            busy = (check.record["runs"][name]["trace"] or {}).get("gpu_busy_percent")
            said = "" if busy is None else f", GPU busy {busy:.1f} % of a traced step"
            lines.append(f"{variant:14} before {before:.3f} ms, after {after:.3f} ms{said}")
    for variant in options.variants:
        if variant != "none" and found[variant] and found.get("none"):
            percent = costs(found[variant], found["none"])
            check.record |= {f"overhead_percent_{what}_{variant}": value for what, value in percent.items()}
            said = ", ".join(f"{what.replace('_', ' ')} {value:+.2f} %" for what, value in percent.items())
            lines.append(f"{variant}, relative to runs without: {said}")
    cost = cost_of_ranges_when_off_us()
    check.record["ranges_off_us_per_step"] = cost
    lines.append(f"ranges when no window is open: {cost:.2f} us a step (three empty contexts)")
    check.section(f"Overhead, {' '.join(options.overhead)}", lines)


def in_turns(variants: Sequence[str], turns: int, overrides: Sequence[str]) -> list[Wanted]:
    """Runs without profiler and with, every other turn backwards: a later run may find a warmer card."""
    # Kineto can take CUPTI out of the process when it is done; by default it leaves it in.
    environments = {"none": {}, "torch": {}, "torch-teardown": {"TEARDOWN_CUPTI": "1"}}
    wanted = []
    for turn in range(turns):
        for variant in variants[:: -1 if turn % 2 else 1]:
            steps = window("none" if variant == "none" else "torch", BEFORE, REST)
            wanted.append(Wanted(f"overhead-{variant}-{turn}", (*overrides, *steps), environments[variant]))
    return wanted


def costs(those: list[tuple[float, float]], without: list[tuple[float, float]]) -> dict[str, float]:
    """Percent that runs take more than `without`: before the window, after it, and after against before.

    The last one does not know of a card that is slower in one run than in another.
    """

    def more(measure: Callable[[tuple[float, float]], float]) -> float:
        return 100 * (statistics.median(map(measure, those)) / statistics.median(map(measure, without)) - 1)

    return {
        "before_window": more(lambda run: run[0]),
        "after_window": more(lambda run: run[1]),
        "after_against_before": more(lambda run: run[1] / run[0]),
    }


def halves(metrics: Path) -> tuple[float, float]:
    """Median of the steps' medians in the intervals that lie well before and well after the window of `overhead`."""
    with open(metrics, newline="") as file:
        rows = [(int(row["step"]), float(row["time/step_ms"])) for row in csv.DictReader(file) if row["time/step_ms"]]
    began, ended = BEFORE, BEFORE + WARMUP + ACTIVE
    before = [ms for step, ms in rows if WARM + LOG_EVERY <= step <= began]
    return statistics.median(before), statistics.median(ms for step, ms in rows if step >= ended + LOG_EVERY)


def cost_of_ranges_when_off_us(steps: int = 100_000) -> float:
    from fusedmlp.profiling.ranges import no_range

    began = time.perf_counter()
    for _ in range(steps):
        for name in ("forward", "backward", "optimizer"):
            with no_range(name):
                pass
    return 1e6 * (time.perf_counter() - began) / steps
