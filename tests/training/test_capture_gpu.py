"""Step capture on a GPU: real graphs, and what cannot become one."""

import gc
import sys
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from training.runs import RANDOM_BYTES, TINY, config, curve, fits, result, train

from fusedmlp import auto, impls
from fusedmlp.auto import table
from fusedmlp.models import MLPLanguageModel
from fusedmlp.training import data_windows
from fusedmlp.training.cuda_graph import CudaGraphs
from fusedmlp.training.run import run

pytestmark = [fits, pytest.mark.gpu]

ON_GPU = ("trainer.accelerator=gpu", "dim=128", "data.batch_size=64", "trainer.checkpoint=false")
CAPTURED, EAGER = "trainer.cuda_graph=true", "trainer.cuda_graph=false"


def losses(folder):
    return {step: float(loss) for step, loss in curve(folder).items()}


def facts(folder):
    return result(folder)["cuda_graph"]


@pytest.mark.parametrize(("precision", "accumulate"), [("32-true", 1), ("bf16-true", 4), ("bf16-mixed", 1)])
def test_the_same_losses_to_rounding(tmp_path, impl, accumulate, precision):
    settings = (
        *ON_GPU, f"impl={impl}", f"trainer.accumulate={accumulate}", f"trainer.precision={precision}",
        "trainer.max_steps=200", "trainer.val_every=90", "trainer.learning_rate=3e-4",
    )  # fmt: skip
    for name, captured in (("eager", EAGER), ("captured", CAPTURED)):
        ending = train(tmp_path / name, *settings, captured)
        assert ending.status == "completed", ending.reason
    assert facts(tmp_path / "captured")["steps_replayed"] == 197
    # Where rounding differs at all, 200 steps make more of it.
    tolerance = 1e-3 if precision == "32-true" else 5e-3
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "eager"), rel=tolerance)
    norms = (curve(tmp_path / name, "train/grad_norm") for name in ("captured", "eager"))
    first, second = ({step: float(norm) for step, norm in curve.items()} for curve in norms)
    assert first == pytest.approx(second, rel=20 * tolerance)
    assert curve(tmp_path / "captured", "lr") == curve(tmp_path / "eager", "lr")


@pytest.mark.parametrize(("first", "second"), [(CAPTURED, EAGER), (EAGER, CAPTURED), (CAPTURED, CAPTURED)])
def test_resume_from_captured_to_not_and_back(tmp_path, first, second):
    # A constant learning rate, so that the curve does not depend on max_steps.
    settings = (*ON_GPU, "trainer.checkpoint=true", "trainer.warmup_steps=0", "trainer.min_learning_rate=1e-3",
                "trainer.accumulate=2")  # fmt: skip
    train(tmp_path / "whole", *settings, "trainer.max_steps=20", EAGER)
    train(tmp_path / "one", *settings, "trainer.max_steps=10", first)
    ending = train(tmp_path / "two", *settings, "trainer.max_steps=20", second, f"resume={tmp_path / 'one'}")
    assert ending.status == "completed", ending.reason
    joined = losses(tmp_path / "one") | losses(tmp_path / "two")
    assert joined == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_auto_captures_small_kernels_and_not_large_ones(tmp_path):
    train(tmp_path / "small", *ON_GPU, "model.num_layers=8", "trainer.max_steps=8")
    found = facts(tmp_path / "small")
    assert found["captured"], found["reason"]
    assert 0 < found["launch_ms"] < 1e3
    large = ("dim=8192", "data.batch_size=8192", "trainer.precision=bf16-true", "trainer.max_steps=6")
    train(tmp_path / "large", *ON_GPU, *large)
    found = facts(tmp_path / "large")
    assert not found["captured"]
    assert found["launch_ms"] < found["gpu_ms"]


def test_the_next_run_has_the_memory(tmp_path):
    taken = []
    for name in ("one", "two", "three"):
        train(tmp_path / name, *ON_GPU, "dim=1024", CAPTURED)
        gc.collect()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved())
    assert taken[2] == taken[1]


