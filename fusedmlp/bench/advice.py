"""Advice before a kernel is written: for each op of a model what bounds it, what fusing can gain, and what to do.

    from fusedmlp.bench import advise
    advice = advise("gpt", card="h200", dim=1024, batch=16)
    print(advice.text())

A prediction (`predict.py` says from what), for one training step; with a GPU the measurement stands beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedmlp.bench import calibration
from fusedmlp.bench.cards import Card, find_card
from fusedmlp.bench.cases import DTYPES, Case, parse_case
from fusedmlp.bench.models import MODELS, ModelOp, check_sizes
from fusedmlp.bench.predict import HOST_US, START_MS, Entry, Prediction, gemm_ms, limit_ms, predict, rates, winner
from fusedmlp.bench.waves import best_tile, padding
from fusedmlp.errors import UserError

# A gain below this is less than what two runs of the same kernel differ by.
WORTH = 1.03

Measure = Callable[[Case], dict[str, float]]


@dataclass(frozen=True)
class OpAdvice:
    """What is to be said about one op; times are of one training step (forward and backward) of one such op.

    Attributes:
        op, count: the op and how often the model has it.
        intensity, ridge: FLOPs for each byte that has to be moved, and where the card turns from bandwidth to FLOPs.
        bound: "memory", "compute" or "launches".  limit_ms: what the hardware needs at least.
        predictions: kernel and host time of each implementation.  best: the one with the least kernel time.
        gain: native's predicted kernel time over the best one's.
        wave_efficiency: of its largest product's tiles; None without products.  pad: what to pad, or "".
        recommendation: one sentence.
        measured: ms of each implementation, empty without a GPU.
    """

    op: ModelOp
    intensity: float
    ridge: float
    bound: str
    limit_ms: float
    predictions: dict[str, Prediction | None]
    best: str | None
    gain: float
    wave_efficiency: float | None
    pad: str
    recommendation: str
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def measured_best(self) -> str | None:
        return min(self.measured, key=lambda name: self.measured[name]) if self.measured else None


@dataclass(frozen=True)
class Advice:
    """Advice on all ops of a model, and on its whole step."""

    title: str
    card: Card
    ops: list[OpAdvice]
    step: str

    def text(self) -> str:
        """The advice as plain text."""
        parts = [f"{self.title} on {self.card.name}: predictions for one training step"]
        return "\n".join([*parts, *(f"\n{_text(op)}" for op in self.ops), f"\n{self.step}"])

    def rows(self) -> list[dict[str, Any]]:
        """One row for each op, for tables and JSON."""
        return [_row(op) for op in self.ops]


def advise(
    model: str | None = None,
    *,
    card: str | None = None,
    op: str | None = None,
    shape: str | None = None,
    dtype: str = "bf16",
    approximate: str = "tanh",
    impls: Sequence[str] = (*HOST_US, "cuda"),
    entries: Sequence[Entry] = tuple(calibration.BUILT_IN),
    measure: Measure | None = None,
    **sizes: int,
) -> Advice:
    """Advice on a model, or on one op.

    Args:
        model: "gpt" or "mlp", with `sizes`: dim, batch, layers, and for gpt context, heads, vocab.
        op, shape: instead of a model one op, "softmax" with "4096x50257".
        card: a GPU's name, whole or short ("h200"); None for this machine's.
        impls: to choose from.  entries: what the cost model is calibrated on.
        measure: case -> ms of a training step by implementation; called for every op that has implementations.
    Raises: UserError for a name or size.
    """
    if (model is None) == (op is None):
        raise UserError("give either a model (gpt, mlp) or an op with a shape")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; accepted: {', '.join(DTYPES)}")
    found = find_card(card)
    if found.tflops(dtype) is None:
        raise UserError(f"the peak of {found.name} for {dtype} is unknown")
    if op is not None:
        ops, title = _one_op(op, shape, dtype, approximate)
    else:
        ops, title = _model_ops(model, sizes, dtype, approximate)
    advices = [_advise(one, found, dtype, impls, entries, measure) for one in ops]
    return Advice(title, found, advices, _step(advices))


def _one_op(op: str, shape: str | None, dtype: str, approximate: str) -> tuple[list[ModelOp], str]:
    if shape is None:
        raise UserError(f"op {op!r} needs a shape, for example --shape 4096x4096")
    case = parse_case(op, shape, dtype, approximate)
    return [ModelOp(op, 1, case=case)], str(case)


def _model_ops(model: str | None, sizes: dict[str, int], dtype: str, approximate: str) -> tuple[list[ModelOp], str]:
    if model not in MODELS:
        raise UserError(f"model {model!r} is unknown; accepted: {', '.join(MODELS)}")
    given = check_sizes(model, sizes)
    title = f"{model} ({', '.join(f'{name} {value}' for name, value in given.items())}, {dtype})"
    return MODELS[model].ops(given, dtype, approximate), title


def _totals(advices: Sequence[OpAdvice], impl: str | None = None) -> tuple[float, float]:
    """Kernel and host ms of all ops with `impl`, or with the best of each."""
    counted = [(a.op.count, a.predictions.get(impl or a.best or "native")) for a in advices]
    known = [(count, p) for count, p in counted if p is not None]
    return sum(n * p.kernel_ms for n, p in known), sum(n * p.host_us for n, p in known) / 1e3


def _advise(op: ModelOp, card: Card, dtype: str, impls, entries, measure: Measure | None) -> OpAdvice:
    sustained = rates(card)
    ridge = sustained.gemm[dtype] / sustained.copy
    products = op.case.gemms("forward") if op.case else [op.product] if op.product else []
    case = op.case
    if case is None:
        return _plain_product(op, products[0], sustained, ridge, dtype)
    predictions = {impl: predict(case, "step", impl, sustained, entries) for impl in impls}
    best, native = winner(predictions), predictions.get("native")
    bottom, intensity = limit_ms(case, "step", sustained), case.flops("step") / case.least_bytes("step")
    chosen = predictions.get(best) if best else None
    gain = native.kernel_ms / chosen.kernel_ms if native and chosen else 1.0
    bound = "compute" if case.has_gemm and intensity > ridge else "memory"
    if native and native.host_us / 1e3 > native.kernel_ms:
        bound = "launches"
    wave = min((best_tile(m, n, sustained.sms)[1].efficiency for m, _, n in products), default=None)
    measured = measure(case) if measure else {}
    return OpAdvice(
        op,
        intensity,
        ridge,
        bound,
        bottom,
        predictions,
        best,
        gain,
        wave,
        _pad(op),
        _recommend(best, gain),
        measured,
    )


def _plain_product(op: ModelOp, product, sustained, ridge: float, dtype: str) -> OpAdvice:
    """A linear layer by itself: three matrix products in training and nothing to fuse."""
    M, K, N = product
    itemsize = DTYPES[dtype].itemsize
    each = [gemm_ms(*sizes, dtype, sustained) for sizes in ((M, K, N), (M, N, K), (N, M, K))]
    bottom = sum(each)
    intensity = 2 * M * K * N / ((M * K + K * N + M * N) * itemsize)
    native = HOST_US["native"]
    host = native.operator + native.enter + 3 * native.operator_back
    bound = "launches" if host / 1e3 > bottom else "compute" if intensity > ridge else "memory"
    prediction = Prediction(START_MS + bottom, host)
    wave = best_tile(M, N, sustained.sms)[1].efficiency
    text = _recommend("native", 1.0)
    return OpAdvice(op, intensity, ridge, bound, bottom, {"native": prediction}, "native", 1.0, wave, _pad(op), text)


def _pad(op: ModelOp) -> str:
    """What to pad, and what it costs."""
    found = [(name, padding(size)) for name, size in op.dims().items()]
    odd = [(name, p) for name, p in found if p is not None and p.size > 64]
    return ", ".join(f"{name} {p.size} to {p.padded} (+{100 * p.added:.1f} % work)" for name, p in odd)


def _recommend(best: str | None, gain: float) -> str:
    if best is None:
        return "nothing measured to go by; run scripts/bench.py"
    if best == "native" or gain < WORTH:
        return "leave it to PyTorch"
    if best == "compiled":
        return f"leave it to torch.compile ({gain:.2f}x native)"
    return f"fuse it with impl={best} ({gain:.2f}x native)"


def _step(advices: Sequence[OpAdvice]) -> str:
    """The whole step: kernels against launches, and what the choice of implementations gains."""
    kernels, host = _totals(advices, "native")
    chosen, chosen_host = _totals(advices)
    lines = [
        f"whole step, these ops: native kernels {kernels:.2f} ms, launches {host:.2f} ms of the host",
        f"  the best implementation of each op: kernels {chosen:.2f} ms, launches {chosen_host:.2f} ms",
    ]
    if host > kernels or chosen_host > chosen:
        lines.append("  -> capture the step in a CUDA graph: the GPU waits for launches; then faster kernels count")
    elif kernels > WORTH * chosen:
        lines.append(f"  -> the kernels decide: {kernels / chosen:.2f}x with those")
    else:
        lines.append("  -> leave it to PyTorch")
    return "\n".join(lines)


def _text(advice: OpAdvice) -> str:
    times = ", ".join(f"{name} {p.kernel_ms:.3f}" for name, p in advice.predictions.items() if p is not None)
    host = ", ".join(f"{name} {p.host_us:.0f}" for name, p in advice.predictions.items() if p is not None)
    lines = [
        f"{advice.op.name} (x{advice.op.count}): {advice.op.sizes()}",
        f"  {advice.intensity:.0f} FLOP/byte (ridge {advice.ridge:.0f}): bound by {advice.bound}; "
        f"limit {advice.limit_ms:.3f} ms",
        f"  kernels ms: {times};  host us: {host}",
    ]
    if advice.wave_efficiency is not None:
        lines.append(f"  tiles fill {100 * advice.wave_efficiency:.0f} % of their waves")
    if advice.pad:
        lines.append(f"  pad {advice.pad}")
    if advice.measured:
        measured = ", ".join(f"{name} {ms:.3f}" for name, ms in advice.measured.items())
        lines.append(f"  measured ms: {measured} (best {advice.measured_best}, predicted {advice.best})")
    return "\n".join([*lines, f"  -> {advice.recommendation}"])


def _row(advice: OpAdvice) -> dict[str, Any]:
    row: dict[str, Any] = {"op": advice.op.name, "count": advice.op.count, "sizes": advice.op.sizes()}
    row |= {"flop_per_byte": advice.intensity, "bound": advice.bound, "limit_ms": advice.limit_ms}
    row |= {f"{name}_ms": p.kernel_ms if p else None for name, p in advice.predictions.items()}
    native = advice.predictions.get("native")
    row |= {"host_us": native.host_us if native else None, "gain": advice.gain, "best": advice.best}
    row |= {f"measured_{name}_ms": ms for name, ms in advice.measured.items()}
    row |= {"measured_best": advice.measured_best, "wave_efficiency": advice.wave_efficiency, "pad": advice.pad}
    return row | {"recommendation": advice.recommendation}
