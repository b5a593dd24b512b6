"""How long an op will take with each implementation on a named GPU: a small cost model, without running anything.

    gelu, softmax        ms = start + bytes that have to be moved / (copy bandwidth * share)
    linear_gelu, mlp     ms = start + time of the matrix products
                              + passes * (bytes of one hidden-sized tensor / copy bandwidth) + 2 us for each more kernel
    start                5 us: the first loads from memory, and the last ones to end
    a call               takes the larger of the kernels' time and the host's

`share` (of copy speed) and `passes` (trips of a hidden-sized tensor through memory that nothing hides: GELU and bias
gradients by themselves, or an epilogue) are what differs between implementations. They are calibrated on measurements
of that implementation, those nearest in dtype and kind of GELU (`calibration.py`). `share` also depends on width and
alignment: a row is kept in registers or read twice, in vectors or not. `passes` is a straight line over K, one for all
widths: the longer a tile's product, the more of its epilogue can be hidden behind another one. The two rates of a card
are its data sheet's times what an H200 reaches of its own: 0.885 of the bandwidth (4.25 of 4.8 TB/s) and 0.70 of the
dense peak, full waves. The host's times are an H200 machine's as well. So for an H200 this interpolates measurements;
for another card it says what to expect if it were an H200 with other rates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fusedmlp.bench.cards import Card
from fusedmlp.bench.cases import Case
from fusedmlp.bench.waves import best_tile

COPY_SHARE = 0.885
GEMM_SHARE = 0.70
# Shortest time of a kernel, in ms.
KERNEL_MS = 0.002
# What a call takes beyond its bytes or FLOPs, in ms: copies of 8 to 134 MB took 5.0 us longer than their bytes at the
# bandwidth of a copy of 2 GB (profiles/records/2026-11-29-h200-bench, table copy).
START_MS = 0.005
# The smallest and the largest K of the bench tables.
MEASURED_K = (768, 4096)


class Host(NamedTuple):
    """The host's time in us: for a call, for each operator in it; for a backward pass, for each operator there."""

    call: float
    operator: float
    enter: float
    operator_back: float


# One core of an H200 machine, profiles/records/LOG.md, 2026-11-29-h200-gemm and 2026-11-29-h200-training.
HOST_US = {
    "manual": Host(0, 12, 70, 45),
    "native": Host(0, 12, 70, 45),
    "compiled": Host(80, 0, 350, 0),
    "triton": Host(0, 36, 70, 85),
}
# Operators of forward and backward, which are the kernels too; "" is for what fuses GELU into a product.
_OPERATORS = {
    "gelu": {"manual": (6, 10), "": (1, 1)},
    "softmax": {"manual": (5, 8), "": (1, 1)},
    "linear_gelu": {"manual": (8, 16), "native": (2, 4), "compiled": (2, 4), "": (1, 3)},
    "mlp": {"manual": (10, 19), "native": (3, 7), "compiled": (3, 7), "": (2, 6)},
}


# Op, implementation, direction, dtype, kind of GELU.
Kind = tuple[str, str, str, str, str]


class Entry(NamedTuple):
    """One calibrated value: `share` for gelu and softmax, `passes` for linear_gelu and mlp.

    `width` is N for gelu and softmax, K for the others, where 0 stands for every K. `slope` is what `value` changes by
    for every 1024 of K, from 0 on.
    """

    op: str
    impl: str
    direction: str
    dtype: str
    approximate: str
    width: int
    value: float
    slope: float = 0.0

    def at(self, K: int) -> float:
        """The value for products over K; beyond what was measured it is that of the nearest K that was."""
        return self.value + self.slope * min(max(K, MEASURED_K[0]), MEASURED_K[1]) / 1024


@dataclass(frozen=True)
class Rates:
    """What a card sustains: bytes and FLOPs per ms.

    Attributes:
        sms: multiprocessors.  copy: bytes read and written.  gemm: FLOPs of full waves, by dtype.
    """

    sms: int
    copy: float
    gemm: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """Times of one call: of its kernels in ms, and of the host that launches them in us."""

    kernel_ms: float
    host_us: float

    @property
    def ms(self) -> float:
        """Called eagerly, with an idle GPU before it."""
        return max(self.kernel_ms, self.host_us / 1e3)


def rates(card: Card) -> Rates:
    """What a card is expected to sustain."""
    gemm = {dtype: (card.tflops(dtype) or 0.0) * 1e9 * GEMM_SHARE for dtype in ("fp32", "bf16", "fp16")}
    return Rates(card.sms, card.gb_per_s * 1e6 * COPY_SHARE, gemm)