# On many cores Lightning advises the other Trainer to use more of them.
@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_keeps_the_workspace_of_its_products_when_another_trainer_is_set_up(dtype):
    # Of so few and long rows cuBLAS adds up partial products, in its workspace.
    a, b = (torch.randn(64, 2**14, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty(64, 64, device="cuda", dtype=dtype)
    graphs = CudaGraphs(torch.device("cuda", 0))

    def product():
        torch.mm(a, b.t(), out=out)

    with graphs.aside():
        product()
    expected = out.clone()
    graph = graphs.record(product)
    out.zero_()
    other = Trainer(accelerator="gpu", devices=1, logger=False, enable_progress_bar=False)
    other.validate(BoringModel(), verbose=False)
    torch.cuda.empty_cache()
    taken = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    graph.replay()
    assert torch.equal(out, expected)
    assert not taken.any(), "the replay wrote into it"


class ReadsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy if dy.sum().item() < 1e9 else None


@pytest.fixture(params=["a value is read", "a gradient is read", "the device is waited for"])
def uncapturable(request, monkeypatch):
    """Makes a model do what no graph can hold; the last is seen only when it is recorded."""
    forward = MLPLanguageModel.forward

    def reading(self, tokens):
        if request.param == "a value is read":
            assert tokens.sum().item() >= 0
        elif request.param == "a gradient is read":
            return ReadsItsGradient.apply(torch.nn.functional.dropout(forward(self, tokens), 0.1, self.training))
        else:
            torch.cuda.synchronize()
        # A failed recording must not keep the generator.
        return torch.nn.functional.dropout(forward(self, tokens), 0.1, self.training)

    monkeypatch.setattr(MLPLanguageModel, "forward", reading)
    return request.param


def test_what_cannot_be_captured(tmp_path, uncapturable, monkeypatch):
    ending = train(tmp_path / "asked", *ON_GPU, CAPTURED, "trainer.max_steps=8")
    assert (ending.status, ending.bug) == ("failed", False)
    assert ending.reason.startswith("trainer.cuda_graph=true: the step cannot be captured")
    assert "test_capture_gpu.py:" in ending.reason, "says where"
    assert list(curve(tmp_path / "asked")) == [1, 2, 3]

    # With auto the run goes on, and PyTorch's allocator is in order after it.
    monkeypatch.setattr("fusedmlp.training.capture.worthwhile", lambda *_: True)
    assert train(tmp_path / "auto", *ON_GPU, "trainer.max_steps=8").status == "completed"
    assert not facts(tmp_path / "auto")["captured"]
    assert train(tmp_path / "eager", *ON_GPU, EAGER, "trainer.max_steps=8").status == "completed"
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
    torch.cuda.empty_cache()
    monkeypatch.undo()
    assert train(tmp_path / "after", *ON_GPU, CAPTURED).status == "completed"
    assert facts(tmp_path / "after")["captured"]


def test_a_failed_recording_leaves_no_memory_behind(tmp_path, monkeypatch):
    forward, taken = MLPLanguageModel.forward, []

    def waiting(self, tokens):
        logits = forward(self, tokens)
        torch.cuda.synchronize()
        return logits

    monkeypatch.setattr(MLPLanguageModel, "forward", waiting)
    monkeypatch.setattr("fusedmlp.training.capture.worthwhile", lambda *_: True)
    for name in ("one", "two", "three"):
        assert train(tmp_path / name, *ON_GPU, "dim=1024", "trainer.max_steps=6").status == "completed"
        assert "test_capture_gpu.py:" in facts(tmp_path / name)["reason"]
        gc.collect()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved())
    assert taken[2] == taken[1]


def test_random_numbers_go_on_in_replays(tmp_path, monkeypatch):
    """Dropout in the model: every replay draws others, and the same as without capture."""
    forward = MLPLanguageModel.forward
    monkeypatch.setattr(
        MLPLanguageModel, "forward",
        lambda self, tokens: torch.nn.functional.dropout(forward(self, tokens), 0.5, self.training),
    )  # fmt: skip
    for name, captured in (("eager", EAGER), ("captured", CAPTURED)):
        train(tmp_path / name, *ON_GPU, captured, "trainer.max_steps=20", "trainer.val_every=8")
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)


