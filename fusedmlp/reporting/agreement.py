"""Whether two impls trained to the same loss, as far as a loss can tell."""

from fusedmlp.reporting.cells import Cell, Group
from fusedmlp.reporting.runs import Run

# Four roundings of bf16 (2**-8 each). Impls that differ in rounding only ended 0.2 to 0.6 % apart after 50 to 200
# steps on an H200 (profiles/records/2026-11-29-h200-training and -triton-training).
BF16_BOUND = 4 * 2**-8
# fp32 rounds to 6e-8 and every step carries that on; native, manual and compiled ended less than 1e-6 apart after 400
# steps of the default model on a CPU.
FP32_BOUND = 1e-3

EXPLANATION = (
    f"A loss agrees with native's when it differs by at most {100 * BF16_BOUND:.1f} % (bf16: four roundings of 2^-8) "
    f"or {100 * FP32_BOUND:.1f} % (fp32), after as many steps. Rounding alone makes losses of bf16 runs part by some "
    "tenths of a percent, so this finds gross errors; it cannot prove that two impls are equal."
)


def uses_bf16(run: Run) -> bool:
    precision = str((run.config.get("trainer") or {}).get("precision", "auto"))
    on_gpu = (run.fields.get("environment") or {}).get("device") == "cuda"
    return precision.startswith("bf16") or (precision == "auto" and on_gpu)


def final_loss(cell: Cell) -> float | None:
    """Median over the runs, of the validation loss or, without one, the training loss; nats per token."""
    return cell.median(lambda run: run.final_loss[1] if run.final_loss else None)


def difference(group: Group, cell: Cell) -> float | None:
    """Of the final loss from the baseline's, as a share of that; None if the two cannot be compared."""
    baseline = group.baseline
    if baseline is None or not cell.completed or _measure(cell) != _measure(baseline) or not _measure(cell):
        return None
    own, reference = final_loss(cell), final_loss(baseline)
    return None if own is None or not reference else own / reference - 1


def agrees(group: Group, cell: Cell) -> bool | None:
    """Whether the final loss is the baseline's within the bound of the precision; None if they cannot be compared."""
    apart = difference(group, cell)
    if apart is None or cell is group.baseline:
        return None
    return abs(apart) <= (BF16_BOUND if any(map(uses_bf16, cell.completed)) else FP32_BOUND)


def _measure(cell: Cell) -> set[tuple[str, int]]:
    """What its losses are and after how many steps they were read."""
    return {(run.final_loss[0], run.fields.get("steps", 0)) for run in cell.completed if run.final_loss}
