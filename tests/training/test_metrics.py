"""DeviceMetrics: means over an interval, and nothing read before it is asked for."""

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmlp.training.metrics import DeviceMetrics

CPU = torch.device("cpu")


def test_means_are_weighted_and_an_interval_begins_at_each_reading():
    metrics = DeviceMetrics(("a", "b"), CPU)
    metrics.add("a", torch.tensor(1.0))
    metrics.add("a", torch.tensor(4.0), weight=3)
    first = metrics.read()
    metrics.add("b", torch.tensor(7.0))
    assert first.means() == {"a": 3.25}
    assert metrics.read().means() == {"b": 7.0}


def test_a_reading_keeps_its_values_while_the_next_interval_goes_on():
    metrics = DeviceMetrics(("a",), CPU)
    metrics.add("a", torch.tensor(1.0))
    reading = metrics.read()
    metrics.add("a", torch.tensor(100.0))
    assert reading.ready()
    assert reading.means() == {"a": 1.0}


def test_an_interval_can_go_on_after_a_reading():
    metrics = DeviceMetrics(("a",), CPU)
    metrics.add("a", torch.tensor(1.0))
    early = metrics.read(go_on=True)
    metrics.add("a", torch.tensor(4.0))
    assert early.means() == {"a": 1.0}
    assert metrics.read().means() == {"a": 2.5}
    assert metrics.read().means() == {}