@pytest.mark.skipif(impls.unavailable("compiled") is not None, reason="needs impl=compiled")
def test_what_another_process_has_measured_is_compiled_before_it_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path / "cache"))
    settings = (*ON_GPU, CAPTURED, "impl=auto", "trainer.max_steps=8")
    train(tmp_path / "measured", *settings)
    known = {
        where: {key: replace(entry, ms={"native": 1.0, "compiled": 0.1}) for key, entry in entries.items()
                if key.endswith("replayed")}
        for where, entries in auto.choices().items()
    }  # fmt: skip
    assert any(known.values())
    table.replace(tmp_path / "table.json", table.dump(known))
    auto.import_table(tmp_path / "table.json")
    impls.load("compiled")._copies.clear()
    torch._dynamo.reset()
    ending = train(tmp_path / "known", *settings)
    assert ending.status == "completed", ending.reason
    assert facts(tmp_path / "known")["captured"]
    assert "compiled" in auto.used().values()
    assert losses(tmp_path / "known") == pytest.approx(losses(tmp_path / "measured"), rel=5e-3)
    auto.forget()


@pytest.mark.parametrize("odd", [20, 21, 23])
def test_a_batch_of_another_shape_after_replays_that_are_under_way(tmp_path, monkeypatch, odd):
    """At the beginning of an accumulation and within it: the graphs go, and what they have added up stays."""
    starts = data_windows.WindowOrder.starts
    monkeypatch.setattr(
        data_windows.WindowOrder, "starts", lambda self, i: starts(self, i)[: 5 if i == odd else self.batch_size]
    )
    monkeypatch.setattr("fusedmlp.training.capture.worthwhile", lambda *_: True)
    settings = (*ON_GPU, "trainer.accumulate=4", "trainer.max_steps=12", "trainer.log_every=12")
    for name, captured in (("eager", EAGER), ("auto", "trainer.cuda_graph=auto")):
        ending = train(tmp_path / name, *settings, captured)
        assert ending.status == "completed", ending.reason
    assert facts(tmp_path / "auto")["steps_replayed"] == 2
    for value in ("train/loss", "train/grad_norm"):
        (ours,), (theirs,) = (curve(tmp_path / name, value).values() for name in ("auto", "eager"))
        assert float(ours) == pytest.approx(float(theirs), rel=1e-3)


@pytest.mark.parametrize("wait", [2, 3])
def test_a_window_that_opens_just_before_a_compiled_model_is_recorded(tmp_path, monkeypatch, wait):
    """The ranges around blocks are hooks, for which TorchDynamo compiles the model anew."""
    init = MLPLanguageModel.__init__

    def compiled(self, *args, **keywords):
        init(self, *args, **keywords)
        self.compile()

    monkeypatch.setattr(MLPLanguageModel, "__init__", compiled)
    window = ("profile=torch", f"profile.wait={wait}", "profile.warmup=1", "profile.active=2")
    ending = train(tmp_path / "run", *ON_GPU, "impl=native", "trainer.max_steps=12", *window, "trainer.cuda_graph=auto")
    assert ending.status == "completed", ending.reason
    assert result(tmp_path / "run")["trace"]["recorded_steps"] == 2


