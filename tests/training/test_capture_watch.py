"""What a step does in Python is seen before it is recorded, since no replay would do it."""

import importlib
import itertools
import random
import sys
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
from conftest import raises
from torch import nn

from fusedmlp.training import host_values as host_values_module
from fusedmlp.training.capture_watch import nothing_left, watch_host
from fusedmlp.training.host_values import host_values

CALLS = 0
HISTORY: list[int] = []


class Net(nn.Module):
    calls = 0

    def __init__(self, work=None):
        super().__init__()
        self.inner, self.work = nn.Linear(4, 4), work

    def forward(self, x):
        y = self.inner(x)
        if self.work is not None:
            self.work(self, y)
        return y


@dataclass(slots=True)
class Schedule:
    steps: ClassVar[int] = 0
    rate: float = 0.0

    def step(self, *_):
        self.rate += 0.1


def counts(net, y):
    net.inner.calls = getattr(net.inner, "calls", 0) + 1


def counts_for_all(net, y):
    Net.calls += 1


def counts_elsewhere(net, y):
    Schedule.steps += 1


def counts_globally(net, y):
    global CALLS
    CALLS += 1


def remembers(net, y):
    HISTORY.append(0)


def carries(net, y):
    net.state = getattr(net, "state", torch.zeros(())) * 0.9 + y.detach().mean()


def counts_in_a_tensor(net, y):
    if not hasattr(net, "count"):
        net.count = torch.zeros(())
    net.count += 1


def carries_a_leaf(net, y):
    net.state = y.detach().requires_grad_()


def freezes(net, y):
    net.inner.bias.requires_grad_(not net.inner.bias.requires_grad)


def hides(net, y):
    net.kept = {"cache": [y.detach()]}


def drawing(generator, draw):
    return lambda net, y: draw(generator)


def once(net, y):
    net.ready, net.mask = True, net.mask if hasattr(net, "mask") else torch.ones(3)


def shows(net, y):
    net.last, net.loss = y, [y.sum()]


def warns(net, y):
    """Python keeps of each file what it has warned of, and forgets it when a filter changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("slow", stacklevel=1)


def enclosed():
    seen = {"steps": 0}

    def hook(net, y):
        seen["steps"] += 1

    return hook


def with_keyword(net, y, at):
    at.value += 1


WORK = [
    (counts, "inner.calls"),
    (counts_for_all, "test_capture_watch.Net.calls"),
    (counts_elsewhere, "test_capture_watch.Schedule.steps"),
    (counts_globally, "test_capture_watch.CALLS"),
    (remembers, "test_capture_watch.HISTORY"),
    (carries, "state"),
    (carries_a_leaf, "state"),
    (freezes, "inner.bias.requires_grad"),
    (counts_in_a_tensor, "count"),
    (hides, "kept['cache'][0]"),
    (Schedule().step, "work.rate"),
    (enclosed(), "work.seen['steps']"),
    (partial(with_keyword, at=SimpleNamespace(value=0)), "work.keywords['at'].value"),
    (drawing(random.Random(0), random.Random.random), "work.generator"),
    (drawing(numpy.random.default_rng(0), numpy.random.Generator.random), "work.generator"),
    (drawing(numpy.random.RandomState(0), numpy.random.RandomState.rand), "work.generator"),
    (drawing(torch.Generator(), lambda generator: torch.rand((), generator=generator)), "work.generator"),
    (drawing(itertools.count(), next), "work.generator"),
    (drawing(iter(range(9)), next), "work.generator"),
    (drawing(deque([1, 2, 3]), deque.rotate), "work.generator[0]"),
    (drawing(numpy.zeros(2), lambda array: numpy.add(array, 1, out=array)), "work.generator"),
]


def watched(net):
    found: list[str] = []
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
    with watch_host(net, found):
        net(torch.ones(2, 4)).sum().backward()
    return found


@pytest.mark.parametrize(("work", "where"), WORK)
def test_what_changes_in_python_is_named(work, where):
    lines = [line for line in watched(Net(work)) if line.startswith("changes ") and f"{where}, " in line]
    assert lines
    assert all(line.endswith("and a replay would not") for line in lines)


def test_a_hook_counts_too():
    net = Net()
    net.inner.register_forward_hook(lambda module, inputs, output: counts(net, output))
    assert "inner.calls" in watched(net)[0]


OTHER_FILE = """
class Schedule:
    rate = 0

