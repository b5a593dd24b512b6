"""Step capture without a GPU: recordings that are played by doing the work, so that all around them can be tried."""

import _thread
import contextlib
import functools
import gc
import random
import threading
import warnings
import weakref

import numpy
import pytest
import torch
from lightning.pytorch import Callback
from training.runs import curve, fits, result, rows, train

from fusedmlp import auto, impls
from fusedmlp.models import MLPLanguageModel
from fusedmlp.training import capture, cuda_graph, data_windows, step, task
from fusedmlp.training.capture_choice import in_words, obstacle
from fusedmlp.training.cuda_graph import CudaGraphs, Staging
from fusedmlp.training.throughput import HostEvent

pytestmark = fits

CAPTURED = ("trainer.cuda_graph=true", "trainer.max_steps=30")


class Played:
    """What a graph does, done anew in every replay.

    Like a graph it reads its inputs at the recorded addresses, and its gradients are not to be seen from outside.
    """

    def __init__(self, function, held):
        self.function, self.held, self.count = function, held, 0

    def replay(self):
        self.count += 1
        parameters = self.function.func.__self__.step.parameters
        for parameter, gradient in self.held.items():
            parameter.grad = gradient
        self.function()
        for parameter in parameters:
            self.held[parameter], parameter.grad = parameter.grad, None


class Event:
    """An event whose order matters: waiting for one that was never recorded is an error."""

    recorded = False

    def record(self):
        self.recorded = True

    def wait(self):
        assert self.recorded


class FakeGraphs:
    """Stands for `CudaGraphs`."""

    last: "FakeGraphs"
    fails_with: Exception | None = None
    waits_at: str | None = None
    launch_ms, gpu_ms = 9.0, 10.0  # of a step

    def __init__(self, device):
        FakeGraphs.last = self
        self.recordings: list[Played] = []
        self.held: dict[torch.Tensor, torch.Tensor | None] = {}
        self.drained = self.given_up = self.eager = 0

    @contextlib.contextmanager
    def aside(self):
        self.eager += 1
        yield

    copying = contextlib.nullcontext
    event = Event

    def mark(self):
        return self

    def elapsed_time(self, other):
        return self.gpu_ms

    def drain(self):
        self.drained += 1

    @contextlib.contextmanager
    def watch(self, found):
        yield
        if self.waits_at:
            found.append(self.waits_at)

    def record(self, function):
        if self.fails_with is not None:
            raise self.fails_with
        self.recordings.append(Played(function, self.held))
        return self.recordings[-1]

    def give_up(self):
        self.given_up += 1


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that sharing out the work is most of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def graphs(monkeypatch):
    """Lets CPU runs capture; gives the class, whose attributes say how the device behaves."""
    monkeypatch.setattr(task, "CudaGraphs", FakeGraphs)
    monkeypatch.setattr(task, "obstacle", lambda *_: None)
    for name in ("fails_with", "waits_at"):
        monkeypatch.setattr(FakeGraphs, name, None)
    clock = iter(range(10**9))
    # Every reading of the host's clock in capture.py is launch_ms after the one before.
    monkeypatch.setattr(capture, "perf_counter", lambda: next(clock) * FakeGraphs.launch_ms / 1e3)
    return FakeGraphs


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_same_losses_to_the_last_bit(tmp_path, graphs, impl, accumulate):
    settings = (f"impl={impl}", f"trainer.accumulate={accumulate}", "trainer.val_every=7", "data.batch_size=4")
    train(tmp_path / "eager", *settings, *CAPTURED, "trainer.cuda_graph=false")
    assert train(tmp_path / "captured", *settings, *CAPTURED).status == "completed"
    for name in ("train/loss", "train/grad_norm", "val/loss", "lr"):
        assert curve(tmp_path / "captured", name) == curve(tmp_path / "eager", name)
    found = result(tmp_path / "captured")
    assert (found["steps"], found["cuda_graph"]["steps_replayed"]) == (30, 27)
    plays = {1: [27], 2: [27, 27], 4: [27, 54, 27]}[accumulate]
    assert [recording.count for recording in graphs.last.recordings] == plays
    assert graphs.last.eager == 3 * accumulate, "no step besides those of the run"
    assert curve(tmp_path / "captured", "time/replayed_percent")[30] == "100.0"