def test_memory_of_the_host_that_a_replay_would_read_after_it_is_freed(tmp_path, monkeypatch):
    """PyTorch refuses to record a copy from memory that is not pinned; before 2.11 replays copy what is there then."""
    forward = MLPLanguageModel.forward

    def scaled(self, tokens):
        logits = forward(self, tokens)
        scale = torch.linspace(0.5, 1.0, logits.shape[-1])
        return logits * scale.to(logits.device, non_blocking=True)

    monkeypatch.setattr(MLPLanguageModel, "forward", scaled)
    train(tmp_path / "eager", *ON_GPU, EAGER, "trainer.max_steps=20")
    ending = train(tmp_path / "captured", *ON_GPU, CAPTURED, "trainer.max_steps=20")
    if ending.status == "failed":
        assert "the step cannot be captured" in ending.reason
    else:
        assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)


class Layers(nn.Module):
    """Somebody else's network: of one kind of layers that has a state, random numbers or kernels of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(256, 32), nn.Linear(32, 256)
        self.layer = {
            "norm": lambda: nn.BatchNorm1d(32),
            "recurrent": lambda: nn.LSTM(32, 32, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True),
            "checkpoint": lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()),
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)),
            "convolution": lambda: nn.Conv1d(32, 32, 3, padding=1, groups=32),
        }[kind]()

    def forward(self, tokens):
        x = nn.functional.dropout(self.embed(tokens), 0.1, self.training)
        if self.kind in ("norm", "convolution"):
            x = self.layer(x.mT).mT
        elif self.kind == "recurrent":
            x = self.layer(x)[0]
        elif self.kind == "attention":
            x = self.layer(x, x, x, need_weights=False)[0]
        elif self.kind == "checkpoint":
            x = checkpoint(self.layer, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = self.layer(x)
        return self.head(x)


class GoesOn(nn.Module):
    """A recurrent network that begins each batch where the one before has ended."""

    hidden: tuple[torch.Tensor, ...] | None = None

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(256, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 256)

    def forward(self, tokens):
        before = None if self.hidden is None else tuple(tensor.detach() for tensor in self.hidden)
        x, self.hidden = self.lstm(self.embed(tokens), before)
        return self.head(x)


def test_a_network_that_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "layers", sys.modules[__name__])
    monkeypatch.setattr("fusedmlp.training.capture.worthwhile", lambda *_: True)
    tiny = [override for override in (*TINY, *RANDOM_BYTES, *ON_GPU) if "num_layers" not in override]
    for name, captured in (("eager", EAGER), ("auto", "trainer.cuda_graph=auto"), ("asked", CAPTURED)):
        overrides = [
            *tiny, f"data.cache_dir={tmp_path / 'cache'}", "model=torch_module", "model.target=layers.GoesOn",
            "model.context=16", "data.batch_size=16", "trainer.max_steps=12", captured,
        ]  # fmt: skip
        ending = run(config(*overrides), tmp_path / name, overrides)[1]
        assert ending.status == ("failed" if name == "asked" else "completed"), ending.reason
        if name != "eager":
            assert "it reads the tensor net.hidden[0]" in facts(tmp_path / name)["reason"]
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)


@pytest.mark.parametrize("kind", ["norm", "recurrent", "attention", "checkpoint", "spectral", "convolution"])
def test_somebody_elses_layers(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "layers", sys.modules[__name__])
    tiny = [override for override in (*TINY, *RANDOM_BYTES, *ON_GPU) if "num_layers" not in override]
    for name, captured in (("eager", EAGER), ("captured", CAPTURED)):
        overrides = [
            *tiny, f"data.cache_dir={tmp_path / 'cache'}", "model=torch_module", "model.target=layers.Layers",
            f"+model.kwargs.kind={kind}", "model.context=16", "trainer.max_steps=20", "trainer.val_every=8",
            "trainer.accumulate=2", captured,
        ]  # fmt: skip
        ending = run(config(*overrides), tmp_path / name, overrides)[1]
        assert ending.status == "completed", ending.reason
    assert facts(tmp_path / "captured")["steps_replayed"] == 17
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)
    assert curve(tmp_path / "captured", "val/loss").keys() == curve(tmp_path / "eager", "val/loss").keys()
