"""Two ranks train as one process with twice the batch, under DDP and FSDP2, and go on from each other's checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from conftest import interpreter_environment
from training.distributed.pair import ON_GPUS, train_all
from training.runs import curve

GPT = ("model=gpt", "dim=16", "model.num_layers=2", "model.num_heads=2", "model.context=8", "trainer.max_steps=4")
# Two micro-batches a step, gradients that are clipped in every one, a learning rate that does not depend on the end.
MLP = ("trainer.accumulate=2", "trainer.max_grad_norm=0.5", "trainer.warmup_steps=0", "trainer.min_learning_rate=1e-3")
# Rounding of sums in another order, over a few steps; a GPU's products of other sizes come from other kernels besides.
CLOSE = {"rel": 1e-4, "abs": 1e-4} if ON_GPUS else {"rel": 2e-5, "abs": 2e-5}


def a_run(folder: Path, name: str, strategy: str, *overrides: str) -> dict:
    """A run with 16 samples in a batch: of one device, or 8 on each of two."""
    several = strategy != "one"
    devices = ("data.batch_size=8", f"trainer={strategy}", "trainer.devices=2") if several else ("data.batch_size=16",)
    return {
        "folder": str(folder / name),
        "world_size": 2 if several else 1,
        "overrides": [f"data.cache_dir={folder / 'cache'}", "trainer.val_every=4", *overrides, *devices],
    }


def same_curves(one: Path, other: Path) -> None:
    for metric, count in (("train/loss", 4), ("train/grad_norm", 4), ("val/loss", 1)):
        expected, found = curve(one, metric), curve(other, metric)
        assert found.keys() == expected.keys()
        assert len(found) >= count
        for step, value in expected.items():
            assert float(found[step]) == pytest.approx(float(value), **CLOSE), (
                f"{metric} at step {step} of {other.name}"
            )


@pytest.mark.slow
def test_native_and_compiled(tmp_path):
    runs = []
    for impl in ("native", "compiled"):
        overrides = (*MLP, f"impl={impl}", "trainer.max_steps=4")
        runs += [a_run(tmp_path, f"{impl}-{way}", way, *overrides) for way in ("one", "ddp", "fsdp")]
    # Eight steps at once, and four that go on from each way's four.
    longer = (*MLP, "impl=native", "trainer.max_steps=8")
    runs.append(a_run(tmp_path, "longer", "one", *longer))
    for before, after in (("ddp", "fsdp"), ("fsdp", "one"), ("one", "fsdp"), ("fsdp", "ddp"), ("ddp", "one")):
        resume = f"resume={tmp_path / f'native-{before}'}"
        runs.append(a_run(tmp_path, f"{before}-then-{after}", after, *longer, resume))
    runs.append(a_run(tmp_path, "bf16", "fsdp", *longer, "trainer.max_steps=4", "trainer.precision=bf16-mixed"))
    train_all(runs)

    for impl in ("native", "compiled"):
        for way in ("ddp", "fsdp"):
            same_curves(tmp_path / f"{impl}-one", tmp_path / f"{impl}-{way}")
    whole = curve(tmp_path / "longer")
    resumed = list(tmp_path.glob("*-then-*"))
    assert len(resumed) == 5
    for folder in resumed:
        losses = curve(folder)
        assert list(losses) == [5, 6, 7, 8], "no step twice, none left out"
        for step, loss in losses.items():
            assert float(loss) == pytest.approx(float(whole[step]), **CLOSE), f"step {step} of {folder.name}"
    for step, loss in curve(tmp_path / "bf16").items():
        assert float(loss) == pytest.approx(float(curve(tmp_path / "native-one")[step]), abs=0.02)
    one_result_with_the_numbers_of_both(tmp_path / "native-ddp")
    checkpoints_are_the_same(tmp_path / "native-one", tmp_path / "native-fsdp")


def one_result_with_the_numbers_of_both(folder: Path) -> None:
    found = json.loads((folder / "result.json").read_text())
    assert found["ranks"] == {"strategy": "ddp", "devices": 2, "num_nodes": 1}
    speed = found["throughput"]
    assert speed["devices"] == 2
    assert speed["tokens_per_s"] == pytest.approx(2 * speed["tokens_per_s_per_device"])
    # The deciles of three steps lie a fifth of the way from the outer ones to the median.
    median, outer = speed["step_ms_median"], speed["step_ms_p10"] + speed["step_ms_p90"]
    mean_ms = (median + (outer - 0.4 * median) / 0.8) / 3
    assert speed["steady_steps"] == 3
    # 2 ranks x 2 micro-batches x 8 samples a step
    assert speed["samples_per_s"] * mean_ms / 1e3 == pytest.approx(32)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["checkpoints", "config.yaml", "metrics.csv", "result.json", "train.log"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.ckpt"]
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 4 + 1, "a row of each step and of validation"


def checkpoints_are_the_same(one: Path, other: Path) -> None:
    """Names, shapes and the order of the optimizer's state: what was trained on several devices loads without them."""
    first, second = (torch.load(path / "checkpoints" / "last.ckpt", "cpu", weights_only=True) for path in (one, other))
    assert list(first["state_dict"]) == list(second["state_dict"])
    for name, value in first["state_dict"].items():
        assert type(second["state_dict"][name]) is torch.Tensor
        # Not element by element: Adam's step for a gradient that rounds to either side of zero is as long as any.
        assert (second["state_dict"][name] - value).norm() <= 1e-3 * value.norm()
    (state,), (other_state,) = first["optimizer_states"], second["optimizer_states"]
    for number, values in state["state"].items():
        for name, value in values.items():
            assert other_state["state"][number][name].shape == value.shape


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPUS, reason="needs two CUDA GPUs")
def test_cuda_on_two_gpus(tmp_path):
    overrides = (*GPT, "impl=cuda", "model.num_layers=1")
    train_all([a_run(tmp_path, way, way, *overrides) for way in ("one", "ddp", "fsdp")])
    for way in ("ddp", "fsdp"):
        same_curves(tmp_path / "one", tmp_path / way)


@pytest.mark.slow
def test_triton(tmp_path):
    environment = {} if ON_GPUS else interpreter_environment()
    overrides = (*GPT, "impl=triton", "model.num_layers=1")
    train_all([a_run(tmp_path, way, way, *overrides) for way in ("one", "ddp", "fsdp")], **environment)
    for way in ("ddp", "fsdp"):
        same_curves(tmp_path / "one", tmp_path / way)


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPUS, reason="needs two CUDA GPUs")
def test_no_step_waits_for_a_gpu(tmp_path):
    overrides = ("trainer.max_steps=50", "trainer.log_every=10", "trainer.val_every=20", "trainer.checkpoint=false")
    runs = [
        a_run(tmp_path, f"{way}-{accumulate}", way, *GPT, *overrides, f"trainer.accumulate={accumulate}")
        for way in ("ddp", "fsdp")
        for accumulate in (1, 4)
    ]
    train_all([run | {"waits": False} for run in runs])
    for run in runs:
        assert list(curve(Path(run["folder"]))) == [10, 20, 30, 40, 50]