STEPS, SCHEDULE = 0, Schedule()
"""
NET_FILE = """
import torch
import watched_other_file
from watched_other_file import SCHEDULE

class Net(torch.nn.Linear):
    def forward(self, x):
        {}
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("work", "where"),
    [
        ("watched_other_file.STEPS += 1", "watched_other_file.STEPS"),
        ("SCHEDULE.rate += 1", "watched_net_file.SCHEDULE.rate"),
    ],
)
def test_what_changes_in_another_file_of_the_users_is_named(tmp_path, monkeypatch, work, where):
    for name, text in (("watched_other_file", OTHER_FILE), ("watched_net_file", NET_FILE.format(work))):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    host_values_module._folder.cache_clear()
    net, found = importlib.import_module("watched_net_file").Net(4, 4), []
    net(torch.ones(2, 4))
    with watch_host(net, found):
        net(torch.ones(2, 4))
    assert found == [f"changes {where}, on the CPU, and a replay would not"]


class Difficult:
    def __getattr__(self, name):
        raise OSError(name)


@pytest.mark.parametrize("work", [None, once, shows, warns])
def test_what_a_later_step_does_not_see_is_no_change(work):
    """What is computed once, and outputs with a graph, which steps leave behind and none reads."""
    net = Net(work)
    net.difficult, net.self, net.nan = [Difficult()], net, float("nan")
    assert watched(net) == []


LEFT: list[torch.Tensor] = []


def reads_detached(net, y):
    if hasattr(net, "last"):
        y.sub_(net.last.detach())
    net.last = y


def reads_in_a_dictionary(net, y):
    if "last" in net.__dict__.setdefault("kept", {}):
        torch.sub(y, net.kept["last"])
    net.kept["last"] = y


def reads_in_a_tuple(net, y):
    """A recurrent network that goes on where it was, and forgets how it came there."""
    hidden = tuple(tensor.detach() for tensor in net.hidden) if hasattr(net, "hidden") else ()
    net.hidden = (y * len(hidden), y)


def reads_in_an_object(net, y):
    if hasattr(net, "states"):
        y.sub_(net.states[0].mean.detach())
    net.states = deque([SimpleNamespace(mean=y)])


def reads_globally(net, y):
    if LEFT:
        y.sub_(LEFT.pop().detach())
    LEFT.append(y)


def reads_by_operator(net, y):
    if hasattr(net, "last"):
        y.detach().add_((net.last * 0.9).detach())
    net.last = y


def reads_if_it_is_a_tensor(net, y):
    if isinstance(getattr(net, "last", None), torch.Tensor):
        y.sub_(net.last.detach())
    net.last = y


@pytest.mark.parametrize(
    ("work", "where"),
    [
        (reads_detached, "last"),
        (reads_in_a_dictionary, "kept['last']"),
        (reads_in_a_tuple, "hidden[0]"),
        (reads_in_an_object, "states[0].mean"),
        (reads_globally, "LEFT[0]"),
        (reads_by_operator, "last"),
        (reads_if_it_is_a_tensor, "last"),
    ],
)
def test_what_a_step_has_left_with_a_graph_is_not_to_be_read_in_a_recording(work, where):
    LEFT.clear()
    net = Net(work)
    for _ in range(2):
        net(torch.ones(2, 4))
    with raises(RuntimeError, "reads the tensor ", f"{where}, which the step before has left"), nothing_left(net):
        net(torch.ones(2, 4))
    net(torch.ones(2, 4))  # as the steps that go on without a graph


def test_what_was_not_to_be_read_is_as_it_was():
    net = Net()
    net.last = net.alias = net(torch.ones(2, 4))
    with raises(RuntimeError, "reads the tensor last"), nothing_left(net):
        net.alias.sum()
    assert type(net.last) is torch.Tensor
    net.last.sum().backward()


def test_what_a_step_has_left_may_be_replaced_in_a_recording():
    net = Net(shows)
    net.inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    net.once = net(torch.ones(2, 4))
    with nothing_left(net):
        net(torch.ones(2, 4)).sum().backward()
    assert net.once.grad_fn is not None
    assert net.last.grad_fn is not None


def test_a_value_that_a_step_sets_to_itself_is_none_either():
    net = Net(lambda net, y: setattr(net, "rate", float("0.5")))
    assert watched(net) == []
    assert any(name.endswith("rate") for name in host_values(net))
