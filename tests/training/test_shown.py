"""What is shown can break, and the run it shows does not."""

import errno
import io
import os
import signal
import sys

import pytest
import torch
from training.runs import fits, result, train

from fusedmlp.streams import Stream, exit_code
from fusedmlp.training.cli import Jobs, launch
from fusedmlp.training.failures import Ending
from fusedmlp.training.result import Result


class Breaking(io.StringIO):
    """Takes some writes and refuses the rest."""

    def __init__(self, number: int, takes: int = 0):
        super().__init__()
        self.number, self.takes = number, takes

    def write(self, text: str) -> int:
        self.takes -= 1
        if self.takes < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.fixture
def hang_up():
    """Sets what SIGHUP does for one test."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_full_disk_shows_no_more_and_raises_nothing():
    stream = Stream(Breaking(errno.ENOSPC, takes=1))
    for line in ("shown", "lost", "lost"):
        print(line, end="", file=stream, flush=True)
    assert stream.getvalue() == "shown"
    assert stream.error.errno == errno.ENOSPC


def test_a_reader_that_leaves_hangs_up_once(hang_up):
    calls = []
    hang_up(lambda *_: calls.append(1))
    stream = Stream(Breaking(errno.EPIPE))
    stream.writelines(["a", "b"])
    assert calls == [1]
    hang_up(signal.SIG_IGN)
    Stream(Breaking(errno.EPIPE)).write("under nohup nothing happens")
    hang_up(signal.SIG_DFL)
    with pytest.raises(BrokenPipeError):
        Stream(Breaking(errno.EPIPE)).write("nothing is under way")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_the_encoding_does_not_have_is_escaped(errors, monkeypatch):
    raw = io.BytesIO()
    # Of the C locale, stdout escapes bytes of file names and raises for all else.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors))
    assert exit_code(lambda: print("é \udce9 …") or 0) == 0
    assert raw.getvalue() == rb"\xe9 \udce9 \u2026" + b"\n"


@fits
def test_a_run_whose_reader_leaves_stops_with_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(Breaking(errno.EPIPE, takes=7)))
    ending = train(tmp_path / "run", "trainer.max_steps=100000")
    assert (ending.status, ending.reason, ending.exit_code) == ("interrupted", "stopped by SIGHUP", 129)
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["fusedmlp"]["step"] == result(tmp_path / "run")["steps"] > 1


@fits
def test_a_run_whose_output_meets_a_full_disk_trains_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(Breaking(errno.ENOSPC, takes=3)))
    assert train(tmp_path / "run").status == "completed"
    assert result(tmp_path / "run")["steps"] == 6


def test_what_could_not_be_shown_is_said_on_stderr(tmp_path, monkeypatch, capsys):
    jobs = Jobs()
    done = Result(tmp_path, impl="native", dim=32, group="g", overrides=[], status="completed")
    monkeypatch.setattr(sys, "stdout", Breaking(errno.ENOSPC))
    with pytest.raises(SystemExit) as caught:
        launch(lambda: jobs.ended(done, Ending("completed")), jobs)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: what is printed cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 3, ""),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    ],
)
def test_the_end_of_a_tool_is_a_code_and_no_traceback(error, code, said, capsys):
    def work():
        if error is not None:
            raise error
        return 3

    assert exit_code(work) == code
    assert capsys.readouterr().err == said


def test_a_tool_whose_output_meets_a_full_disk_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Breaking(errno.ENOSPC))
    assert exit_code(lambda: print("a table") or 0) == 1
    assert capsys.readouterr().err == "error: what is printed cannot be written: No space left on device\n"