@pytest.mark.parametrize("log_every", [1, 4])
def test_metrics_that_are_sent_together_are_those_of_each_step(tmp_path, graphs, monkeypatch, log_every):
    """As on a GPU, where a graph adds in the place that it was recorded with."""
    settings = (*CAPTURED, "trainer.accumulate=2", "trainer.val_every=7", f"trainer.log_every={log_every}")
    train(tmp_path / "alone", *settings, "trainer.cuda_graph=false")
    made = task.DeviceMetrics
    monkeypatch.setattr(task, "DeviceMetrics", lambda *arguments: made(*arguments[:3], batch=8))
    for name, captured in (("eager", "false"), ("captured", "true")):
        train(tmp_path / name, *settings, f"trainer.cuda_graph={captured}")
        for value in ("train/loss", "train/grad_norm", "val/loss"):
            assert curve(tmp_path / name, value) == curve(tmp_path / "alone", value)


def test_a_step_that_ignores_new_batches_would_be_seen(tmp_path, graphs, monkeypatch):
    """The test above sees whether a replay reads the batch that came."""
    train(tmp_path / "eager", *CAPTURED, "trainer.cuda_graph=false")
    monkeypatch.setattr(Staging, "load", lambda self, batch: None)
    train(tmp_path / "captured", *CAPTURED)
    assert curve(tmp_path / "captured") != curve(tmp_path / "eager")


@pytest.mark.parametrize(("first", "second"), [("true", "false"), ("false", "true"), ("true", "true")])
def test_resume_from_captured_to_not_and_back(tmp_path, graphs, first, second):
    settings = ("trainer.accumulate=2", "trainer.warmup_steps=0", "trainer.min_learning_rate=1e-3")
    train(tmp_path / "whole", *settings, "trainer.max_steps=20", "trainer.cuda_graph=false")
    train(tmp_path / "one", *settings, "trainer.max_steps=10", f"trainer.cuda_graph={first}")
    train(tmp_path / "two", *settings, "trainer.max_steps=20", f"trainer.cuda_graph={second}",
          f"resume={tmp_path / 'one'}")  # fmt: skip
    assert curve(tmp_path / "one") | curve(tmp_path / "two") == curve(tmp_path / "whole")
    groups = [
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]
        for run in ("whole", "two")
    ]
    assert groups[0]["param_groups"] == groups[1]["param_groups"]


def test_auto_captures_where_launches_cost_more_than_kernels(tmp_path, graphs, monkeypatch, capsys):
    train(tmp_path / "launches", "trainer.max_steps=8")
    found = result(tmp_path / "launches")["cuda_graph"]
    assert (found["requested"], found["captured"], found["steps_replayed"]) == ("auto", True, 5)
    assert (found["launch_ms"], found["gpu_ms"]) == pytest.approx((9, 10))
    assert "9.00 ms to launch" in found["reason"]
    assert "step captured in a CUDA graph: the host took 9.00 ms" in capsys.readouterr().out

    monkeypatch.setattr(graphs, "launch_ms", 3.0)
    train(tmp_path / "kernels", "trainer.max_steps=8")
    found = result(tmp_path / "kernels")["cuda_graph"]
    assert (found["captured"], found["steps_not_replayed"]) == (False, 8)
    assert "3.00 ms to launch" in found["reason"]
    assert graphs.last.given_up == 1, "frees what the warm-up has left"
    assert "step not captured" in capsys.readouterr().out
    assert curve(tmp_path / "kernels") == curve(tmp_path / "launches")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_auto_has_chosen_for_replays_runs_twice_before_it_is_recorded(tmp_path, graphs, monkeypatch, accumulate):
    """Once to be compiled, built and tuned, and once to be watched."""
    micro_step, seen = step.TrainStep.micro_step, []

    def looking(self, *args, **keywords):
        seen.append(impls.auto.replayed)
        return micro_step(self, *args, **keywords)

    monkeypatch.setattr(step.TrainStep, "micro_step", looking)
    settings = ("impl=auto", f"trainer.accumulate={accumulate}", "trainer.max_steps=6")
    train(tmp_path / "captured", *settings, "trainer.cuda_graph=true")
    assert seen == accumulate * [False] + 5 * accumulate * [True]
    assert any(call.endswith(" replayed") for call in auto.used())

    seen.clear()
    monkeypatch.setattr(graphs, "waits_at", "model.py:12")
    train(tmp_path / "refused", *settings)
    assert seen == accumulate * [False] + 2 * accumulate * [True] + 3 * accumulate * [False]
    used = auto.used()
    assert used, "of what ran"
    assert not any(call.endswith(" replayed") for call in used)


