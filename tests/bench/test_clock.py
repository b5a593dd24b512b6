"""Timing in turns, on a CPU and on a GPU that is simulated: queue, clock and events."""

from types import SimpleNamespace

import pytest
import torch

from fusedmlp.bench import clock
from fusedmlp.bench.clock import Pace, in_turns


class VirtualGpu:
    """A host that enqueues and a GPU that works off the queue, each with a clock of its own, in us."""

    def __init__(self, monkeypatch):
        self.host = self.gpu = 0.0
        self.calls, self.spins = [], 0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.host / 1e6)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 20))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def launch(self, name, host_us, kernel_us):
        self.calls.append(name)
        self.host += host_us
        self.gpu = max(self.gpu, self.host) + kernel_us

    def sleep(self, cycles):
        self.spins += 1
        self.gpu = max(self.gpu, self.host) + cycles / clock._CYCLES_PER_US

    def synchronize(self):
        self.host = max(self.host, self.gpu)


class Event:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, 0.0

    def record(self):
        self.at = max(self.gpu.gpu, self.gpu.host)

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e3


CUDA = torch.device("cuda")


def test_kernel_time_of_a_call_that_costs_the_host_more(monkeypatch):
    gpu = VirtualGpu(monkeypatch)
    calls = {"short": lambda: gpu.launch("short", 100, 10), "long": lambda: gpu.launch("long", 40, 30)}
    prepare = clock._Gpu.prepare

    def prepared(*args):
        prepare(*args)
        gpu.calls.clear()

    monkeypatch.setattr(clock._Gpu, "prepare", prepared)
    times = in_turns(calls, CUDA, Pace(rounds=2, settle_ms=1, rep_ms=1, cold=False))
    assert times["short"].timing.p50 == pytest.approx(0.010)
    assert times["long"].timing.p50 == pytest.approx(0.030)
    assert times["short"].host_us == pytest.approx(100)
    assert times["long"].host_us == pytest.approx(40)
    # Settling too: the card is then as cool, or as warm, for both.
    assert gpu.spins == len(gpu.calls) > 0


def test_long_kernels_need_no_spin(monkeypatch):
    gpu = VirtualGpu(monkeypatch)
    times = in_turns({"long": lambda: gpu.launch("long", 50, 1000)}, CUDA, Pace(1, 10, 10, cold=False))
    assert times["long"].timing.p50 == pytest.approx(1.0)
    assert gpu.spins == 0


def test_each_runs_alone_before_it_is_measured(monkeypatch):
    gpu = VirtualGpu(monkeypatch)
    calls = {name: lambda name=name: gpu.launch(name, 10, 1000) for name in "abc"}
    in_turns(calls, CUDA, Pace(rounds=4, settle_ms=50, rep_ms=10, cold=False))
    # Turns, from the second half of which preparation is long over.
    runs = []
    for name in gpu.calls:
        if not runs or runs[-1][0] != name:
            runs.append([name, 0])
        runs[-1][1] += 1
    turns = [run for run in runs if run[1] >= 50]
    assert len(turns) >= 8
    orders = {tuple(name for name, _ in turns[i : i + 3]) for i in range(0, len(turns) - 2, 3)}
    assert len(orders) > 1, "the order never changes"


def test_caches_are_emptied_before_each_call(monkeypatch):
    gpu = VirtualGpu(monkeypatch)
    monkeypatch.setattr(
        torch, "empty", lambda *args, **kwargs: SimpleNamespace(zero_=lambda: gpu.calls.append("flush"))
    )
    in_turns({"a": lambda: gpu.launch("a", 10, 1000)}, CUDA, Pace(1, 5, 5, cold=True))
    assert gpu.calls[-10:] == ["flush", "a"] * 5


def test_on_a_cpu():
    calls = []
    times = in_turns({"a": lambda: calls.append("a")}, torch.device("cpu"), Pace(2, 0, 0.1))
    assert times["a"].host_us is None
    assert 0 <= times["a"].timing.p20 <= times["a"].timing.p50 <= times["a"].timing.p80
    assert len(calls) >= 3
