"""Whether two impls trained to the same loss, as far as a loss can tell."""

import statistics

from fusedmlp.reporting.cells import Cell, Group
from fusedmlp.reporting.runs import Run

# Four roundings of bf16 (2**-8 each). Impls that differ in rounding only ended 0.2 to 0.6 % apart after 50 to 200
# steps on an H200 (profiles/records/2026-11-29-h200-training and -triton-training).
BF16_BOUND = 4 * 2**-8
# fp32 rounds to 6e-8 and every step carries that on; native, manual and compiled ended less than 1e-6 apart after 400
# steps of the default model on a CPU.
FP32_BOUND = 1e-3
# Of the mean over the first steps. On the H200 five impls of 64 layers of 2048 were 1e-4 apart over five steps, in
# which the loss had fallen by a fifth, and 2 % after sixty: rounding grows while training is unstable.
EARLY_BF16_BOUND = 2**-8
EARLY_FP32_BOUND = 1e-4
# What began alike may end this many times the bound apart.
LATER = 5

EXPLANATION = (
    f"A loss agrees with native's when it differs by at most {100 * BF16_BOUND:.1f} % (bf16: four roundings of 2^-8) "
    f"or {100 * FP32_BOUND:.1f} % (fp32), after as many steps; or by at most {LATER} times that if the means over the "
    f"first steps, before rounding has carried far, differ by at most {100 * EARLY_BF16_BOUND:.1f} % or "
    f"{100 * EARLY_FP32_BOUND:.2f} %. This finds gross errors; it cannot prove that two impls are equal."
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


def early_difference(group: Group, cell: Cell) -> float | None:
    """As `difference`, of the mean training loss over the first steps."""
    baseline = group.baseline
    if baseline is None or difference(group, cell) is None:
        return None
    own, reference = _early_loss(cell), _early_loss(baseline)
    return own[1] / reference[1] - 1 if own and reference and own[0] == reference[0] and reference[1] else None


def agrees(group: Group, cell: Cell) -> bool | None:
    """Whether the final loss is the baseline's within what rounding explains; None if they cannot be compared."""
    apart = difference(group, cell)
    if apart is None or cell is group.baseline:
        return None
    return abs(apart) <= _bound(cell) or parted(group, cell)


def parted(group: Group, cell: Cell) -> bool:
    """Whether the loss began as the baseline's and ended further from it than `_bound`, as unstable training does."""
    apart, early = difference(group, cell), early_difference(group, cell)
    if apart is None or early is None:
        return False
    early_bound = EARLY_BF16_BOUND if any(map(uses_bf16, cell.completed)) else EARLY_FP32_BOUND
    return abs(early) <= early_bound and _bound(cell) < abs(apart) <= LATER * _bound(cell)


def _bound(cell: Cell) -> float:
    return BF16_BOUND if any(map(uses_bf16, cell.completed)) else FP32_BOUND


def _early_loss(cell: Cell) -> tuple[int, float] | None:
    """How many steps, and the median over the runs."""
    found = [run.early_loss for run in cell.completed if run.early_loss]
    steps = {count for count, _ in found}
    return (steps.pop(), statistics.median(loss for _, loss in found)) if len(steps) == 1 else None


def _measure(cell: Cell) -> set[tuple[str, int]]:
    """What its losses are and after how many steps they were read."""
    return {(run.final_loss[0], run.fields.get("steps", 0)) for run in cell.completed if run.final_loss}
