"""When a profiler starts and stops, whatever the run does."""

import pytest
import torch
from conftest import raises
from training.runs import TINY, config, fits, result, train

from fusedmlp.errors import UserError
from fusedmlp.profiling import ranges, session
from fusedmlp.profiling.window import check_window
from fusedmlp.training.checkpoint import Checkpoints
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.step import TrainStep

pytestmark = fits


class Recorder:
    """A tool that writes down what it is asked for."""

    def __init__(self, fails_in: str = ""):
        self.calls: list[str] = []
        self.names: list[str] = []
        self.fails_in = fails_in

    def marker(self, name):
        self.names.append(name)
        return torch.profiler.record_function(name)

    def __getattr__(self, name):
        def call():
            self.calls.append(name)
            if name == self.fails_in:
                raise RuntimeError("CUPTI is taken")

        if name not in ("warm_up", "record", "step", "stop"):
            raise AttributeError(name)
        return call


@pytest.fixture
def tool(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(session, "_make_tool", lambda *_: recorder)
    return recorder


def window(wait: int, warmup: int, active: int) -> tuple[str, ...]:
    return ("profile=nsys", f"profile.wait={wait}", f"profile.warmup={warmup}", f"profile.active={active}")


WHOLE = ["warm_up", "step", "record", "step", "step", "stop"]


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        (window(2, 1, 2), WHOLE),
        ((*window(2, 1, 2), "trainer.accumulate=3"), WHOLE),
        ((*window(2, 1, 2), "trainer.val_every=1", "trainer.checkpoint_every=1"), WHOLE),
        (window(0, 1, 2), WHOLE),
        # the window ends with the run
        (window(0, 0, 6), ["warm_up", "record", *["step"] * 6, "stop"]),
        (window(1, 0, 1), ["warm_up", "record", "step", "stop"]),
    ],
)
def test_it_starts_and_stops_once(tmp_path, tool, settings, calls):
    assert train(tmp_path / "run", *settings).status == "completed"
    assert tool.calls == calls
    found = result(tmp_path / "run")["trace"]
    assert found["recorded_steps"] == calls.count("step") - ("step" in calls[: calls.index("record")])
    assert "reason" not in found


def test_every_part_of_a_step_has_its_range(tmp_path, tool):
    train(tmp_path / "run", *window(2, 1, 2), "trainer.accumulate=2", "trainer.val_every=0")
    counts = {name: tool.names.count(name) for name in tool.names}
    # 3 steps with the ranges on, of 2 micro-batches.
    assert counts == {"step": 3, "data": 6, "forward": 6, "backward": 6, "optimizer": 3} | {
        f"block layers.{i}{ending}": 6 for i in (0, 1) for ending in ("", " backward")
    }
    first = tool.names[: tool.names.index("optimizer")]
    assert first[0] == "step"
    assert first.index("data") < first.index("forward") < first.index("block layers.0") < first.index("backward")
    assert first.index("backward") < first.index("block layers.1 backward") < first.index("block layers.0 backward")


def test_blocks_of_a_transformer(tmp_path, tool):
    train(
        tmp_path / "run", *window(1, 1, 1), "model=gpt", "model.num_heads=2", "model.context=16", "model.num_layers=3"
    )
    assert {name for name in tool.names if name.startswith("block")} == {
        f"block blocks.{i}{ending}" for i in range(3) for ending in ("", " backward")
    }


def test_nothing_is_left_installed(tmp_path, tool, monkeypatch):
    seen = []

    def look(self, trainer, module, *rest):
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.model.modules())
        seen.append((hooks, module.range is ranges.no_range))
        before(self, trainer, module, *rest)

    before = Checkpoints.on_train_batch_end
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", look)
    train(tmp_path / "run", *window(2, 1, 2))
    # After each of the six steps: the window opens after the second and closes after the fifth.
    assert seen == [(0, True), (4, False), (4, False), (4, False), (0, True), (0, True)]


def test_without_a_profile_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "Window", None)
    assert train(tmp_path / "run").status == "completed"
    assert "trace" not in result(tmp_path / "run")


@pytest.mark.parametrize(
    ("step", "error"), [(1, ValueError("boom")), (3, ValueError("boom")), (5, ValueError("boom")), (5, Interrupted(2))]
)
def test_a_run_that_breaks_stops_it_once(tmp_path, tool, monkeypatch, step, error):
    update, updates = TrainStep._update, iter(range(1, 100))

    def broken(self):
        update(self)
        if next(updates) == step:
            raise error

    monkeypatch.setattr(TrainStep, "_update", broken)
    ending = train(tmp_path / "run", *window(2, 1, 2))
    assert ending.status == ("failed" if isinstance(error, ValueError) else "interrupted")
    assert tool.calls == {1: [], 3: ["warm_up", "stop"], 5: ["warm_up", "step", "record", "step", "stop"]}[step]
    found = result(tmp_path / "run")["trace"]
    assert found["recorded_steps"] == (1 if step == 5 else 0)
    assert ("reason" in found) == (step < 5)