def gemm_ms(M: int, K: int, N: int, dtype: str, card: Rates) -> float:
    """(M, K) @ (K, N): by FLOPs with its last wave and padding, or by bytes, whichever takes longer."""
    _, filled = best_tile(M, N, card.sms)
    itemsize = 4 if dtype == "fp32" else 2
    # Tiles share operands through L2, so that each operand counts once.
    by_bytes = (M * K + K * N + M * N) * itemsize / card.copy
    return max(2 * M * K * N / (card.gemm[dtype] * filled.efficiency), by_bytes, KERNEL_MS)


def limit_ms(case: Case, direction: str, card: Rates) -> float:
    """The time that the hardware needs at least: the matrix products alone, or the bytes that have to be moved."""
    if case.has_gemm:
        return sum(gemm_ms(*sizes, case.dtype, card) for sizes in case.gemms(direction))
    return case.least_bytes(direction) / card.copy


def predict(case: Case, direction: str, impl: str, card: Rates, entries: Sequence[Entry]) -> Prediction | None:
    """What one call costs; None where nothing of `impl` has been measured to go by."""
    calls = (direction,) if direction != "step" else ("forward", "backward")
    host = sum(_host_us(case.op, impl, part) for part in calls)
    value = _value(case, direction, impl, entries)
    if value is None and direction == "step":
        parts = [predict(case, part, impl, card, entries) for part in calls]
        if None in parts:
            return None
        return Prediction(sum(part.kernel_ms for part in parts if part is not None), host)
    if value is None:
        return None
    kernels = sum(_operators(case.op, impl)[part != "forward"] for part in calls)
    bottom = limit_ms(case, direction, card)
    if not case.has_gemm:
        return Prediction(START_MS + max(bottom / value, KERNEL_MS * (kernels - 1)), host)
    M, _, N, _ = case.sizes()
    # Fewer than none come out where a fused kernel was faster than cuBLAS's product alone, and hold for that size only.
    beside = max(value, 0.0) * M * N * case.itemsize / card.copy + _more_kernels_ms(case, direction, impl)
    return Prediction(START_MS + bottom + beside, host)


# Rows that `scripts/bench.py` has measured, and the copy bandwidth of that run in GB/s.
Run = tuple[Sequence[dict], float]


def calibrate(runs: Sequence[Run]) -> list[Entry]:
    """Entries from one or more runs on cards of one kind.

    A share is the mean over the runs. The passes of an op, implementation, direction, dtype and kind of GELU are the
    line over K with which the relative errors of all their rows have the least squares: at large K, where the
    hidden-sized tensor is the smallest part of the time and the card's clock moves it most, a row counts least. A kind
    of GELU measured at fewer than three K takes the slope of the other one, where that is known.
    """
    shares: dict[tuple[Kind, int], list[float]] = {}
    points: dict[Kind, list[_Point]] = {}
    for row, copy in ((row, gb_per_s * 1e6) for rows, gb_per_s in runs for row in rows):
        if row.get("ms") is None or row["op"] not in _OPERATORS:
            continue
        shape = tuple(map(int, row["shape"].split("x")))
        case = Case(row["op"], shape, row["dtype"], row["approximate"] or "none")
        kind = (case.op, row["impl"], row["direction"], case.dtype, case.approximate)
        if case.has_gemm:
            hidden = shape[0] * shape[2] * case.itemsize / copy
            beside = row["ms"] - row["limit_ms"] - _more_kernels_ms(case, row["direction"], row["impl"])
            points.setdefault(kind, []).append(_Point(hidden / row["limit_ms"], shape[1], beside / row["limit_ms"]))
        elif row["ms"] > START_MS:
            share = case.least_bytes(row["direction"]) / copy / (row["ms"] - START_MS)
            shares.setdefault((kind, shape[1]), []).append(share)
    # Significant digits: on a CPU a share can be smaller than any number of decimals.
    found = [Entry(*kind, width, float(f"{sum(v) / len(v):.4g}")) for (kind, width), v in shares.items()]
    lines = {kind: _line(rows) for kind, rows in points.items() if len({point.K for point in rows}) > 2}
    for kind, rows in points.items():
        other = (*kind[:4], "tanh" if kind[4] == "none" else "none")
        value, slope = lines.get(kind) or _line(rows, lines[other][1] if other in lines else 0.0)
        found.append(Entry(*kind, width=0, value=round(value, 3), slope=round(slope, 3)))
    return found