@pytest.mark.parametrize(("asked", "warnings"), [("true", 1), ("auto", 0)])
def test_a_run_that_ends_before(tmp_path, graphs, capsys, asked, warnings):
    train(tmp_path / "run", "trainer.max_steps=3", f"trainer.cuda_graph={asked}")
    found = result(tmp_path / "run")["cuda_graph"]
    assert (found["captured"], found["gpu_ms"]) == (False, None)
    assert "ended within the 3 steps" in found["reason"]
    said = capsys.readouterr().out
    assert said.count("warning: step not captured: the run ended within the 3 steps before capture") == warnings
    assert said.count("not captured") == warnings


def test_not_asked_for(tmp_path, graphs):
    train(tmp_path / "run", "trainer.cuda_graph=false")
    found = result(tmp_path / "run")["cuda_graph"]
    assert (found["captured"], found["reason"]) == (False, "trainer.cuda_graph=false")


def test_on_a_cpu(tmp_path, capsys):
    ending = train(tmp_path / "asked", "trainer.cuda_graph=true")
    assert (ending.status, ending.bug) == ("failed", False)
    assert ending.reason.startswith("trainer.cuda_graph=true: the step cannot be captured: a CUDA graph needs")
    assert train(tmp_path / "auto").status == "completed"
    assert "on the CPU" in result(tmp_path / "auto")["cuda_graph"]["reason"]
    assert "captured" not in capsys.readouterr().out.partition("tokens/s")[2], "nobody expects it there"


def test_what_can_be_known_before_the_run():
    parameter = torch.nn.Parameter(torch.zeros(1))
    adamw, sgd = torch.optim.AdamW([parameter]), torch.optim.SGD([parameter])
    gpu = torch.device("cuda", 0)
    assert obstacle(gpu, adamw) is None
    assert "SGD has no capturable form" in obstacle(gpu, sgd)
    assert "trainer=ddp is not captured" in obstacle(gpu, adamw, "ddp")
    assert "CPU" in obstacle(torch.device("cpu"), adamw)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.", "preserve_rng_state=False"),
        ("If capturable=True, params and state_steps must be on supported devices", "parameters that are complex"),
        ("\nfirst\nsecond", "RuntimeError: first"),
        ("", "RuntimeError: no message"),
    ],
)
def test_why_a_recording_has_failed(said, reason):
    assert reason in in_words(RuntimeError(said))


def test_where_a_recording_has_failed():
    """In the model: neither in PyTorch, which raises it, nor here."""

    def forward():
        torch.nn.Linear(2, 2)(torch.ones(3))

    with pytest.raises(RuntimeError) as caught:
        forward()
    assert in_words(caught.value).endswith(f", at {__file__}:{forward.__code__.co_firstlineno + 1}")
    with pytest.raises(IndexError) as caught:
        step.next_token_loss(torch.zeros(1), torch.zeros(1))
    assert ", at " not in in_words(caught.value.with_traceback(caught.tb.tb_next))


