"""Training on a GPU: no step waits for it, and precision is what was asked for."""

import math

import pytest
import torch
from training.runs import curve, fits, result, train, waiting_forbidden

pytestmark = [fits, pytest.mark.gpu]

ON_GPU = ("trainer.accelerator=gpu", "dim=128", "data.batch_size=64", "trainer.checkpoint=false")


@pytest.fixture
def forbid_waiting():
    with waiting_forbidden():
        yield


@pytest.mark.parametrize("cuda_graph", ["false", "true"])
@pytest.mark.parametrize(
    ("model", "precision", "accumulate"), [("mlp", "bf16-true", 1), ("mlp", "bf16-mixed", 4), ("gpt", "bf16-mixed", 1)]
)
def test_no_step_waits_for_the_gpu(tmp_path, forbid_waiting, impl, model, precision, accumulate, cuda_graph):
    ending = train(
        tmp_path / "run", *ON_GPU, f"model={model}", f"impl={impl}", f"trainer.precision={precision}",
        f"trainer.accumulate={accumulate}", "trainer.max_steps=50", "trainer.log_every=10", "trainer.val_every=20",
        f"trainer.cuda_graph={cuda_graph}",
    )  # fmt: skip
    assert ending.status == "completed", ending.reason
    assert result(tmp_path / "run")["cuda_graph"]["steps_replayed"] == (47 if cuda_graph == "true" else 0)
    assert list(curve(tmp_path / "run")) == [10, 20, 30, 40, 50]
    assert list(curve(tmp_path / "run", "val/loss")) == [20, 40, 50]


@pytest.mark.parametrize("cuda_graph", ["false", "true"])
@pytest.mark.parametrize("max_grad_norm", ["null", "1.0"])
@pytest.mark.parametrize("adamw", ["native", "triton"])
def test_no_optimizer_waits_for_the_gpu(tmp_path, forbid_waiting, adamw, max_grad_norm, cuda_graph):
    ending = train(
        tmp_path / "run", *ON_GPU, "impl=native", f"trainer.adamw={adamw}", f"trainer.max_grad_norm={max_grad_norm}",
        "trainer.accumulate=2", "trainer.max_steps=20", "trainer.log_every=5", f"trainer.cuda_graph={cuda_graph}",
    )  # fmt: skip
    assert ending.status == "completed", ending.reason
    assert list(curve(tmp_path / "run")) == [5, 10, 15, 20]


def test_the_check_sees_a_step_that_waits(tmp_path, forbid_waiting, monkeypatch):
    from fusedmlp.training.metrics import DeviceMetrics

    add = DeviceMetrics.add

    def add_and_read(self, name, value, weight=1.0):
        assert value.item() is not None
        add(self, name, value, weight)

    monkeypatch.setattr(DeviceMetrics, "add", add_and_read)
    ending = train(tmp_path / "run", *ON_GPU, "trainer.max_steps=10", "trainer.cuda_graph=false")
    assert ending.status == "failed"
    assert "synchronizing CUDA operation" in ending.reason


@pytest.mark.parametrize("precision", ["auto", "32-true", "bf16-mixed", "bf16-true"])
def test_every_precision_learns_the_same(tmp_path, precision):
    train(tmp_path / "run", *ON_GPU, f"trainer.precision={precision}", "trainer.max_steps=20", "trainer.log_every=20")
    found = result(tmp_path / "run")
    assert found["final_train_loss"] == pytest.approx(math.log(256), abs=0.2)
    assert found["environment"]["gpu"] == torch.cuda.get_device_name()
    assert 0 < found["peak_memory_gib"] < 1


def test_speed_and_its_share_of_the_peak(tmp_path):
    train(tmp_path / "run", *ON_GPU, "dim=1024", "data.batch_size=1024", "trainer.max_steps=60", "trainer.log_every=20",
          "trainer.accumulate=2")  # fmt: skip
    found = result(tmp_path / "run")["throughput"]
    assert found["tflops_per_s"] == pytest.approx(found["samples_per_s"] * found["flops_per_sample"] / 1e12)
    assert 0 < found["data_wait_percent"] < 100
    if found["peak_tflops"] is not None:
        assert 0 < found["mfu_percent"] < 100
        assert found["peak_source"] == "table"


def test_resume_on_the_gpu(tmp_path):
    # A constant learning rate, so that the curve does not depend on max_steps.
    settings = (*ON_GPU, "trainer.checkpoint=true", "trainer.warmup_steps=0", "trainer.min_learning_rate=1e-3")
    train(tmp_path / "whole", *settings, "trainer.max_steps=8")
    train(tmp_path / "first", *settings, "trainer.max_steps=4")
    train(tmp_path / "second", *settings, "trainer.max_steps=8", f"resume={tmp_path / 'first'}")
    joined = curve(tmp_path / "first") | curve(tmp_path / "second")
    whole = curve(tmp_path / "whole")
    assert joined.keys() == whole.keys()
    for step in whole:
        assert float(joined[step]) == pytest.approx(float(whole[step]), rel=1e-4)


def test_out_of_memory_is_a_reason_and_the_next_run_has_the_memory(tmp_path):
    # One activation alone is 8e6 x 4096 numbers, 131 GB in fp32.
    huge = ("dim=4096", "data.batch_size=8000000", "data.num_tokens=20000000")
    ending = train(tmp_path / "huge", *ON_GPU, *huge)
    assert ending.status == "failed"
    assert ending.reason.startswith("out of memory")
    assert "data.batch_size" in ending.hint
    assert train(tmp_path / "small", *ON_GPU).status == "completed"
    assert result(tmp_path / "small")["peak_memory_gib"] < 1
