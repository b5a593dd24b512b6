"""Stop, go on: the curve is that of a run that was never stopped, to the last bit."""

import multiprocessing
import os
import random
import shutil
import signal

import numpy
import pytest
import torch
from training.runs import config, curve, fits, result, rows, train

from fusedmlp import impl_names, unavailable
from fusedmlp.errors import UserError
from fusedmlp.training import checkpoint
from fusedmlp.training.options import build
from fusedmlp.training.result import Result
from fusedmlp.training.task import LanguageModelTask

pytestmark = fits


@pytest.fixture
def interrupt(monkeypatch):
    """Sends a signal to this process in the middle of one micro-batch, counted from 1."""
    step = LanguageModelTask.micro_step

    def at(micro_batch: int, signum: int = signal.SIGINT) -> None:
        calls = [0]

        def interrupted(self, batch):
            calls[0] += 1
            if calls[0] == micro_batch:
                signal.raise_signal(signum)
            step(self, batch)

        monkeypatch.setattr(LanguageModelTask, "micro_step", interrupted)

    return at


def state(folder) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def assert_equal_states(one, other):
    """Model and optimizer, bit for bit."""
    for part in ("state_dict", "optimizer_states"):
        left, right = (torch.utils._pytree.tree_leaves(checkpoint[part]) for checkpoint in (one, other))
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    ("accumulate", "micro_batch", "step", "signum"),
    [
        (1, 3, 3, signal.SIGINT),
        (1, 4, 4, signal.SIGTERM),  # a step that validation follows
        (2, 5, 3, signal.SIGTERM),  # within an accumulation, which is finished first
        (2, 8, 4, signal.SIGHUP),
    ],
)
def test_interrupt_and_resume_equals_a_run_without(tmp_path, interrupt, accumulate, micro_batch, step, signum):
    settings = ("trainer.max_steps=8", f"trainer.accumulate={accumulate}", "trainer.val_every=4")
    train(tmp_path / "whole", *settings)

    interrupt(micro_batch, signum)
    ending = train(tmp_path / "first", *settings)
    assert (ending.status, ending.exit_code) == ("interrupted", 128 + signum)
    found = result(tmp_path / "first")
    assert (found["status"], found["steps"]) == ("interrupted", step)
    assert found["reason"] == f"stopped by {signal.Signals(signum).name}"

    interrupt(0)
    assert train(tmp_path / "second", *settings, f"resume={tmp_path / 'first'}").status == "completed"
    found = result(tmp_path / "second")
    assert found["resumed_at_step"] == step
    assert found["resumed_from"] == str(tmp_path / "first" / "checkpoints" / "last.ckpt")
    assert found["steps"] == 8
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        first, second = curve(tmp_path / "first", name), curve(tmp_path / "second", name)
        assert not first.keys() & second.keys()
        assert first | second == curve(tmp_path / "whole", name)
    assert_equal_states(state(tmp_path / "second"), state(tmp_path / "whole"))


def test_a_periodic_checkpoint_resumes_as_well(tmp_path):
    train(tmp_path / "whole", "trainer.max_steps=7", "trainer.accumulate=3")
    train(tmp_path / "first", "trainer.max_steps=4", "trainer.accumulate=3")
    path = shutil.copy(tmp_path / "first" / "checkpoints" / "last.ckpt", tmp_path / "copy.ckpt")
    train(tmp_path / "first2", "trainer.max_steps=7", "trainer.accumulate=3", f"resume={path}")
    # The learning rate follows max_steps, so the curves part; the batches and their number do not.
    assert list(curve(tmp_path / "first2")) == [5, 6, 7]
    name = "TextDataModule"
    assert state(tmp_path / "first2")[name] == state(tmp_path / "whole")[name]
    assert state(tmp_path / "whole")[name]["consumed"] == 21