REFUSALS = [
    ("fails_with", RuntimeError("operation not permitted\nmore"), "RuntimeError: operation not permitted, at "),
    ("waits_at", "model.py:12", "the host waits for the GPU, at model.py:12"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSALS)
def test_what_only_the_step_can_tell(tmp_path, graphs, monkeypatch, name, value, words):
    train(tmp_path / "eager", "trainer.max_steps=8", "trainer.cuda_graph=false", "trainer.accumulate=2")
    monkeypatch.setattr(graphs, name, value)
    ending = train(tmp_path / "asked", "trainer.max_steps=8", "trainer.cuda_graph=true", "trainer.accumulate=2")
    assert (ending.status, ending.bug) == ("failed", False)
    assert words in ending.reason
    assert list(curve(tmp_path / "asked")) == [1, 2, 3], "nothing computed is lost"
    assert words in result(tmp_path / "asked")["cuda_graph"]["reason"]
    assert train(tmp_path / "auto", "trainer.max_steps=8", "trainer.accumulate=2").status == "completed"
    assert words in result(tmp_path / "auto")["cuda_graph"]["reason"]
    assert curve(tmp_path / "auto") == curve(tmp_path / "eager")
    assert graphs.last.given_up == 1


def draws(network):
    random.random()


def draws_from_numpy(network):
    numpy.random.rand()  # noqa: NPY002


def draws_from_torch(network):
    torch.rand([])


def rebinds(network):
    network.head.seen = network.head.seen + 1


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (draws, "draws random numbers on the CPU, from Python's random"),
        (draws_from_numpy, "draws random numbers on the CPU, from numpy.random"),
        (draws_from_torch, "draws random numbers on the CPU, from torch"),
        (rebinds, "puts another tensor in the place of the buffer head.seen"),
    ],
)
def test_what_a_graph_would_not_do_anew(tmp_path, graphs, monkeypatch, work, words):
    """Layers that are dropped at random, for example: the graph would drop those of the step that was recorded."""
    forward, init = MLPLanguageModel.forward, MLPLanguageModel.__init__

    def with_buffer(self, *args, **keywords):
        init(self, *args, **keywords)
        self.head.register_buffer("seen", torch.zeros(()))

    def working(self, tokens):
        work(self)
        return forward(self, tokens)

    monkeypatch.setattr(MLPLanguageModel, "__init__", with_buffer)
    assert train(tmp_path / "captured", *CAPTURED).status == "completed"
    monkeypatch.setattr(MLPLanguageModel, "forward", working)
    ending = train(tmp_path / "asked", *CAPTURED)
    assert (ending.status, ending.bug) == ("failed", False)
    assert words in ending.reason
    assert list(curve(tmp_path / "asked")) == [1, 2, 3], "nothing computed is lost"
    assert train(tmp_path / "auto", "trainer.max_steps=8").status == "completed"
    assert words in result(tmp_path / "auto")["cuda_graph"]["reason"]
    assert graphs.last.recordings == []


@pytest.mark.parametrize("odd", [12, 13])
def test_a_batch_of_another_shape(tmp_path, graphs, monkeypatch, odd):
    """At the beginning of an accumulation, and in the middle, where gradients of replays are there already."""
    starts = data_windows.WindowOrder.starts
    monkeypatch.setattr(
        data_windows.WindowOrder, "starts", lambda self, i: starts(self, i)[: 5 if i == odd else self.batch_size]
    )
    show_gradients(monkeypatch, graphs)
    settings = ("trainer.accumulate=2", "trainer.max_steps=10")
    train(tmp_path / "eager", *settings, "trainer.cuda_graph=false")
    ending = train(tmp_path / "asked", *settings, "trainer.cuda_graph=true")
    assert "a batch of (5, 16) int64 and (5, 16) int64 came, and the captured step takes (8, 16)" in ending.reason
    assert train(tmp_path / "auto", *settings).status == "completed"
    assert curve(tmp_path / "auto") == curve(tmp_path / "eager")
    assert result(tmp_path / "auto")["cuda_graph"]["steps_replayed"] == 3


def test_a_batch_of_another_shape_before_the_capture(tmp_path, graphs, monkeypatch):
    """What is counted in a replay is the size of the batch that was recorded, not of an earlier one."""
    starts = data_windows.WindowOrder.starts
    monkeypatch.setattr(
        data_windows.WindowOrder, "starts", lambda self, i: starts(self, i)[: 5 if i == 2 else self.batch_size]
    )
    micro_step, counted = task.LanguageModelTask.micro_step, []

    def counting(self, batch):
        micro_step(self, batch)
        counted.append(self.samples)

    monkeypatch.setattr(task.LanguageModelTask, "micro_step", counting)
    train(tmp_path / "run", "trainer.cuda_graph=true")
    assert result(tmp_path / "run")["cuda_graph"]["steps_replayed"] == 3
    assert counted == [8, 16, 21, 29, 37, 45]


def show_gradients(monkeypatch, graphs):
    """The gradients of a graph have their address once it is recorded; those of a played one only after it played."""
    leave = capture.StepCapture._leave

    def with_gradients(self, batch, first):
        self._gradients = [graphs.last.held[parameter] for parameter in self.step.parameters]
        leave(self, batch, first)

    monkeypatch.setattr(capture.StepCapture, "_leave", with_gradients)