def test_a_stop_that_waits_for_its_step_stops_it_once(tmp_path, tool, monkeypatch):
    end = Checkpoints.on_train_batch_end

    def asked(self, trainer, module, *rest):
        if trainer.global_step == 4:
            self.peers.stop.received = 15
        end(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", asked)
    assert train(tmp_path / "run", *window(2, 1, 2)).status == "interrupted"
    assert tool.calls == ["warm_up", "step", "record", "step", "stop"]


@pytest.mark.parametrize("fails_in", ["warm_up", "record", "step", "stop"])
def test_a_profiler_that_breaks_costs_the_trace_and_not_the_run(tmp_path, tool, fails_in):
    tool.fails_in = fails_in
    assert train(tmp_path / "run", *window(2, 1, 2)).status == "completed"
    assert tool.calls.count("stop") == 1
    assert "CUPTI is taken" in result(tmp_path / "run")["trace"]["reason"]
    assert result(tmp_path / "run")["steps"] == 6


def test_the_clock_does_not_count_what_the_profiler_takes(tmp_path, tool, monkeypatch):
    import time

    now, late = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now() + late[0])
    # What takes an hour on every clock.
    tool.__dict__["stop"] = lambda: late.__setitem__(0, 3600.0)
    train(tmp_path / "run", *window(1, 1, 1), "trainer.max_steps=6")
    speed = result(tmp_path / "run")["throughput"]
    # Six steps without the first one and the two in the window.
    assert speed["steady_steps"] == 3
    assert speed["samples_per_s"] > 5 * 8 / 3600


def test_steps_that_a_profiler_slows_do_not_count(tmp_path, tool, monkeypatch):
    import time

    now, late = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now() + late[0])
    # Between two steps of the window, where the clock runs.
    tool.__dict__["step"] = lambda: late.__setitem__(0, late[0] + 100.0)
    train(tmp_path / "run", *window(2, 2, 2), "trainer.max_steps=10")
    speed = result(tmp_path / "run")["throughput"]
    assert speed["steady_steps"] == 10 - 4 - 1
    assert speed["step_ms_p90"] < 50_000
    assert speed["samples_per_s"] > 5 * 8 / 100
    # The window leaves one step: better all than none.
    train(tmp_path / "all", *window(1, 2, 3), "trainer.max_steps=6")
    speed = result(tmp_path / "all")["throughput"]
    assert speed["steady_steps"] == 5
    assert speed["step_ms_p90"] > 50_000


def test_a_window_that_does_not_fit_is_an_error_before_training(tmp_path):
    ending = train(tmp_path / "run", "profile=torch")
    assert ending.status == "failed"
    assert "profile.wait=20 + profile.warmup=3 + profile.active=5 are 28 steps and the run has 6" in ending.reason
    assert "steps" not in result(tmp_path / "run")
    check_window(2, 1, 3, 6)
    with raises(UserError, "trainer.max_steps"):
        check_window(2, 1, 4, 6)


def test_a_resumed_run_has_fewer_steps(tmp_path):
    train(tmp_path / "first", "trainer.max_steps=4")
    resumed = ("trainer.max_steps=6", f"resume={tmp_path / 'first'}", "profile=torch", "profile.warmup=1")
    assert "the run has 2" in train(tmp_path / "a", *resumed, "profile.wait=1", "profile.active=1").reason
    ending = train(tmp_path / "b", *resumed, "profile.wait=0", "profile.active=1")
    assert (ending.status, result(tmp_path / "b")["trace"]["steps"]) == ("completed", 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("profile.tool=perfetto",), ("profile.tool=perfetto", "torch, nsys, memory, ncu")),
        (("profile=torch", "profile.warmup=0"), ("profile.warmup=0", "at least 1")),
        (("profile=torch", "profile.active=0"), ("profile.active=0", "at least 1")),
        (("profile=torch", "profile.wait=-1"), ("profile.wait=-1", "at least 0")),
        (("profile=ncu", "trainer.max_steps=40"), ("profile.kernel is not set", "regular expression")),
        (("profile=memory",), ("profile=memory", "GPU", "profile=torch")),
        (("profile=nsys", "trainer.max_steps=40"), ("profile=nsys", "GPU", "profile=torch")),
    ],
)
def test_a_profile_that_cannot_be_had(tmp_path, settings, words):
    ending = train(tmp_path / "run", *settings)
    assert ending.status == "failed"
    assert all(word in ending.reason for word in words), ending.reason
    assert not ending.bug


def test_never_two_profilers(tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "12")
    ending = train(tmp_path / "run", "profile=torch", "trainer.max_steps=40")
    assert ending.status == "failed"
    assert "only one of them" in ending.reason


def test_the_demonstration_of_a_sync_reads_the_loss(tmp_path, monkeypatch):
    assert config("experiment=sync_demo").trainer.read_loss_every_step
    assert not config().trainer.read_loss_every_step
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(self.requires_grad))
    assert train(tmp_path / "off").status == "completed"
    off = reads.count(True)
    assert train(tmp_path / "on", "trainer.read_loss_every_step=true").status == "completed"
    assert (off, reads.count(True)) == (0, 6)
    assert "trainer.max_steps=6" in TINY
