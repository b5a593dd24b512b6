"""Durations of steps and the numbers made from them."""

import pytest
import torch

from fusedmlp.training import throughput
from fusedmlp.training.throughput import StepClock, milliseconds, summarize


@pytest.fixture
def clock(monkeypatch):
    """A clock for the CPU whose time is set by hand, in seconds."""
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    clock = StepClock(torch.device("cpu"))

    def at(seconds, call):
        now[0] = seconds
        return call()

    clock.at = at
    return clock


def test_steps_last_from_tick_to_tick(clock):
    clock.at(1.0, clock.resume)
    clock.at(1.5, clock.tick)
    clock.at(1.75, clock.tick)
    assert milliseconds(clock.take()) == [500.0, 250.0]
    clock.at(2.75, clock.tick)
    assert milliseconds(clock.take()) == [1000.0]
    assert clock.take() == []


def test_a_pause_belongs_to_no_step(clock):
    clock.at(0.0, clock.resume)
    clock.at(1.0, clock.tick)
    clock.at(1.0, clock.pause)
    clock.at(60.0, clock.resume)
    clock.at(60.5, clock.resume)  # running already: changes nothing
    clock.at(62.0, clock.tick)
    assert milliseconds(clock.take()) == [1000.0, 2000.0]


def test_the_first_steps_are_warm_up():
    speed = summarize([9000.0] * 10 + [10.0] * 40 + [20.0] * 10, samples_per_step=8, tokens_per_step=80)
    assert speed.steady_steps == 50
    assert speed.warmup_s == 90.0
    assert (speed.step_ms_median, speed.step_ms_p10, speed.step_ms_p90) == (10.0, 10.0, pytest.approx(20.0))
    assert speed.samples_per_s == pytest.approx(50 * 8 / 0.6)
    assert speed.tokens_per_s == pytest.approx(50 * 80 / 0.6)


@pytest.mark.parametrize(("steps", "steady"), [(2, 1), (5, 4), (12, 10), (100, 90)])
def test_short_runs_give_up_less_to_warm_up(steps, steady):
    assert summarize([1.0] * steps, 1, 1).steady_steps == steady


@pytest.mark.parametrize("steps", [0, 1])
def test_no_steady_window_no_number(steps):
    assert summarize([1.0] * steps, 1, 1) is None


@pytest.mark.gpu
def test_cuda_events_measure_the_gpu_and_not_the_launch():
    clock = StepClock(torch.device("cuda"))
    busy = torch.randn(8192, 8192, device="cuda")
    busy @ busy
    torch.cuda.synchronize()
    clock.resume()
    for _ in range(20):
        busy @ busy
    clock.tick()
    steps = clock.take()
    torch.cuda.synchronize()
    # 20 products of 8192^3 in fp32 take at least 20 * 1.1e12 FLOP / 1e15 FLOP/s; launching them takes microseconds.
    assert milliseconds(steps)[0] > 20