def test_the_time_of_the_capture_belongs_to_no_step(tmp_path, monkeypatch, graphs):
    now = [0.0]
    monkeypatch.setattr(HostEvent, "record", lambda self: setattr(self, "_time", now[0] / 1e3))
    run, record = step.TrainStep.micro_step, graphs.record

    def slow(self, *args, **keywords):
        now[0] += 10.0
        return run(self, *args, **keywords)

    def slower(self, function):
        now[0] += 3.6e6
        return record(self, function)

    monkeypatch.setattr(step.TrainStep, "micro_step", slow)
    monkeypatch.setattr(graphs, "record", slower)
    train(tmp_path / "run", "trainer.cuda_graph=true", "trainer.max_steps=8")
    assert [float(row["time/step_ms"]) for row in rows(tmp_path / "run")] == pytest.approx([10.0] * 8)
    found = result(tmp_path / "run")
    assert found["throughput"]["warmup_steps"] == 3, "the steps before capture say nothing about the others"
    assert found["cuda_graph"]["capture_s"] > 0
    assert found["seconds"]["first_steps"] == pytest.approx(found["cuda_graph"]["capture_s"])


@pytest.mark.parametrize("reason", ["launch_ms", "waits_at", "fails_with"])
def test_the_steps_before_the_decision_are_no_steady_ones_whatever_it_is(tmp_path, monkeypatch, graphs, reason):
    """The host waits in them, impl=auto measures, and what they leave is freed in the step that follows."""
    monkeypatch.setattr(graphs, reason, {"launch_ms": 3.0, "waits_at": "a.py:1", "fails_with": RuntimeError()}[reason])
    for accumulate in (1, 2):
        train(tmp_path / f"{accumulate}", "trainer.max_steps=12", f"trainer.accumulate={accumulate}")
        found = result(tmp_path / f"{accumulate}")
        assert not found["cuda_graph"]["captured"]
        assert (found["throughput"]["warmup_steps"], found["throughput"]["steady_steps"]) == (4, 8)


@pytest.mark.parametrize("cuda_graph", ["true", "false"])
def test_ranges(tmp_path, graphs, monkeypatch, cuda_graph):
    """What a profiler may name from any step on: the parts of a step, and a replay."""
    seen = []

    @contextlib.contextmanager
    def named(name):
        seen.append(name)
        yield

    micro_step = task.LanguageModelTask.micro_step

    def from_step_2_on(self, batch):
        if self.trainer.global_step == 2:
            self.range = named
        micro_step(self, batch)

    monkeypatch.setattr(task.LanguageModelTask, "micro_step", from_step_2_on)
    train(tmp_path / "run", "trainer.max_steps=5", f"trainer.cuda_graph={cuda_graph}", "trainer.accumulate=2")
    eager = ["forward", "backward", "forward", "backward", "optimizer"]
    played = ["replay", "forward", "backward", "replay", "forward", "backward", "optimizer"]
    assert seen == eager + 2 * (played if cuda_graph == "true" else eager)


class Counts(Callback):
    def __init__(self):
        self.calls = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.calls.append(trainer.global_step)


def test_a_callback_within_a_step_is_called_before_capture(tmp_path, graphs, monkeypatch):
    counts, make_trainer = Counts(), task_trainer(monkeypatch)
    make_trainer(counts)
    train(tmp_path / "run", "trainer.cuda_graph=false", "trainer.max_steps=5")
    assert counts.calls == [0, 1, 2, 3, 4]
    assert result(tmp_path / "run")["steps"] == 5
    counts.calls.clear()
    train(tmp_path / "captured", "trainer.cuda_graph=true", "trainer.max_steps=5")
    assert counts.calls == [0, 1, 2]
    assert result(tmp_path / "captured")["steps"] == 5
    assert curve(tmp_path / "captured") == curve(tmp_path / "run")


def task_trainer(monkeypatch):
    from fusedmlp.training import run

    def add(callback):
        original = run.make_trainer
        monkeypatch.setattr(
            run, "make_trainer", lambda options, device, folder, callbacks, place: original(
                options, device, folder, [*callbacks, callback], place
            ),
        )  # fmt: skip

    return add


class Generator:
    """As CUDA's: a recording takes it, and one that fails does not give it back."""

    def __init__(self, state):
        self.state = state

    def clone_state(self):
        return Generator({**self.state, "recorded": False})

    def graphsafe_set_state(self, other):
        self.state = other.state


@pytest.fixture
def recorder(monkeypatch):
    """`CudaGraphs` on a CPU, and the generator of its device: a recording is to call the function."""
    generator = Generator({"offset": 8, "recorded": False})

    @contextlib.contextmanager
    def recording(*_, **__):
        generator.state["recorded"] = True
        yield
        generator.state["recorded"] = False

    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda_graph, "own_workspaces", contextlib.nullcontext)
    graphs = object.__new__(CudaGraphs)
    graphs.device, graphs._pool, graphs._recording = torch.device("cuda", 0), (0, 0), None
    return graphs, generator


