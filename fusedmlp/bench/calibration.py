"""What the cost model is calibrated on: for each implementation, measured values of how well it does.

NVIDIA H200, torch 2.11, Triton 3.6. gelu and softmax (share of copy speed): the record 2026-11-29-h200-gelu-softmax,
triton's wide rows from its teams.json, compiled's softmax with static shapes. linear_gelu and mlp (hidden-sized passes
beyond the matrix products): the record 2026-11-29-h200-gemm; compiled, and cuda (as cuBLASLt's epilogues alone), from
an earlier run of the same cases. triton's linear_gelu backward is counted (dy and preact read, dpreact written).
The kernels have changed since: `scripts/advise.py --calibrate` takes newer values from a record of `scripts/bench.py`.
"""

import json
from pathlib import Path

from fusedmlp.bench.predict import Entry, calibrate
from fusedmlp.errors import UserError

# op, impl, direction -> (dtype, approximate, width, value)
_H200: dict[tuple[str, str, str], list[tuple[str, str, int, float]]] = {
    ("gelu", "manual", "forward"): [
        ("fp32", "none", 16384, 0.184),
        ("bf16", "none", 16384, 0.065),
        ("fp32", "tanh", 16384, 0.097),
        ("bf16", "tanh", 16384, 0.04),
    ],
    ("gelu", "manual", "backward"): [
        ("fp32", "none", 16384, 0.128),
        ("bf16", "none", 16384, 0.054),
        ("fp32", "tanh", 16384, 0.08),
        ("bf16", "tanh", 16384, 0.036),
    ],
    ("gelu", "native", "forward"): [
        ("fp32", "none", 16384, 1.001),
        ("bf16", "none", 16384, 0.741),
        ("fp32", "tanh", 16384, 1.001),
        ("bf16", "tanh", 16384, 0.861),
    ],
    ("gelu", "native", "backward"): [
        ("fp32", "none", 16384, 1.04),
        ("bf16", "none", 16384, 0.83),
        ("fp32", "tanh", 16384, 1.037),
        ("bf16", "tanh", 16384, 0.974),
    ],
    ("gelu", "compiled", "forward"): [
        ("fp32", "none", 16384, 1.002),
        ("bf16", "none", 16384, 0.66),
        ("fp32", "tanh", 16384, 1.0),
        ("bf16", "tanh", 16384, 0.817),
    ],
    ("gelu", "compiled", "backward"): [
        ("fp32", "none", 16384, 1.042),
        ("bf16", "none", 16384, 0.695),
        ("fp32", "tanh", 16384, 1.039),
        ("bf16", "tanh", 16384, 0.873),
    ],
    ("gelu", "triton", "forward"): [
        ("fp32", "none", 16384, 1.0),
        ("bf16", "none", 16384, 0.988),
        ("fp32", "tanh", 16384, 1.001),
        ("bf16", "tanh", 16384, 0.989),
    ],
    ("gelu", "triton", "backward"): [
        ("fp32", "none", 16384, 1.038),
        ("bf16", "none", 16384, 1.023),
        ("fp32", "tanh", 16384, 1.038),
        ("bf16", "tanh", 16384, 1.023),
    ],
    ("softmax", "manual", "forward"): [
        ("bf16", "none", 1024, 0.062),
        ("bf16", "none", 8192, 0.066),
        ("fp32", "none", 16384, 0.194),
        ("bf16", "none", 32768, 0.069),
        ("bf16", "none", 131072, 0.069),
        ("bf16", "none", 262144, 0.069),
        ("bf16", "none", 50304, 0.068),
        ("bf16", "none", 50257, 0.068),
    ],
    ("softmax", "manual", "backward"): [
        ("bf16", "none", 1024, 0.055),
        ("bf16", "none", 8192, 0.057),
        ("fp32", "none", 16384, 0.141),
        ("bf16", "none", 32768, 0.058),
        ("bf16", "none", 131072, 0.059),
        ("bf16", "none", 262144, 0.059),
        ("bf16", "none", 50304, 0.058),
        ("bf16", "none", 50257, 0.058),
    ],
    ("softmax", "native", "forward"): [
        ("bf16", "none", 1024, 0.534),
        ("bf16", "none", 8192, 0.252),
        ("fp32", "none", 16384, 0.779),
        ("bf16", "none", 32768, 0.539),
        ("bf16", "none", 131072, 0.464),
        ("bf16", "none", 262144, 0.469),
        ("bf16", "none", 50304, 0.538),
        ("bf16", "none", 50257, 0.538),
    ],
    ("softmax", "native", "backward"): [
        ("bf16", "none", 1024, 0.38),
        ("bf16", "none", 8192, 0.5),
        ("fp32", "none", 16384, 0.453),
        ("bf16", "none", 32768, 0.454),
        ("bf16", "none", 131072, 0.438),
        ("bf16", "none", 262144, 0.435),
        ("bf16", "none", 50304, 0.428),
        ("bf16", "none", 50257, 0.429),
    ],
    ("softmax", "compiled", "forward"): [
        ("bf16", "none", 1024, 0.78),
        ("bf16", "none", 8192, 0.63),
        ("fp32", "none", 16384, 1.0),
        ("bf16", "none", 32768, 0.65),
        ("bf16", "none", 131072, 0.48),
        ("bf16", "none", 262144, 0.46),
    ],
    ("softmax", "compiled", "backward"): [
        ("bf16", "none", 1024, 0.23),
        ("bf16", "none", 8192, 0.34),
        ("fp32", "none", 16384, 0.36),
        ("bf16", "none", 32768, 0.33),
        ("bf16", "none", 131072, 0.32),
        ("bf16", "none", 262144, 0.3),
    ],
    ("softmax", "triton", "forward"): [
        ("bf16", "none", 1024, 0.852),
        ("bf16", "none", 8192, 0.957),
        ("fp32", "none", 16384, 0.984),
        ("bf16", "none", 32768, 0.965),
        ("bf16", "none", 131072, 0.914),
        ("bf16", "none", 262144, 0.88),
        ("bf16", "none", 50304, 0.862),
        ("bf16", "none", 50257, 0.528),
    ],
    ("softmax", "triton", "backward"): [
        ("bf16", "none", 1024, 0.904),
        ("bf16", "none", 8192, 1.01),
        ("fp32", "none", 16384, 1.038),
        ("bf16", "none", 32768, 1.021),
        ("bf16", "none", 131072, 0.998),
        ("bf16", "none", 262144, 0.96),
        ("bf16", "none", 50304, 0.956),
        ("bf16", "none", 50257, 0.656),
    ],
    ("linear_gelu", "native", "forward"): [
        ("bf16", "tanh", 768, 2.51),
        ("bf16", "tanh", 1024, 2.21),
        ("bf16", "tanh", 2048, 3.14),
        ("bf16", "tanh", 4096, 2.5),
    ],
    ("linear_gelu", "triton", "forward"): [
        ("bf16", "tanh", 768, 1.11),
        ("bf16", "tanh", 1024, 0.65),
        ("bf16", "tanh", 2048, 1.18),
        ("bf16", "tanh", 4096, 0.25),
    ],
    ("linear_gelu", "cuda", "forward"): [
        ("bf16", "tanh", 768, 0.83),
        ("bf16", "tanh", 1024, 0.28),
        ("bf16", "tanh", 2048, 1.24),
        ("bf16", "tanh", 4096, 0.74),
    ],
    ("linear_gelu", "compiled", "forward"): [
        ("bf16", "tanh", 768, 2.83),
        ("bf16", "tanh", 1024, 2.63),
        ("bf16", "tanh", 2048, 2.31),
        ("bf16", "tanh", 4096, 3.29),
    ],
    ("mlp", "native", "step"): [
        ("bf16", "tanh", 768, 8.86),
        ("bf16", "tanh", 1024, 8.74),
        ("bf16", "tanh", 2048, 7.25),
        ("bf16", "tanh", 4096, 4.56),
    ],
    ("mlp", "triton", "step"): [
        ("bf16", "tanh", 1024, -0.24),
        ("bf16", "tanh", 2048, 3.98),
        ("bf16", "tanh", 4096, 10.33),
    ],
    ("mlp", "manual", "step"): [
        ("bf16", "tanh", 1024, 144.3),
        ("bf16", "tanh", 2048, 134.49),
        ("bf16", "tanh", 4096, 135.64),
    ],
    ("mlp", "compiled", "step"): [
        ("bf16", "tanh", 768, 18.46),
        ("bf16", "tanh", 1024, 7.63),
        ("bf16", "tanh", 2048, 5.73),
        ("bf16", "tanh", 4096, 3.11),
    ],
    ("mlp", "cuda", "step"): [
        ("bf16", "tanh", 768, 6.34),
        ("bf16", "tanh", 1024, 6.06),
        ("bf16", "tanh", 2048, 2.35),
        ("bf16", "tanh", 4096, 0.0),
    ],
    ("linear_gelu", "triton", "backward"): [("bf16", "tanh", 1024, 3.0)],
}

BUILT_IN = [Entry(*kind, *value) for kind, values in _H200.items() for value in values]  # type: ignore[arg-type]


def load(path: Path) -> list[Entry]:
    """Entries from a calibration file, or from a record of `scripts/bench.py`. Raises: UserError."""
    try:
        content = json.loads(path.read_text())
        if "entries" in content:
            return [Entry(*entry) for entry in content["entries"]]
        rows = [row for table in content["tables"].values() for row in table if "share_of_limit" in row]
        return calibrate(rows, content["limits"]["copy_gb_per_s"])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is neither a calibration nor a record of scripts/bench.py: {error}") from error
