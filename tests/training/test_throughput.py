"""Durations of steps and of waiting for data, and the numbers made from them."""

import pytest
import torch

from fusedmlp.training import throughput
from fusedmlp.training.peaks import Peak
from fusedmlp.training.throughput import Cost, Durations, StepClock, summarize


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
    assert clock.durations(clock.take()).step_ms == [500.0, 250.0]
    clock.at(2.75, clock.tick)
    assert clock.durations(clock.take()).step_ms == [1000.0]
    assert clock.take() == []


def test_a_pause_belongs_to_no_step(clock):
    clock.at(0.0, clock.resume)
    clock.at(1.0, clock.tick)
    clock.at(1.0, clock.pause)
    clock.at(60.0, clock.resume)
    clock.at(60.5, clock.resume)  # running already: changes nothing
    clock.at(62.0, clock.tick)
    assert clock.durations(clock.take()).step_ms == [1000.0, 2000.0]


def test_waits_of_all_micro_batches_belong_to_their_step(clock):
    clock.at(0.0, clock.resume)
    clock.at(0.0, clock.receive)  # nobody asked: it was there
    clock.at(1.0, clock.tick)
    clock.at(1.25, clock.ask)
    clock.at(1.5, clock.receive)
    clock.at(3.0, clock.ask)
    clock.at(3.5, clock.receive)
    clock.at(4.0, clock.tick)
    clock.at(4.0, clock.ask)
    clock.at(4.5, clock.ask)  # the data had ended
    durations = clock.durations(clock.take())
    assert durations == Durations([1000.0, 3000.0], [0.0, 750.0])
    assert durations.data_wait_percent == 18.75
    clock.at(5.0, clock.receive)
    clock.at(6.0, clock.tick)
    assert clock.durations(clock.take()) == Durations([2000.0], [1000.0])


