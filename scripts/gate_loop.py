"""Correctness before speed: the loops that `bench_loop.py` compares train alike."""

import itertools
from typing import Any

import torch

STEPS = 30
TOLERANCE = 2e-2  # nats; bf16 has three digits


def gate(bench: Any) -> bool:
    """Whether all loops, with either AdamW, have the same losses over some steps of a small model; the table "gate"."""
    small = ("impl=native", "dim=256", f"trainer.max_steps={STEPS}", "trainer.log_every=1")
    curves: dict[str, list[float]] = {}
    for adamw, captured in itertools.product(("native", "auto"), ("false", "true")):
        found = bench.ours(*small, f"trainer.adamw={adamw}", f"trainer.cuda_graph={captured}")
        curves[f"ours, adamw={adamw}, cuda_graph={captured}"] = list(found["losses"].values())
    for graph in (False, True):
        losses: list[torch.Tensor] = []
        loop = bench.bare(graph, *small)
        first = loop.step_number
        loop.run(STEPS - first, losses)
        curves[f"bare, captured={graph}"] = [loss.item() for loss in losses]
    reference = next(iter(curves.values()))
    bench.tables["gate: losses over 30 steps, dim 256"] = rows = []
    for name, curve in curves.items():
        # A bare captured loop spends its first steps warming up, and does not say their losses.
        difference = max(abs(a - b) for a, b in zip(reversed(curve), reversed(reference), strict=False))
        rows.append({"loop": name, "first loss": curve[0], "last loss": curve[-1], "largest difference": difference})
    return len(reference) == STEPS and all(row["largest difference"] < TOLERANCE for row in rows)
