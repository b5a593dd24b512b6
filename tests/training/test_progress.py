"""What is shown on the way: a line per row in a pipe, one live line in a terminal."""

import io
import re

import pytest
from rich.console import Console

from fusedmlp.training import progress
from fusedmlp.training.progress import LiveProgress, PlainProgress, make_progress

ROW = {"step": 50, "train/loss": 2.5, "throughput/tokens_per_s": 12345.6, "time/step_ms": 3.21}


@pytest.fixture
def now(monkeypatch):
    """The time, in seconds, set by hand."""
    time = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


def test_a_pipe_gets_a_line_per_row(now, capsys):
    shown = PlainProgress()
    shown.begin(0, 1000)
    now[0] = 10.0
    shown.tick(50)
    shown.write(ROW)
    shown.write({"step": 50, "val/loss": 2.25})
    shown.close()
    assert capsys.readouterr().out.splitlines() == [
        "step   50/1000   loss 2.500   12,346 tokens/s   3:10 left   3.2 ms/step",
        "step 50: validation loss 2.250 nats/token",
    ]


def test_a_pipe_gets_all_lines_before_a_pause(now, monkeypatch):
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe))
    shown = PlainProgress()
    shown.begin(0, 1000)
    now[0], lines = 10.0, []
    for step, pause in ((50, False), (51, False), (51, True)):
        shown.write(ROW)
        shown.tick(step, pause)
        lines.append(pipe.getvalue().count(b"loss"))
    assert lines == [1, 1, 3]


@pytest.mark.parametrize(
    ("tflops", "mfu", "text"),
    [
        (412.34, 41.69, "412 TFLOP/s (41.7 % MFU)"),
        (1234.5, None, "1,234 TFLOP/s"),
        (9.876, 0.04, "9.88 TFLOP/s (0.0 % MFU)"),
        (0.01234, None, "0.0123 TFLOP/s"),
    ],
)
def test_utilization_is_shown_where_it_is_known(now, capsys, tflops, mfu, text):
    shown = PlainProgress()
    shown.begin(0, 1000)
    row = ROW | {"throughput/tflops_per_s": tflops} | ({} if mfu is None else {"throughput/mfu_percent": mfu})
    shown.write(row)
    assert f"3.2 ms/step   {text}\n" in capsys.readouterr().out


def test_time_left_after_a_resume_counts_the_steps_of_this_run(now, capsys):
    shown = PlainProgress()
    shown.begin(900, 1000)
    now[0] = 10.0
    shown.write(ROW | {"step": 950})
    assert "   0:10 left   " in capsys.readouterr().out


def test_time_left_is_that_of_each_row_though_they_are_written_together(now, capsys):
    shown = PlainProgress()
    shown.begin(0, 100)
    now[0] = 10.0
    for step in (1, 10):
        shown.write(ROW | {"step": step, "time/elapsed_s": step * 0.5})
    assert re.findall(r"(\S+) left", capsys.readouterr().out) == ["0:50", "0:45"]


def test_a_terminal_gets_one_line_that_changes(now):
    out = io.StringIO()
    shown = LiveProgress(Console(file=out, force_terminal=True, width=120))
    shown.begin(0, 100)
    shown.write(ROW)
    for step in range(1, 101):
        now[0] = step * 0.1
        shown.tick(step)
    shown.say("validation")
    shown.close()
    shown.close()
    steps = [int(step) for step in re.findall(r"step +(\d+)/100", out.getvalue())]
    assert len(set(steps)) <= 25, "at most two redraws per second of the ten"
    assert steps[-1] == 100
    assert "loss 2.500   12,346 tokens/s   0:00 left   3.2 ms/step" in out.getvalue()
    assert out.getvalue().count("validation") == 1


def test_a_terminal_shows_the_step_of_a_pause(now):
    out = io.StringIO()
    shown = LiveProgress(Console(file=out, force_terminal=True, width=120))
    shown.begin(0, 100)
    now[0] = 10.0
    for step, pause in ((1, False), (2, False), (3, True)):
        shown.tick(step, pause)
    assert re.findall(r"step +(\d+)/100", out.getvalue())[-2:] == ["1", "3"]
    shown.close()


def test_a_line_of_its_own_is_followed_by_the_step_of_the_moment(now):
    out = io.StringIO()
    shown = LiveProgress(Console(file=out, force_terminal=True, width=120))
    shown.begin(0, 100)
    now[0] = 10.0
    shown.tick(1)
    for step in range(2, 26):
        shown.tick(step)
    shown.write({"step": 25, "val/loss": 2.25})
    assert "step  25/100" in out.getvalue().partition("step 25: validation loss")[2]
    shown.close()


def test_a_narrow_terminal_keeps_one_line_and_its_beginning(now):
    out = io.StringIO()
    shown = LiveProgress(Console(file=out, force_terminal=True, width=60))
    shown.begin(0, 100)
    shown.write(ROW | {"throughput/tflops_per_s": 412.3})
    now[0] = 10.0
    shown.tick(50)
    # A line that wrapped would leave its first half behind at every redraw.
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).strip()
    assert line == "step  50/100   loss 2.500   12,346 tokens/s   0:10 left   3…"
    shown.close()


def test_a_terminal_without_an_ellipsis_gets_a_line_of_its_width(now):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="latin-1", errors="backslashreplace")
    shown = LiveProgress(Console(file=out, force_terminal=True, width=40))
    shown.begin(0, 100)
    shown.write(ROW)
    now[0] = 10.0
    shown.tick(50)
    out.flush()
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.getvalue().decode("latin-1")).strip()
    assert line == "step  50/100   loss 2.500   12,346 token"
    shown.close()


def test_which_one_depends_on_the_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert isinstance(make_progress(), PlainProgress)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert isinstance(make_progress(), LiveProgress)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(), PlainProgress), "which cannot draw over a line"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (86400, "24:00:00")])
def test_durations(seconds, text):
    assert progress._clock(seconds) == text