def test_a_signal_to_all_processes_leaves_the_workers_that_the_step_needs(tmp_path, monkeypatch):
    step = LanguageModelTask.micro_step

    def signalled(self, batch):
        if self._micro == 1:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, number)
            signal.raise_signal(signal.SIGINT)
        step(self, batch)

    monkeypatch.setattr(LanguageModelTask, "micro_step", signalled)
    settings = ("data.num_workers=1", "trainer.accumulate=20", "trainer.max_steps=100")
    assert train(tmp_path / "run", *settings).status == "interrupted"
    assert state(tmp_path / "run")["TextDataModule"]["consumed"] == 20
    assert not multiprocessing.active_children()


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch):
    def twice(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one does not come back")

    monkeypatch.setattr(LanguageModelTask, "micro_step", twice)
    before = signal.getsignal(signal.SIGINT)
    ending = train(tmp_path / "run")
    assert (ending.status, ending.exit_code) == ("interrupted", 130)
    assert result(tmp_path / "run")["checkpoint"] is None
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_between_a_step_and_its_mark_leaves_the_speed(tmp_path, monkeypatch):
    micro_step = LanguageModelTask.micro_step

    def then_twice(self, batch):
        micro_step(self, batch)
        if self.steps == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LanguageModelTask, "micro_step", then_twice)
    train(tmp_path / "run", "trainer.log_every=3")
    found, (last,) = result(tmp_path / "run"), rows(tmp_path / "run")[1:]
    assert (found["status"], found["steps"], last["step"]) == ("interrupted", 5, "5")
    assert float(last["throughput/samples_per_s"]) == pytest.approx(8e3 / float(last["time/step_ms"]))
    assert found["throughput"]["steady_steps"] == 4


def test_a_signal_before_the_loop_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModelTask, "__init__", lambda *_: signal.raise_signal(signal.SIGTERM))
    ending = train(tmp_path / "run")
    assert (ending.status, ending.exit_code) == ("interrupted", 143)
    assert result(tmp_path / "run")["status"] == "interrupted"


def test_a_signal_while_the_first_record_is_written_is_recorded(tmp_path, monkeypatch):
    init = Result.__init__

    def signalled(self, *arguments, **fields):
        signal.raise_signal(signal.SIGINT)
        init(self, *arguments, **fields)

    monkeypatch.setattr(Result, "__init__", signalled)
    assert train(tmp_path / "run").exit_code == 130
    assert result(tmp_path / "run")["reason"] == "stopped by SIGINT"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 steps with the default impl."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder, "impl=manual").status == "completed"
    return folder


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("resume=/no/such/place",), ("resume=/no/such/place", "no such file or directory")),
        (("resume={empty}",), ("resume=", "holds no checkpoint")),
        (("resume={text}",), ("resume=", "is not a checkpoint")),
        (("resume={nothing}",), ("resume=", "is not a checkpoint")),
        (("resume={torn}",), ("resume=", "is not a checkpoint", "damaged")),
        (("resume={flipped}",), ("resume=", "is not a checkpoint", "damaged", "checksum")),
        (("resume={foreign}",), ("resume=", "not written by train.py")),
        (("resume={objects}",), ("resume=", "is not a checkpoint", "other objects than tensors")),
        (("resume={weights}",), ("resume=", "not written by train.py")),
        (
            ("resume={recoded}", "trainer.max_steps=9"),
            ("another model", "its config is the same", "embedding.weight is (3,) there"),
        ),
        (("resume={edited}", "trainer.max_steps=9"), ("resume=", "not written by train.py")),
        (("resume={finished}", "dim=64"), ("another model", "dim is 32 there, 64 here")),
        (("resume={finished}", "model.num_layers=3"), ("another model", "num_layers is 2 there, 3 here")),
        (("resume={finished}", "model=gpt", "model.num_heads=2", "model.num_layers=2"), ("another model", "GPT here")),
        (("resume={finished}",), ("at step 6 already", "trainer.max_steps=6")),
        (("resume={finished}", "trainer.max_steps=9", "seed=1"), ("cannot resume", "seed was 0, is 1")),
    ],
)
def test_what_cannot_be_resumed_is_one_message(tmp_path, finished, overrides, words):
    whole = (finished / "checkpoints" / "last.ckpt").read_bytes()
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a text that is no checkpoint")
    (tmp_path / "nothing").touch()
    (tmp_path / "torn").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    # In the middle of the tensors: PyTorch would load it and train on.
    flipped[len(whole) // 2 : len(whole) // 2 + 2000] = bytes(2000)
    (tmp_path / "flipped").write_bytes(flipped)
    torch.save({"state_dict": {}}, tmp_path / "foreign")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "objects")
    parts = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save({name: part for name, part in parts.items() if name != "optimizer_states"}, tmp_path / "weights")
    torch.save(parts | {"fusedmlp": parts["fusedmlp"] | {"step": "six"}}, tmp_path / "edited")
    recoded = parts["state_dict"] | {"model.embedding.weight": torch.zeros(3)}
    torch.save(parts | {"state_dict": recoded}, tmp_path / "recoded")
    places = {path.name: path for path in tmp_path.iterdir()} | {"finished": finished}
    ending = train(tmp_path / "run", *(override.format(**places) for override in overrides))
    assert (ending.status, ending.exit_code, ending.bug) == ("failed", 1, False)
    assert "\n" not in ending.reason
    for word in words:
        assert word in ending.reason


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (exec, ("raise SystemExit('code ran')",))

    torch.save({"fusedmlp": Malicious()}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match="is not a checkpoint"):
        checkpoint.check(tmp_path / "evil.ckpt", {}, 10, {})