@pytest.mark.parametrize("name", ["_unread", "_steps"])
def test_what_was_marked_can_be_read_after_a_signal_within_a_mark(clock, name):
    steps = getattr(clock, name)

    class Interrupted(type(steps)):
        def append(self, step):
            setattr(clock, name, steps)
            raise KeyboardInterrupt

    clock.at(0.0, clock.resume)
    clock.at(1.0, clock.tick)
    setattr(clock, name, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        clock.at(2.0, clock.tick)
    clock.at(4.0, clock.tick)
    assert clock.durations(clock.take()).step_ms == [1000.0, 3000.0]


class FakeEvent:
    """A CUDA event: its time is known once the device has passed it."""

    passed = 0
    events: tuple = ()

    def __init__(self, device, enable_timing=False):
        assert device.type == "cuda"
        assert enable_timing

    def record(self):
        self.number = len(FakeEvent.events)
        FakeEvent.events = (*FakeEvent.events, self)

    def query(self):
        return self.number < FakeEvent.passed

    def elapsed_time(self, end):
        assert max(self.number, end.number) < FakeEvent.passed, "read before the device has passed it"
        return (end.number - self.number) * 10.0


def wait_and_tick(clock):
    clock.ask()
    clock.receive()
    clock.tick()


def test_on_a_gpu_the_marks_are_events_that_are_read_later(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "events", ())
    clock = StepClock(torch.device("cuda"))
    clock.resume()
    for _ in range(3):
        wait_and_tick(clock)
    steps = clock.take()
    with pytest.raises(AssertionError, match="read before"):
        clock.durations(steps)
    monkeypatch.setattr(FakeEvent, "passed", len(FakeEvent.events))
    assert clock.durations(steps) == Durations([30.0] * 3, [10.0] * 3)
    assert len(FakeEvent.events) == 1 + 3 * 3


def test_marks_are_used_again_however_long_nobody_asks(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "events", ())
    clock = StepClock(torch.device("cuda"))
    clock.resume()
    for step in range(500):
        wait_and_tick(clock)
        # The device is 50 steps behind.
        monkeypatch.setattr(FakeEvent, "passed", 1 + 3 * (step - 50))
    assert len(set(map(id, FakeEvent.events))) < 4 * 100
    with pytest.raises(AssertionError, match="read before"):
        clock.durations(steps := clock.take())
    monkeypatch.setattr(FakeEvent, "passed", len(FakeEvent.events))
    assert clock.durations(steps) == Durations([30.0] * 500, [10.0] * 500)


def speed_of(step_ms, **changes):
    durations = Durations(step_ms, [ms / 4 for ms in step_ms])
    return summarize(durations, **({"samples_per_step": 8, "tokens_per_step": 80, "cost": Cost()} | changes))


def test_the_first_steps_are_warm_up():
    speed = speed_of([9000.0] * 10 + [10.0] * 40 + [20.0] * 10)
    assert (speed.steady_steps, speed.warmup_steps) == (50, 10)
    assert (speed.step_ms_median, speed.step_ms_p10, speed.step_ms_p90) == (10.0, 10.0, pytest.approx(20.0))
    assert speed.samples_per_s == pytest.approx(50 * 8 / 0.6)
    assert speed.tokens_per_s == pytest.approx(50 * 80 / 0.6)
    assert speed.data_wait_percent == 25
    assert (speed.warmup_s, speed.first_steps_s) == pytest.approx((0.1, 89.9))


def test_first_steps_that_are_as_fast_as_the_others_cost_nothing_extra():
    speed = speed_of([9.0] * 10 + [10.0] * 50)
    assert (speed.warmup_s, speed.first_steps_s) == pytest.approx((0.09, 0.0))


def test_tflops_and_mfu():
    cost = Cost(flops_per_sample=10**12, peak=Peak(1000.0, "table"))
    speed = speed_of([20.0] * 20, cost=cost)
    assert speed.samples_per_s == pytest.approx(400)
    assert speed.tflops_per_s == pytest.approx(400)
    assert speed.mfu_percent == pytest.approx(40)
    assert (speed.flops_per_sample, speed.peak_tflops, speed.peak_source) == (10**12, 1000.0, "table")


def test_what_is_not_known_is_none():
    speed = speed_of([20.0] * 20, cost=Cost(10**12))
    assert speed.tflops_per_s == pytest.approx(400)
    assert (speed.mfu_percent, speed.peak_tflops, speed.peak_source) == (None, None, None)
    speed = speed_of([20.0] * 20, cost=Cost(None, Peak(1000.0, "table")))
    assert (speed.tflops_per_s, speed.mfu_percent, speed.flops_per_sample) == (None, None, None)


@pytest.mark.parametrize(("steps", "steady"), [(2, 1), (5, 4), (12, 10), (100, 90)])
def test_short_runs_give_up_less_to_warm_up(steps, steady):
    assert speed_of([1.0] * steps).steady_steps == steady


@pytest.mark.parametrize("steps", [0, 1])
def test_no_steady_window_no_number(steps):
    assert speed_of([1.0] * steps) is None


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
    assert clock.durations(steps).step_ms[0] > 20


@pytest.mark.gpu
def test_a_batch_that_is_late_is_waited_for_and_one_in_time_is_not():
    clock = StepClock(torch.device("cuda"))
    busy = torch.randn(8192, 8192, device="cuda")
    busy @ busy
    torch.cuda.synchronize()
    clock.resume()
    for late in (False, True):
        if late:
            torch.cuda.synchronize()
        else:
            for _ in range(20):
                busy @ busy
        clock.ask()
        throughput.time.sleep(0.1)
        clock.receive()
        clock.tick()
    steps = clock.take()
    torch.cuda.synchronize()
    in_time, late = clock.durations(steps).wait_ms
    # 20 products of 8192^3 in fp32 keep the GPU busy for longer than that. Other processes on it may shift the marks by
    # some milliseconds.
    assert in_time < 50 < late
