"""Plots of a run as PNG: bars of the share of the limit, a roofline, and how the lecture's MLP scales."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedmlp.bench.record import Rows

# Colour-blind safe (Okabe and Ito), one for each implementation or peer in every plot.
_COLOURS = ("#7f7f7f", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_MARKERS = "osD^vP*"
ORDER = ("manual", "native", "compiled", "triton", "cuda")


def draw(folder: Path, limits: Mapping[str, float], tables: Mapping[str, Rows]) -> list[Path]:
    """Write the plots that the tables have numbers for; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    rows = [row for table in tables.values() for row in table if row.get("share_of_limit")]
    written = []
    for op in dict.fromkeys(row["op"] for row in rows):
        written.append(_bars(folder / f"{op}.png", op, [row for row in rows if row["op"] == op]))
    if rows and {"copy_gb_per_s", "matmul_tflops_per_s"} <= set(limits):
        written.append(_roofline(folder / "roofline.png", limits, rows))
    scaling = [row for row in tables.get("mlp_scaling", ()) if row["ms"]]
    if scaling:
        written.append(_scaling(folder / "mlp_scaling.png", scaling))
    return written


def _impls(rows: Rows) -> dict[str, tuple[str, str]]:
    """Name -> colour and marker, in a fixed order."""
    names = dict.fromkeys(row["impl"] for row in rows)
    ordered = [n for n in ORDER if n in names] + [n for n in names if n not in ORDER]
    place = {name: ORDER.index(name) if name in ORDER else len(ORDER) + i for i, name in enumerate(ordered)}
    return {n: (_COLOURS[place[n] % len(_COLOURS)], _MARKERS[place[n] % len(_MARKERS)]) for n in ordered}


def _label(row: Mapping[str, Any]) -> str:
    kind = {"none": " erf", "tanh": " tanh"}.get(row["approximate"] or "", "")
    return f"{row['shape']} {row['dtype']}{kind}"


def _bars(path: Path, op: str, rows: Rows) -> Path:
    """Share of the limit of every implementation, one panel for each direction."""
    from matplotlib import pyplot as plt

    directions = list(dict.fromkeys(row["direction"] for row in rows))
    cases = list(dict.fromkeys(map(_label, rows)))
    impls = _impls(rows)
    # A GPU's shares end near 1; on a CPU a cached operand can beat the copy many times over.
    widest = min(max(1.2, 1.15 * max(row["share_of_limit"] for row in rows)), 3.0)
    height = 1.6 + len(cases) * (0.2 * len(impls) + 0.15)
    figure, axes = plt.subplots(1, len(directions), figsize=(5.4 * len(directions), height), sharey=True, squeeze=False)
    for axis, direction in zip(axes[0], directions, strict=True):
        for i, (impl, (colour, _)) in enumerate(impls.items()):
            shares = {_label(r): r["share_of_limit"] for r in rows if (r["impl"], r["direction"]) == (impl, direction)}
            places = [j + (i - (len(impls) - 1) / 2) * 0.8 / len(impls) for j in range(len(cases))]
            bars = axis.barh(places, [shares.get(c, 0.0) for c in cases], 0.76 / len(impls), color=colour, label=impl)
            labels = [f"{shares[c]:.2f}" if c in shares else "" for c in cases]
            # White behind the numbers, for the line of the limit runs through some.
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
            axis.bar_label(bars, labels, padding=2, fontsize=7, bbox=behind)
        axis.axvline(1.0, color="0.7", linewidth=0.8, linestyle="--", zorder=0)
        axis.set(title=f"{op} {direction}", xlabel="share of the limit", xlim=(0, widest))
        axis.set_yticks(range(len(cases)), cases, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylim(len(cases) - 0.45, -0.55)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(impls), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.45 / height, 1, 1))
    return _save(figure, path)


def _roofline(path: Path, limits: Mapping[str, float], rows: Rows) -> Path:
    """TFLOP/s against FLOPs for each byte that has to be moved, under the measured roofs."""
    from matplotlib import pyplot as plt

    bandwidth, peak = limits["copy_gb_per_s"] / 1e3, limits["matmul_tflops_per_s"]
    figure, axis = plt.subplots(figsize=(7.5, 5))
    # A row without intensity (a table of times only) has no place here.
    points = [row for row in rows if row.get("intensity")]
    intensities = [row["intensity"] for row in points] + [peak / bandwidth]
    low, high = min(intensities) / 2, max(intensities) * 2
    corners = sorted([low, peak / bandwidth, high])
    axis.plot(corners, [min(peak, bandwidth * x) for x in corners], color="black", linewidth=1.2)
    for i, (impl, (colour, marker)) in enumerate(_impls(points).items()):
        own = [row for row in points if row["impl"] == impl]
        x, y = [row["intensity"] for row in own], [row["tflops_per_s"] for row in own]
        # All implementations of a case have the same intensity: hollow and ever smaller, or the last would hide them.
        size = max(60 - 12 * i, 12)
        axis.scatter(x, y, s=size, marker=marker, facecolors="none", edgecolors=colour, linewidths=1.1, label=impl)
    axis.annotate(f"copy {limits['copy_gb_per_s']:,.0f} GB/s", (low * 1.1, bandwidth * low * 8), fontsize=8)
    axis.annotate(f"matmul {peak:,.3g} TFLOP/s", (high / 1.1, peak * 1.4), ha="right", fontsize=8)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte that has to be moved",
        ylabel="TFLOP/s",
    )
    axis.set_ylim(top=peak * 2.5)
    axis.grid(True, which="major", linewidth=0.3)
    axis.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    return _save(figure, path)


def _scaling(path: Path, rows: Rows) -> Path:
    """Kernel time (solid) and the host's time (dotted) over each axis of the lecture's MLP."""
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["axis"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3.4), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for impl, (colour, marker) in _impls(rows).items():
            own = [row for row in rows if (row["axis"], row["impl"]) == (name, impl)]
            x = [row[name] for row in own]
            axis.plot(x, [row["ms"] for row in own], color=colour, marker=marker, markersize=4, label=impl)
            host = [(row[name], row["host_us"] / 1e3) for row in own if row["host_us"] is not None]
            axis.plot([h[0] for h in host], [h[1] for h in host], color=colour, linestyle=":")
        axis.set(xlabel=name, yscale="log")
        axis.set_xscale("log", base=2)
        sizes = sorted({row[name] for row in rows if row["axis"] == name})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(True, which="major", linewidth=0.3)
    axes[0][0].set_ylabel("ms (solid: kernels, dotted: host)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
