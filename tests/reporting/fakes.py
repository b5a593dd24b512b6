"""Directories of runs and sweeps as they are after training, without the training."""

import json
from pathlib import Path
from typing import Any

import yaml

from fusedmlp.sweep.ledger import Job, Ledger

H200 = {
    "python": "3.12.3", "platform": "Linux", "torch": "2.11.0", "triton": "3.6.0", "lightning": "2.6.6", "cuda": "13.0",
    "driver": "580.159.04", "device": "cuda", "gpu": "NVIDIA H200", "gpu_memory_gib": 139.8, "cpu_count": 16,
}  # fmt: skip
COMMIT = "0123456789abcdef"
TRACE = {
    "sentence": "launch-bound: GPU busy 50 %; 1,420 launches a step: capture the step",
    "time_by_kind_ms": {"GEMM": 3.0, "GELU": 1.0, "optimizer": 0.5},
    "gpu_busy_percent": 50.0,
    "launches_per_step": 1420.0,
}


def result(impl: str, dim: int = 512, step_ms: float = 10.0, **changes: Any) -> dict[str, Any]:
    """result.json of a run that completed, with these changes."""
    speed = {
        "step_ms_median": step_ms, "step_ms_p10": 0.99 * step_ms, "step_ms_p90": 1.01 * step_ms,
        "samples_per_s": 1e6 / step_ms, "tokens_per_s": 1e6 / step_ms, "tflops_per_s": 100.0 / step_ms,
        "mfu_percent": 10.0 / step_ms, "first_steps_s": 1.5,
    }  # fmt: skip
    fields = {
        "schema_version": 1, "status": "completed", "reason": None, "hint": None, "command": "python train.py",
        "overrides": [f"impl={impl}", f"dim={dim}"], "impl": impl, "dim": dim, "seed": 0, "group": "day-sweep",
        "git": {"commit": COMMIT, "dirty": False}, "environment": H200, "impl_resolved": impl,
        "model": "MLPLanguageModel", "steps": 50, "final_train_loss": 3.0, "final_val_loss": None, "throughput": speed,
        "peak_memory_gib": 2.0,
    }  # fmt: skip
    return fields | changes


def failed(impl: str, dim: int = 512, reason: str = "RuntimeError: a bug", **changes: Any) -> dict[str, Any]:
    """result.json of a run that failed before it had numbers."""
    return result(impl, dim, status="failed", reason=reason, throughput=None, peak_memory_gib=None,
                  final_train_loss=None, steps=None) | changes  # fmt: skip


def write_run(folder: Path, fields: dict[str, Any], **config: Any) -> Path:
    """A run's directory: result.json, and config.yaml with precision, data and `config`."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(fields))
    values = {"dim": fields["dim"], "trainer": {"precision": "bf16-true"}, "data": {"source": "stdlib"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(values | config))
    return folder


def write_sweep(folder: Path, results: list[dict[str, Any]], waiting: int = 0, **config: Any) -> Path:
    """A sweep's directory; the same overrides again are repeats; `waiting` more jobs have not begun."""
    folder.mkdir(parents=True)
    jobs: list[Job] = []
    for index, fields in enumerate(results):
        repeat = sum(job.overrides == fields["overrides"] for job in jobs)
        name = f"{index}-{fields['impl']}-dim{fields['dim']}"
        jobs.append(Job(index, fields["overrides"], repeat, name, fields["status"], fields["reason"], 10.0))
        write_run(folder / name, fields, **config)
    jobs += [Job(len(jobs) + more, ["impl=cuda", "dim=512"], more) for more in range(waiting)]
    Ledger(folder, "python train.py -m impl=manual,native,triton dim=512,1024", jobs).write()
    return folder


def wide_sweep(folder: Path, repeats: int = 1) -> Path:
    """Five impls at four dims with every column, losses that parted, and long reasons with and without spaces."""
    memory = (
        "OutOfMemoryError: CUDA out of memory. "
        + "GPU 0 has a total capacity of 139.80 GiB, of which little is free. " * 6
    )
    header = (
        "RuntimeError: impl=cuda cannot run here: " + "/usr/local/cuda-12.9/targets/x86_64-linux" * 6 + ".h is missing"
    )
    ms = {"manual": 321.0, "native": 110.0, "compiled": 98.2, "auto": 98.2, "cuda": 95.0}
    results = []
    for repeat in range(repeats):
        for dim in (512, 1024, 2048, 4096):
            for impl, step in ms.items():
                if dim >= 2048 and impl in ("manual", "cuda"):
                    results.append(failed(impl, dim, memory if impl == "manual" else header))
                    continue
                more = result(impl, dim, step * dim * (1 + 0.01 * repeat))
                more["throughput"] |= {"tokens_per_s": 1_234_567.0, "tflops_per_s": 512.3, "first_steps_s": 123.4}
                more |= {
                    "impl_resolved": "compiled" if impl == "auto" else impl,
                    "cuda_graph": {"captured": True, "why": ""},
                    "early_train_loss": {"steps": 5, "loss": 5.0},
                    "final_train_loss": 3.0 if impl == "native" or dim < 2048 else 3.07 if dim == 2048 else 4.5,
                }
                results.append(more | ({"trace": TRACE} if impl == "auto" else {}))
    return write_sweep(folder, results)


def rich_sweep(folder: Path) -> Path:
    """Two dims, four impls, three repeats, traces, a failure, a wrong loss, and one job to come."""
    ms = {"manual": 21.0, "native": 10.0, "compiled": 8.2, "triton": 8.0}
    results = []
    for repeat in range(3):
        for dim, factor in ((512, 1.0), (1024, 1.4), (2048, 2.4), (4096, 5.0)):
            for impl, step in ms.items():
                measured = step * factor * (1 + 0.01 * repeat)
                more: dict[str, Any] = {"trace": TRACE} if dim == 512 and impl != "manual" else {}
                more["peak_memory_gib"] = factor * (3.0 if impl == "manual" else 2.0)
                results.append(result(impl, dim, measured, **more))
    results.append(failed("cuda", 512, "impl=cuda cannot run here: nvcc 12.9 is needed <and> was not found"))
    results.append(result("cuda", 1024, 9.0, final_train_loss=3.2))
    return write_sweep(folder, results, waiting=1)
