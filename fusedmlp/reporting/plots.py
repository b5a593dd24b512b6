"""Plots of a sweep: throughput, speed-up, memory and time by kind of kernel, one panel per configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fusedmlp.reporting.cells import Cell, Group, Setting, Spread, impl_order, sortable, title
from fusedmlp.reporting.machines import Machine

# Of medium lightness, so that they stand out on white and on black, and told apart by markers too.
_STYLES = {
    "manual": ("#8a8f98", "s"), "native": ("#3f7fd6", "o"), "compiled": ("#d99100", "D"), "triton": ("#e0533d", "^"),
    "cuda": ("#2f9e63", "v"), "auto": ("#a260d6", "P"),
}  # fmt: skip
_OTHERS = ("#c2528b", "#2a9fb0", "#8c7a3d")
KINDS = {
    "GEMM": "#3f7fd6", "GEMM+GELU": "#7a5fe0", "attention": "#2a9fb0", "GELU": "#e0533d", "softmax": "#d99100",
    "normalisation": "#a260d6", "reduction": "#c2528b", "loss": "#d9b800", "optimizer": "#2f9e63", "copy": "#8c7a3d",
    "communication": "#5d6673", "other": "#8a8f98",
}  # fmt: skip
IDLE = "#b9bec6"

Read = Callable[[Group, Cell], Spread | None]  # what a plot shows of a cell


@dataclass(frozen=True)
class Plot:
    """One panel: what it is called and how it is drawn on axes."""

    name: str
    heading: str
    draw: Callable[[Any], None]


@dataclass(frozen=True)
class Panel:
    """Groups that share one pair of axes: they differ in the key along x only."""

    heading: str
    key: str
    groups: Sequence[Group]


def panels(groups: Sequence[Group], names: dict[Machine, str]) -> list[Panel]:
    """The groups by what is not along x; along x is dim or, where dim is the same everywhere, another number."""
    key = _along_x(groups)
    found: dict[tuple[Machine, Setting], list[Group]] = {}
    for group in groups:
        rest = tuple((name, value) for name, value in group.setting if name != key)
        found.setdefault((group.machine, rest), []).append(group)
    several = len({machine for machine, _ in found}) > 1
    return [
        Panel(title(rest if len(members) > 1 else members[0].setting) + (f"; {names[machine]}" if several else ""),
              key or "", members)
        for (machine, rest), members in found.items()
    ]  # fmt: skip


def _along_x(groups: Sequence[Group]) -> str | None:
    """The key with several values, all of them numbers; dim before others, None if there is none."""
    values: dict[str, set[str]] = {}
    for group in groups:
        for key, value in group.setting:
            values.setdefault(key, set()).add(value)
    numbers = [key for key, all_values in values.items() if len(all_values) > 1 and
               all(sortable(value)[0] == 0 for value in all_values)]  # fmt: skip
    return "dim" if "dim" in numbers else numbers[-1] if numbers else None


def throughput(groups: Sequence[Group], names: dict[Machine, str]) -> list[Plot]:
    def tokens(group: Group, cell: Cell) -> Spread | None:
        return cell.spread("tokens_per_s") if cell.completed else None

    return _plots("Throughput", "tokens/s", tokens, groups, names)


def speed_up(groups: Sequence[Group], names: dict[Machine, str]) -> list[Plot]:
    """Of every impl over native, where native completed and so did another."""

    def ratio(group: Group, cell: Cell) -> Spread | None:
        value = group.speed_up(cell) if sum(bool(one.completed) for one in group.cells) > 1 else None
        return None if value is None else Spread(value, value, value, 1)

    return _plots("Speed-up over native", "speed, times native", ratio, groups, names, mark=1.0)


def memory(groups: Sequence[Group], names: dict[Machine, str]) -> list[Plot]:
    def peak(group: Group, cell: Cell) -> Spread | None:
        value = cell.peak_gib
        return None if value is None else Spread(value, value, value, 1)

    return _plots("Peak memory", "peak GiB", peak, groups, names)


def _plots(
    name: str, label: str, read: Read, groups: Sequence[Group], names: dict[Machine, str], mark: float | None = None
) -> list[Plot]:
    """One plot per panel that has something to show."""
    return [
        Plot(name, panel.heading, partial(_measure, panel=panel, read=read, label=label, mark=mark))
        for panel in panels(groups, names)
        if any(read(group, cell) is not None for group in panel.groups for cell in group.cells)
    ]


def kinds(groups: Sequence[Group], names: dict[Machine, str]) -> list[Plot]:
    """Time by kind of kernel, one panel per group that has traces."""
    several = len({group.machine for group in groups}) > 1
    return [
        Plot("Time by kind of kernel", title(group.setting) + (f"; {names[group.machine]}" if several else ""),
             partial(_kinds, group=group))
        for group in groups
        if any(cell.time_by_kind_ms for cell in group.cells)
    ]  # fmt: skip


def style(impl: str) -> tuple[str, str]:
    """Colour and marker of an impl, the same in all plots."""
    return _STYLES.get(impl) or (_OTHERS[sum(map(ord, impl)) % len(_OTHERS)], "X")


def _measure(axes: Any, panel: Panel, read: Read, label: str, mark: float | None) -> None:
    impls = sorted({cell.impl for group in panel.groups for cell in group.cells}, key=impl_order)
    if mark is not None:
        axes.axhline(mark, linewidth=0.8, linestyle="--", color=IDLE)
    if len(panel.groups) == 1:
        _bars(axes, panel.groups[0], read)
    else:
        _lines(axes, panel, impls, read)
        axes.legend(frameon=False, fontsize=9, ncols=2)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))


def _bars(axes: Any, group: Group, read: Read) -> None:
    found = [(cell, spread) for cell in group.cells if (spread := read(group, cell)) is not None]
    for position, (cell, spread) in enumerate(found):
        around = [[spread.median - spread.low], [spread.high - spread.median]]
        error = around if spread.high > spread.low else None
        axes.bar(position, spread.median, width=0.6, color=style(cell.impl)[0], yerr=error, capsize=4, ecolor=IDLE)
        axes.annotate(amount(spread.median), (position, spread.high), (0, 3), textcoords="offset points", ha="center",
                      fontsize=9)  # fmt: skip
    axes.margins(y=0.12)
    axes.set_xticks(range(len(found)), [cell.impl for cell, _ in found])
    if len(found) == 1:
        axes.set_xlim(-1, 1)


def _lines(axes: Any, panel: Panel, impls: Sequence[str], read: Read) -> None:
    places = {group.setting: float(dict(group.setting)[panel.key]) for group in panel.groups}
    for impl in impls:
        points = sorted(
            (places[group.setting], spread)
            for group in panel.groups
            if (cell := group.cell(impl)) is not None and (spread := read(group, cell)) is not None
        )
        if not points:
            continue
        x, spreads = [at for at, _ in points], [spread for _, spread in points]
        around = [[one.median - one.low for one in spreads], [one.high - one.median for one in spreads]]
        color, marker = style(impl)
        axes.errorbar(x, [one.median for one in spreads], yerr=around, color=color, marker=marker, markersize=5,
                      linewidth=1.6, capsize=3, label=impl)  # fmt: skip
    ticks = sorted(set(places.values()))
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 4:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(panel.key)


def _kinds(axes: Any, group: Group) -> None:
    """Stacked bars, the GPU's idle time on top."""
    traced = [cell for cell in group.cells if cell.time_by_kind_ms]
    used = [kind for cell in traced for kind in cell.time_by_kind_ms]
    order = [*(kind for kind in KINDS if kind in used), *sorted(set(used) - set(KINDS))]
    bottoms = [0.0] * len(traced)
    for kind in [*order, "idle"]:
        heights = [_idle(cell) if kind == "idle" else cell.time_by_kind_ms.get(kind, 0.0) for cell in traced]
        if any(heights):
            color = IDLE if kind == "idle" else KINDS.get(kind, _OTHERS[0])
            axes.bar(range(len(traced)), heights, bottom=bottoms, width=0.6, color=color, label=kind,
                     hatch="///" if kind == "idle" else None, edgecolor="white" if kind == "idle" else None,
                     linewidth=0)  # fmt: skip
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(traced)), [cell.impl for cell in traced])
    # Three tenths of the width are the legend's.
    axes.set_xlim(-0.6, (len(traced) + 0.2) / 0.7 - 0.6)
    axes.set_ylabel("ms per step")
    axes.legend(frameon=False, fontsize=8, loc="center right", reverse=True)


def _idle(cell: Cell) -> float:
    """Milliseconds of a step in which the GPU had nothing to do, from its busy share, the profiler's time left out."""
    shares = (cell.trace.get(name) for name in ("gpu_busy_percent_unprofiled", "gpu_busy_percent"))
    busy, share = sum(cell.time_by_kind_ms.values()), next(filter(None, shares), None)
    return busy * (100 / share - 1) if share and 0 < share < 100 else 0.0


def amount(value: float) -> str:
    """12.3k, 4.56M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def write_png(file: Path, plots: Sequence[Plot], columns: int = 2) -> None:
    """All plots in one picture."""
    columns = max(1, min(columns, len(plots)))
    rows = max(1, -(-len(plots) // columns))
    figure = Figure(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
    for position, plot in enumerate(plots, 1):
        axes = figure.add_subplot(rows, columns, position)
        plot.draw(axes)
        axes.set_title(plot.heading, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    if not plots:
        figure.text(0.5, 0.5, "nothing measured yet", ha="center")
    figure.savefig(file, dpi=110)