def test_a_failed_recording_gives_the_random_numbers_back(recorder):
    graphs, generator = recorder
    with pytest.raises(ZeroDivisionError):
        graphs.record(lambda: 1 // 0)
    assert generator.state == {"offset": 8, "recorded": False}


class Recorded:
    """What the frames of a recording hold: in the end autograd's graph, with the memory of all it saved."""


def test_a_failed_recording_keeps_nothing_of_what_it_recorded(recorder):
    graphs, _ = recorder
    alive = []

    def fails():
        output = Recorded()
        alive.append(weakref.ref(output))
        raise ZeroDivisionError

    # The collector finds it some time later; the memory is wanted at once.
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            graphs.record(fails)
        assert alive[0]() is None
    finally:
        gc.enable()


def test_what_a_failed_recording_held_is_free_before_the_memory_is(tmp_path, graphs, monkeypatch):
    held, when_freed = [], []

    def record(self, function):
        output = Recorded()
        held.append(weakref.ref(output))
        raise ZeroDivisionError

    monkeypatch.setattr(FakeGraphs, "record", record)
    monkeypatch.setattr(FakeGraphs, "give_up", lambda _: when_freed.append(held[0]()))
    assert train(tmp_path / "run", "trainer.max_steps=6", "trainer.cuda_graph=auto").status == "completed"
    assert when_freed == [None]


def test_a_thread_that_fetches_batches_may_wait_and_autograds_may_not(recorder, monkeypatch):
    graphs, _ = recorder
    modes, found, waited = [], [], threading.Event()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait(thread):
        warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, thread, 1)
        waited.set()

    def watched():
        with graphs.watch(found):
            fetching = threading.Thread(target=wait, args=("fetching",))
            fetching.start()
            fetching.join()
            waited.clear()
            # Python did not make it, as it makes none of autograd's.
            _thread.start_new_thread(wait, ("autograd",))
            assert waited.wait(60)
            warnings.warn("of something else", stacklevel=1)
            wait("training")

    with pytest.warns(UserWarning, match="of something else") as others:
        watched()
    assert found == ["autograd:1", "training:1"]
    assert (len(others), modes) == (1, ["warn", 0])


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_in_a_recording(recorder, enabled):
    """A graph of an earlier run, held by a cycle, would end the recording in which it is destroyed."""
    graphs, _ = recorder
    cycle: list[object] = [Event()]
    cycle.append(cycle)
    earlier, states = weakref.ref(cycle[0]), []
    (gc.enable if enabled else gc.disable)()
    try:
        del cycle
        graphs.record(lambda: states.extend((earlier(), gc.isenabled())))
        assert states == [None, False]
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


class Log:
    """Streams and events that write down what happens in which order."""

    def __init__(self):
        self.lines, self.names = [], iter(["free0", "free1"])

    def copying(self):
        return contextlib.nullcontext()

    def event(self):
        event = Event()
        name = f"event{id(event)}"
        event.record = functools.partial(self._note, event, "record", name)
        event.wait = functools.partial(self._note, event, "wait", name)
        return event

    def _note(self, event, what, name):
        if what == "wait":
            assert event.recorded, "waits for what was never promised"
        event.recorded = True
        self.lines.append((what, name))


def test_no_staging_place_is_overwritten_before_it_was_read():
    log = Log()
    staging = Staging(log, (torch.zeros(2), torch.zeros(2)))
    places = []
    for number in range(5):
        log.lines.clear()
        batch = (torch.full((2,), float(number)), torch.full((2,), -float(number)))
        place = staging.stage(batch)
        places.append(place[0].data_ptr())
        (waited, free), (arrived, event), (waited_too, same) = log.lines
        assert (waited, arrived, waited_too, same) == ("wait", "record", "wait", event)
        log.lines.clear()
        staging.load(place)
        assert log.lines == [("record", free)], "what was waited for before the place was written"
        assert [tensor[0].item() for tensor in staging.batch] == [number, -number]
    assert places[0] != places[1]
    assert places[:3] == [places[0], places[1], places[0]]
    log.lines.clear()
    staging.load((torch.ones(2), torch.ones(2)))
    assert log.lines == [], "a batch that was not staged frees no place"


def test_every_impl_of_a_cpu_is_tried():
    assert {"manual", "native", "compiled"} <= {name for name in impls.names() if impls.unavailable(name) is None}
