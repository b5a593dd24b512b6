"""Branches of a CUDA graph: what waits for what, and when there are any."""

from contextlib import contextmanager

import pytest
import torch

from fusedmlp.kernels import branches

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch):
    """A GPU of 132 multiprocessors on which a graph is being recorded."""
    happened = []
    current = [Stream("main", happened)]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(branches, "_side_stream", lambda device: Stream("side", happened))
    monkeypatch.setattr(branches, "num_sms", lambda device: 132)
    return happened


def run(events, shape=(1024, 512), device=GPU):
    def launch(name):
        stream = torch.cuda.current_stream(device).name if device.type == "cuda" else "none"
        events.append(f"{name} on {stream}")
        return name

    assert branches.side_by_side(lambda: launch("first"), lambda: launch("second"), shape, device) == (
        "first",
        "second",
    )
    return events


def test_both_branches_begin_after_what_was_before_and_end_before_what_follows(events):
    assert run(events) == ["side waits for main", "second on side", "first on main", "main waits for side"]


def test_a_product_that_fills_the_gpu_has_nothing_beside_it(events):
    # 131 tiles of 128 x 128 leave a multiprocessor free, 132 none.
    assert "second on side" in run(events, (128, 131 * 128))
    events.clear()
    assert run(events, (128, 131 * 128 + 1)) == ["first on main", "second on main"]


def test_outside_of_a_recording_there_is_one_stream(events, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert run(events) == ["first on main", "second on main"]


def test_a_cpu_has_no_streams(events):
    assert run(events, device=torch.device("cpu")) == ["first on none", "second on none"]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 512])
def test_a_recorded_backward_pass_gives_the_same_gradients(dim):
    from fusedmlp.functional import linear_gelu

    weights = [torch.randn(dim, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    x = torch.randn(256, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = x
        for weight in weights:
            y = linear_gelu(y, weight * dim**-0.5, impl="triton")
        return torch.autograd.grad(y, (x, *weights), torch.ones_like(y))

    expected = [t.clone() for t in step()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for mine, wanted in zip(got, expected, strict=True):
        assert torch.equal(mine, wanted)