def test_low_precision_values_are_summed_in_fp32():
    metrics = DeviceMetrics(("a",), CPU)
    for _ in range(1000):
        metrics.add("a", torch.tensor(1.0, dtype=torch.bfloat16))
    # bf16 cannot count beyond 256.
    assert metrics.read().means() == {"a": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_shows_in_the_mean(value):
    metrics = DeviceMetrics(("a",), CPU)
    for number in (1.0, value, 2.0):
        metrics.add("a", torch.tensor(number))
    assert not math.isfinite(metrics.read().means()["a"])


def test_gradients_do_not_flow_into_metrics():
    metrics = DeviceMetrics(("a",), CPU)
    parameter = torch.ones((), requires_grad=True)
    metrics.add("a", parameter * 2)
    reading = metrics.read()
    assert reading.means() == {"a": 2.0}
    assert not metrics._sums.requires_grad


class Operations(TorchDispatchMode):
    """Lists what is computed while it is active."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "operations"), [(torch.float32, ["_foreach_add_"]), (torch.bfloat16, ["add_", "add_"])]
)
def test_what_a_step_adds_is_one_operation_where_the_dtypes_are_the_same(dtype, operations):
    metrics = DeviceMetrics(("a", "b"), CPU)
    one, two = torch.tensor(1.0), torch.tensor(2.0, dtype=dtype)
    with Operations() as seen:
        metrics.add("a", one)
        metrics.add("b", two)
    assert seen.names == operations
    assert metrics.read().means() == {"a": 1.0, "b": 2.0}


def test_a_value_is_added_within_the_recording_that_it_comes_in():
    metrics = DeviceMetrics(("a", "b"), CPU)
    before, value = torch.tensor(1.0), torch.tensor(10.0)
    metrics.add("a", before)
    with Operations() as recorded:
        with metrics.not_counted():
            metrics.add("a", value)
    assert recorded.names == ["add_"], "one of the recording, and not what was added before"
    metrics.count("a")
    assert metrics.read().means() == {"a": 5.5}


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_readings_sent_together_say_what_each_alone_would(seed, stays, monkeypatch):
    monkeypatch.setattr("fusedmlp.training.metrics.BATCH_S", 1e9)
    draw = random.Random(seed)
    metrics, values, requested = DeviceMetrics(("a", "b"), CPU, batch=4), {"a": [], "b": []}, []
    for turn in range(200):
        if stays and turn == 50 + seed:
            metrics.stay()
        action = draw.choice(["add", "add", "add", "read", "read", "go on", "send", "means"])
        if action == "add":
            name, value = draw.choice("ab"), float(draw.randrange(100))
            metrics.add(name, torch.tensor(value))
            values[name].append(value)
        elif action == "send":
            metrics.send()
        elif action == "means" and requested:
            reading, expected = requested[-1]
            assert reading.means() == pytest.approx(expected)
        elif action in ("read", "go on"):
            expected = {name: sum(found) / len(found) for name, found in values.items() if found}
            requested.append((metrics.read(go_on=action == "go on"), expected))
            if action == "read":
                values = {"a": [], "b": []}
    for reading, expected in requested:
        assert reading.means() == pytest.approx(expected)


def test_readings_are_sent_when_there_are_enough_or_they_come_slowly_or_one_has_waited(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fusedmlp.training.metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("fusedmlp.training.metrics.BATCH_S", 0.25)
    metrics, found = DeviceMetrics(("a",), CPU, batch=4), []

    def sent_after(seconds):
        now[0] += seconds
        found.append(metrics.read())
        metrics.send_late()
        return sum(reading.ready() for reading in found)

    assert [sent_after(seconds) for seconds in (0, 0.1, 0.01, 0.01, 0.01)] == [1, 1, 1, 1, 5], "the first, then four"
    assert [sent_after(seconds) for seconds in (1, 0.05, 0.05, 0.05)] == [6, 6, 6, 6], "one that came late"
    assert sent_after(0.05) == 10, "four again"
    assert [sent_after(seconds) for seconds in (0.1, 0.2, 0.2)] == [10, 10, 13], "the first had waited for 0.4 s"
    assert sent_after(0.1) == 13
    now[0] += 0.3
    metrics.send_late()
    assert found[-1].ready(), "though no other came"


def test_a_reading_that_a_signal_broke_off_leaves_those_before(monkeypatch):
    monkeypatch.setattr("fusedmlp.training.metrics.BATCH_S", 1e9)
    metrics, readings = DeviceMetrics(("a",), CPU, batch=4), []
    for value in (1.0, 2.0, 3.0):
        metrics.add("a", torch.tensor(value))
        readings.append(metrics.read())
    metrics.add("a", torch.tensor(4.0))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(DeviceMetrics, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        metrics.read()
    monkeypatch.undo()
    assert [reading.means()["a"] for reading in readings] == [1.0, 2.0, 3.0]


def test_a_place_that_stays_is_where_a_graph_adds():
    metrics = DeviceMetrics(("a",), CPU, batch=4)
    for value in (1.0, 2.0):
        metrics.add("a", torch.tensor(value))
        metrics.read()
    metrics.add("a", torch.tensor(4.0))
    metrics.stay()
    cell = metrics._cells["a"]
    readings = [metrics.read()]
    for _ in range(6):
        cell += 8.0  # what a replay does
        metrics.count("a")
        readings.append(metrics.read())
    assert [reading.means()["a"] for reading in readings] == [4.0] + [8.0] * 6


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_until_the_means_are_asked_for():
    metrics = DeviceMetrics(("a",), torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    value = torch.tensor(3.0, device="cuda")
    metrics.read().means()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            busy @ busy
        metrics.add("a", value)
        reading = metrics.read()
        assert not reading.ready(), "the copy is behind 50 large products; if it has arrived, somebody waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.means() == {"a": 3.0}
    assert reading.ready()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_readings_on_their_way_share_nothing_and_those_read_give_their_memory_back(batch):
    metrics = DeviceMetrics(("a",), torch.device("cuda"), batch=batch)
    for _ in range(3):
        readings = []
        for value in (1.0, 2.0, 3.0, 4.0):
            metrics.add("a", torch.tensor(value, device="cuda"))
            readings.append(metrics.read())
        for _ in range(2):
            assert [reading.means()["a"] for reading in readings] == [1.0, 2.0, 3.0, 4.0]
        assert len(metrics._slots) <= 4 // batch + 1
