"""Ranges on models of all sorts."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedmlp.profiling.ranges import Ranges, blocks, no_range


class Log:
    """A marker that writes down what begins and ends."""

    def __init__(self):
        self.lines: list[str] = []

    @contextmanager
    def __call__(self, name):
        self.lines.append(f"> {name}")
        yield
        self.lines.append(f"< {name}")


class Layer(nn.Module):
    """Takes its input by name and returns a tuple, as blocks of other libraries do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, hidden):
        return (hidden + self.linear(hidden), None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, recompute=False):
        x = self.embedding(x)
        for layer in self.body.layers:
            x = checkpoint(layer, hidden=x, use_reentrant=False)[0] if recompute else layer(hidden=x)[0]
        return x.sum()


@pytest.fixture
def installed():
    log, model = Log(), Model()
    task = SimpleNamespace(range=no_range, model=model, on_fetch=lambda: None, on_batch=lambda: None)
    ranges = Ranges(log)
    ranges.install(task)
    return SimpleNamespace(log=log.lines, model=model, task=task, ranges=ranges)


BLOCKS = ("block body.layers.0", "block body.layers.1")
FORWARD = [f"{sign} {name}" for name in BLOCKS for sign in "><"]
BACKWARD = [f"{sign} {name} backward" for name in reversed(BLOCKS) for sign in "><"]


def test_blocks_are_found_and_nested_lists_are_not():
    model = Model()
    model.body.layers[0].heads = nn.ModuleList([nn.Linear(1, 1)])
    assert [name for name, _ in blocks(model)] == ["body.layers.0", "body.layers.1"]
    assert list(blocks(nn.Linear(1, 1))) == []


def test_both_passes_of_every_block(installed):
    installed.model(torch.ones(2, 4)).backward()
    assert installed.log == FORWARD + BACKWARD


def test_recomputing_in_the_backward_pass_leaves_nothing_open(installed):
    installed.model(torch.ones(2, 4), recompute=True).backward()
    begun, ended = ([line[2:] for line in installed.log if line[0] == sign] for sign in "><")
    assert sorted(begun) == sorted(ended)
    assert installed.ranges._open == {}


def test_a_block_without_gradients_has_no_backward_pass(installed):
    with torch.no_grad():
        installed.model(torch.ones(2, 4))
    assert installed.log == FORWARD
    installed.log.clear()
    installed.model.embedding.requires_grad_(False)
    installed.model.body.layers[0].requires_grad_(False)
    installed.model(torch.ones(2, 4)).backward()
    assert installed.log == FORWARD, "the input of the second needs no gradient, so nobody would say when it ends"


def test_removing_takes_all_of_it_off_and_closes_what_is_open(installed):
    installed.task.on_fetch()
    assert installed.log == ["> step", "> data"]
    installed.ranges.remove()
    assert installed.log == ["> step", "> data", "< data", "< step"]
    installed.log.clear()
    installed.model(torch.ones(2, 4)).backward()
    installed.task.on_fetch()
    assert installed.log == []
    assert installed.task.range is no_range


def test_a_forward_pass_that_breaks_closes_its_block(installed):
    with pytest.raises(RuntimeError):
        installed.model.body.layers[1](hidden=torch.ones(2, 3))
    assert installed.log == ["> block body.layers.1", "< block body.layers.1"]


def test_nothing_costs_nothing():
    assert no_range("forward") is no_range("backward")
