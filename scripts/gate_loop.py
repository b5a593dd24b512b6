"""Correctness before speed: the loops that `bench_loop.py` compares train alike."""

from typing import Any

import torch

STEPS = 30
TOLERANCE = 2e-2  # nats; bf16 has three digits


def gate(bench: Any) -> bool:
    """Whether all four loops have the same losses over some steps of a small model, as the table "gate"."""
    small = ("impl=native", "dim=256", f"trainer.max_steps={STEPS}", "trainer.log_every=1")
    curves: dict[str, list[float]] = {}
    for name in ("false", "true"):
        curves[f"ours, cuda_graph={name}"] = list(bench.ours(*small, f"trainer.cuda_graph={name}")["losses"].values())
    for captured in (False, True):
        losses: list[torch.Tensor] = []
        loop = bench.bare(captured, *small)
        first = loop.step_number
        loop.run(STEPS - first, losses)
        curves[f"bare, captured={captured}"] = [loss.item() for loss in losses]
    reference = curves["ours, cuda_graph=false"]
    bench.tables["gate: losses over 30 steps, dim 256"] = rows = []
    for name, curve in curves.items():
        # A bare captured loop spends its first steps warming up, and does not say their losses.
        difference = max(abs(a - b) for a, b in zip(reversed(curve), reversed(reference), strict=False))
        rows.append({"loop": name, "first loss": curve[0], "last loss": curve[-1], "largest difference": difference})
    return len(reference) == STEPS and all(row["largest difference"] < TOLERANCE for row in rows)