class _Point(NamedTuple):
    """What was measured at one K: time of one pass, and all the time beside the products, in times of the products."""

    hidden: float
    K: int
    beside: float


def _line(points: Sequence[_Point], slope: float | None = None) -> tuple[float, float]:
    """(value, slope) of `Entry` with the least squares of `beside - hidden * (value + slope * K / 1024)`."""
    hidden = torch.tensor([point.hidden for point in points], dtype=torch.float64)
    sloping = hidden * torch.tensor([point.K / 1024 for point in points], dtype=torch.float64)
    beside = torch.tensor([point.beside for point in points], dtype=torch.float64)
    if slope is not None:
        return float(hidden @ (beside - slope * sloping) / (hidden @ hidden)), slope
    value, slope = torch.linalg.lstsq(torch.stack([hidden, sloping], dim=1), beside).solution.tolist()
    return value, slope


def winner(predictions: dict[str, Prediction | None]) -> str | None:
    """The implementation with the least kernel time."""
    known = {name: p.kernel_ms for name, p in predictions.items() if p is not None}
    return min(known, key=lambda name: known[name]) if known else None


def _value(case: Case, direction: str, impl: str, entries: Sequence[Entry]) -> float | None:
    """The calibrated value; where there is none for an op with matrix products, that of its parts."""
    entry = _nearest(case, direction, impl, entries)
    if entry is not None:
        return entry.at(case.sizes()[1]) + _other_kind(case, entry, entries) if case.has_gemm else entry.value
    if not case.has_gemm or direction == "step":
        return None
    M, K, N, N2 = case.sizes()
    if case.op == "mlp":
        layer = Case("linear_gelu", (M, K, N), case.dtype, case.approximate)
        passes = _value(layer, direction, impl, entries)
        # The second layer's bias gradient is a sum over dy.
        return passes if direction == "forward" or passes is None else passes + N2 / N
    gelu = _nearest(Case("gelu", (M, N), case.dtype, case.approximate), direction, impl, entries)
    if gelu is None:
        return None
    return _GELU_PASSES[direction] / gelu.value + (direction == "backward")


# Tensors that GELU by itself reads and writes; its bias gradient reads one more.
_GELU_PASSES = {"forward": 2, "backward": 3}


def _other_kind(case: Case, entry: Entry, entries: Sequence[Entry]) -> float:
    """What the passes of an entry for the other kind of GELU differ by: as GELU by itself does, where that is known."""
    difference = 0.0
    for direction, passes in _GELU_PASSES.items():
        if entry.direction in (direction, "step") and entry.approximate != case.approximate:
            gelu = Case("gelu", case.shape[:2], case.dtype)
            kinds = (case.approximate, entry.approximate)
            found = [_nearest(replace(gelu, approximate=k), direction, entry.impl, entries) for k in kinds]
            if all(e is not None and e.approximate == k for e, k in zip(found, kinds, strict=True)):
                wanted, measured = (e.value for e in found if e is not None)
                difference += passes / wanted - passes / measured
    return difference


def _nearest(case: Case, direction: str, impl: str, entries: Sequence[Entry]) -> Entry | None:
    """The entry that is most alike: dtype's size, then kind of GELU, then alignment, then width."""
    width = case.shape[1]

    def distance(entry: Entry) -> tuple:
        other = replace(case, dtype=entry.dtype).itemsize
        aligned = (entry.width * other % 16 == 0) == (width * case.itemsize % 16 == 0)
        away = abs(math.log(entry.width / width)) if entry.width else 0.0
        return other != case.itemsize, entry.approximate != case.approximate, not aligned, away

    alike = [e for e in entries if (e.op, e.impl, e.direction) == (case.op, impl, direction)]
    return min(alike, key=distance, default=None)


def _more_kernels_ms(case: Case, direction: str, impl: str) -> float:
    """What the kernels beside the matrix products take at least."""
    forward, backward = _operators(case.op, impl)
    kernels = {"forward": forward, "backward": backward, "step": forward + backward}[direction]
    return KERNEL_MS * (kernels - len(case.gemms(direction)))


def _operators(op: str, impl: str) -> tuple[int, int]:
    return _OPERATORS[op].get(impl, _OPERATORS[op][""])


def _host_us(op: str, impl: str, direction: str) -> float:
    forward, backward = _operators(op, impl)
    host = HOST_US.get(impl, HOST_US["native"])
    if direction == "forward":
        return host.call + forward * host.operator
    return host.enter + backward * host.operator_back
