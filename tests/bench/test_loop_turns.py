"""Our loop and bare ones in turns, on a CPU and tiny; and what says how sure a median is."""

import csv
import time

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from scripts_by_path import FOLDER, script

from fusedmlp.training.cli import register_impls
from fusedmlp.training.options import TrainerOptions, build
from fusedmlp.training.run import run

loop_turns = script("loop_turns")
BLOCK = loop_turns.BLOCK
CPU = torch.device("cpu")
TINY = (
    "impl=native", "dim=16", "model.num_layers=1", "data=synthetic", "data.num_tokens=4000", "data.batch_size=4",
    "logger=none", "trainer.accelerator=cpu", "trainer.checkpoint=false", "trainer.val_every=0",
    "trainer.warmup_steps=2", "trainer.log_every=10", f"trainer.max_steps={4 * BLOCK}",
)  # fmt: skip


@pytest.fixture
def config():
    register_impls()
    with initialize_config_dir(str(FOLDER.parent / "configs"), version_base="1.3"):
        return compose("train", list(TINY))


def test_ours_and_bare_blocks_alternate(config, tmp_path):
    plain = OmegaConf.to_container(config, resolve=True)
    others = [loop_turns.BareLoop(plain, False, CPU) for _ in range(2)]
    seen = []
    for name, loop in zip("ab", others, strict=True):
        bare = loop.run
        loop.run = lambda steps, bare=bare, name=name: seen.append(name) or bare(steps)
    results = []
    turns = loop_turns.in_turns(lambda: results.append(run(config, tmp_path / "run", [])), others, CPU)
    assert [len(turn) for turn in turns] == [3, 3, 3]
    assert all(0 < value < 1e4 for turn in turns for taken in turn for value in taken)
    assert seen == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [loop.step_number for loop in others] == [4 * BLOCK, 4 * BLOCK]
    ((result, ending),) = results
    assert (ending.status, result.fields["steps"]) == ("completed", 4 * BLOCK)


def test_steps_are_logged_and_not_in_turns(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_turns, "SPELL", 2)
    monkeypatch.setattr(loop_turns, "TURN", 16)
    config.trainer.max_steps = 3 * 16 + 1
    config.trainer.log_every = 3 * 16 + 1
    found = loop_turns.logged_in_turns(lambda: run(config, tmp_path / "run", []))
    assert [len(turn) for turn in found] == [16, 16]
    assert all(0 < ms < 1e5 for turn in found for step in turn for ms in step)
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[:8] == [1, 2, 7, 8, 9, 10, 15, 16]
    assert len(steps) == 3 * 8 + 1


def test_each_step_is_followed_by_the_next(config):
    options = build("trainer", OmegaConf.to_container(config.trainer), TrainerOptions)
    monitor = loop_turns.LogsInTurns(options, [], None)
    monitor.calls = [(1.0, 1.25), (2.0, 2.5), (3.0, 3.0)]
    monitor._durations.step_ms = [1.0, 2.0, 3.0]
    assert monitor.steps() == [(250, 750, 2), (500, 500, 3)]


def turns_of(every, never, writes=0.0):
    """Four turns of two rounds each; rows are written in a step that is not logged."""
    taken = [every if loop_turns.is_logged(i) else never for i in range(8 * loop_turns.SPELL)]
    taken[loop_turns.SPELL] = never._replace(monitor_ms=never.monitor_ms + writes)
    return [taken] * 4


def test_the_cost_of_logging_where_the_host_bounds_a_step():
    followed, rows = loop_turns.Followed, 4 * loop_turns.SPELL
    found = loop_turns.cost_of_logging(
        turns_of(followed(0.3, 10.1, 0), followed(0.1, 10.0, 0), writes=0.1 * rows), True
    )
    assert found["monitor us a row"] == pytest.approx(200 + 100)
    assert found["never ms"] == pytest.approx(10.1)
    assert (found["the rest %"], found["the monitor %"]) == pytest.approx((10 / 10.1, 30 / 10.1))
    assert found["cost %"] == pytest.approx(40 / 10.1)
    assert (found["95 % interval"], found["interval of the rest"]) == ("4.0, 4.0", "1.0, 1.0")


def test_the_cost_of_logging_where_the_device_bounds_a_step():
    followed = loop_turns.Followed
    found = loop_turns.cost_of_logging(turns_of(followed(0.3, 5, 2.02), followed(0.1, 7, 2.0)), False)
    assert (found["never ms"], found["cost %"]) == pytest.approx((2, 1))
    assert (found["monitor us a row"], found["95 % interval"]) == (pytest.approx(200), "1.0, 1.0")
    # Rows of one table.
    of_host = loop_turns.cost_of_logging(turns_of(followed(0.3, 5, 2.02), followed(0.1, 7, 2.0)), True)
    assert list(found) == list(of_host)
    assert found["the rest %"] is None


def test_what_others_take_belongs_to_no_step():
    blocks, cpu_ms = [], []

    def between(durations, cpu):
        blocks.append(durations().step_ms)
        cpu_ms.append(cpu)
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            pass

    clock = loop_turns.BlockClock(CPU, between)
    clock.resume()
    for _ in range(3 * BLOCK + 1):
        clock.tick()
    assert [len(block) for block in blocks] == [BLOCK] * 3
    assert 0 <= max(cpu_ms) < 200
    assert max(clock.durations(clock.take()).step_ms) < 200


def test_ours_is_compared_with_the_mean_of_both_others():
    taken = loop_turns.Taken
    turns = [[taken(1.1 * n, 2.4 * n), taken(0.9 * n, 2.0 * n), taken(1.1 * n, 2.0 * n)] for n in range(1, 8)]
    found = loop_turns.compared(turns)
    assert found["overhead %"] == pytest.approx(10)
    assert found["CPU time %"] == pytest.approx(20)
    assert found["bare over bare %"] == pytest.approx(100 * 2 / 9)
    assert (found["ours ms"], found["bare ms"]) == pytest.approx((4.4, 4.0))
    assert found["95 % interval"] == found["smallest, largest %"] == "10.0, 10.0"


def test_interval_of_a_median():
    # 12 values: the third and the tenth, with 96 %; the second and the eleventh would be more than is asked for.
    assert loop_turns.interval(list(range(12))) == (2, 9)
    assert loop_turns.interval([5.0, 1.0, 3.0]) == (1.0, 5.0)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(400, 15, generator=generator).tolist()
    inside = sum(low <= 0 <= high for low, high in map(loop_turns.interval, draws))
    assert 0.94 < inside / 400 < 0.99