def test_a_checkpoint_of_one_impl_goes_on_with_another(tmp_path, finished):
    whole, other = ("trainer.max_steps=9",), ("impl=native", f"resume={finished}")
    assert train(tmp_path / "run", *whole, *other).status == "completed"
    assert result(tmp_path / "run")["impl"] == "native"
    assert list(curve(tmp_path / "run")) == [7, 8, 9]


def test_what_is_given_anew_holds_and_steps_are_counted_as_before(tmp_path, finished):
    """Another accumulation: validation and checkpoints still fall on the steps that they should."""
    given = ("trainer.accumulate=2", "trainer.val_every=4", "trainer.weight_decay=0.3", "trainer.beta1=0.5")
    assert train(tmp_path / "run", "trainer.max_steps=11", f"resume={finished}", *given).status == "completed"
    assert list(curve(tmp_path / "run", "val/loss")) == [8, 11]
    written = state(tmp_path / "run")
    decays = [(group["weight_decay"], group["betas"]) for group in written["optimizer_states"][0]["param_groups"]]
    assert decays == [(0.3, (0.5, 0.95)), (0.0, (0.5, 0.95))]
    assert written["TextDataModule"]["consumed"] == 6 + 2 * 5
    assert train(tmp_path / "on", "trainer.max_steps=12", f"resume={tmp_path / 'run'}", *given).status == "completed"
    assert state(tmp_path / "on")["TextDataModule"]["consumed"] == 6 + 2 * 6


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_the_weights_have_the_same_names_and_shapes_in_every_impl(model):
    def shapes(impl):
        section = dict(config(f"model={model}", f"impl={impl}", "dim=32").model)
        return {name: tensor.shape for name, tensor in build("model", section).state_dict().items()}

    one, *others = (shapes(name) for name in impl_names() if unavailable(name) is None)
    assert len(others) >= 2
    assert all(other == one for other in others)


def test_random_numbers_drawn_in_the_loop_go_on_too(tmp_path, monkeypatch):
    step, drawn = LanguageModelTask.micro_step, []

    def drawing(self, batch):
        if len(drawn) == stop_at:
            signal.raise_signal(signal.SIGINT)
        drawn.append(torch.rand(1).item())
        step(self, batch)

    monkeypatch.setattr(LanguageModelTask, "micro_step", drawing)
    stop_at = None
    train(tmp_path / "whole")
    whole, drawn[:] = drawn[:], []
    stop_at = 2
    train(tmp_path / "first")
    assert len(drawn) == 3
    train(tmp_path / "second", f"resume={tmp_path / 'first'}")
    assert drawn == whole


def test_random_generators_go_on_where_they_were():
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()  # noqa: NPY002

    draw()
    saved = checkpoint._rng_state()
    first = draw()
    assert draw() != first
    checkpoint._set_rng_state(saved)
    assert draw() == first
