"""Profiles on a GPU."""

import pickle

import pytest
import torch
from training.runs import fits, result, train

from fusedmlp.profiling import trace
from fusedmlp.profiling.memory import FILE, OUT_OF_MEMORY_FILE

pytestmark = [fits, pytest.mark.gpu]

ON_GPU = (
    "trainer.accelerator=gpu",
    "dim=256",
    "data.batch_size=256",
    "trainer.checkpoint=false",
    "trainer.max_steps=30",
    "trainer.cuda_graph=false",
)
WINDOW = ("profile.wait=10", "profile.warmup=2", "profile.active=4")


def test_a_trace_of_every_impl(tmp_path, impl):
    settings = (*ON_GPU, *WINDOW, "profile=torch", f"impl={impl}", "trainer.precision=bf16-true")
    assert train(tmp_path / "run", *settings).status == "completed"
    saved = result(tmp_path / "run")["trace"]
    assert saved["device"] == torch.cuda.get_device_name()
    assert saved["steps"] == 4
    assert saved["kernels_per_step"] > 10
    # Two layers and the head; some impls have more launches than kernels are counted for a copy, none fewer.
    assert saved["launches_per_step"] == pytest.approx(saved["kernels_per_step"], rel=0.1)
    assert 0 < saved["gpu_busy_percent"] <= 100
    assert saved["kinds"].keys() & {"GEMM", "GEMM+GELU"}
    assert saved["kinds"]["optimizer"]["ms"] > 0
    assert saved["ranges"]["forward"]["gpu_ms"] > 0
    assert saved["ranges"]["block layers.1 backward"]["gpu_ms"] > 0
    phases = sum(saved["ranges"][name]["gpu_ms"] for name in ("data", "forward", "backward", "optimizer"))
    # What is left are the sums of the metrics.
    assert phases == pytest.approx(saved["kernel_ms"], rel=0.25)
    assert saved["launch_to_start_ms"]["median"] > 0


def test_reading_the_loss_is_seen(tmp_path):
    settings = (
        *ON_GPU, *WINDOW, "profile=torch", "trainer.precision=bf16-true", "dim=1024", "data.batch_size=8192",
        "trainer.log_every=30",
    )  # fmt: skip
    train(tmp_path / "without", *settings)
    train(tmp_path / "with", *settings, "trainer.read_loss_every_step=true")
    without, with_it = (result(tmp_path / name)["trace"] for name in ("without", "with"))
    assert without["blocking_calls_per_step"] < 1
    assert with_it["blocking_calls_per_step"] >= 1
    assert with_it["cpu_blocked_ms"] > without["cpu_blocked_ms"]


def test_memory(tmp_path):
    settings = (*ON_GPU, "profile=memory", "data.batch_size=4096")
    assert train(tmp_path / "run", *settings).status == "completed"
    found = pickle.loads((tmp_path / "run" / FILE).read_bytes())
    assert any(event["action"] == "alloc" for event in found["device_traces"][torch.cuda.current_device()])
    saved = result(tmp_path / "run")
    assert set(saved["trace"]["peak_gib"]) == {"step", "data", "forward", "backward", "optimizer"}
    assert max(saved["trace"]["peak_gib"].values()) == pytest.approx(saved["peak_memory_gib"], rel=0.1)


def test_out_of_memory(tmp_path):
    huge = ("dim=4096", "data.batch_size=8000000", "data.num_tokens=20000000")
    assert train(tmp_path / "run", *ON_GPU, "profile=memory", *huge).reason.startswith("out of memory")
    assert (tmp_path / "run" / OUT_OF_MEMORY_FILE).stat().st_size > 1000


def test_kernels_of_a_trace_are_linked_to_their_launches(tmp_path):
    from fusedmlp.profiling.steps import find_steps

    train(tmp_path / "run", *ON_GPU, *WINDOW, "profile=torch")
    read = trace.read(tmp_path / "run" / trace.FILE)
    found = find_steps(read)
    # The kernels of the steps before are recorded too, and their launches are not.
    recorded = read.gpu.start >= read.calls.start.min()
    assert (found.launch[recorded] >= 0).mean() > 0.9
    assert (read.gpu.start[found.launch >= 0] >= read.calls.start[found.launch[found.launch >= 0]]).all()
