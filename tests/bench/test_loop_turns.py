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
from fusedmlp.training.throughput import Durations

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


def test_logged_and_silent_blocks_alternate(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_turns, "LOG_BLOCK", BLOCK)
    config.trainer.max_steps = 6 * BLOCK
    found = loop_turns.logged_in_turns(lambda: run(config, tmp_path / "run", []), CPU)
    assert [len(turn) for turn in found] == [2, 2]
    assert all(0 < never.host_ms < every.host_ms < every.ms for every, never in found)
    assert all(taken.rest_ms > 0 for turn in found for taken in turn)
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    logged = [step for block in (0, 3, 4) for step in range(block * BLOCK + 1, (block + 1) * BLOCK + 1)]
    assert steps == [*logged, 6 * BLOCK]


def test_the_logged_block_comes_first_in_every_turn(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_turns, "LOG_BLOCK", 5)
    config.trainer.max_steps = 8 * 5
    # every, never; never, every; every, never; never, every
    steps, host = iter([9.0, 9.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0]), iter([9.0, 9.0, 0.1, 0.4, 0.4, 0.1, 0.1, 0.4])
    monkeypatch.setattr(loop_turns, "_mean", lambda _: next(steps))
    monkeypatch.setattr(loop_turns.LogsInTurns, "host_ms", lambda _: (next(host), 0.5))
    found = loop_turns.logged_in_turns(lambda: run(config, tmp_path / "run", []), CPU)
    assert found == [[(2, 0.4, 0.5), (1, 0.1, 0.5)]] * 3


def test_what_a_block_leaves_to_be_written_is_part_of_it(config, monkeypatch):
    config = build("trainer", OmegaConf.to_container(config.trainer), TrainerOptions)
    block = loop_turns.LogsInTurns(config, [], None)
    now = iter([10.0, 10.05])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    block.calls = [(1.0, 1.5), (2.0, 2.5), (3.0, 3.5), (3.510, 3.511), (3.523, 3.526), (3.537, 3.539)]
    assert block.host_ms() == pytest.approx(((1 + 3 + 2 + 50) / 3, 11))
    assert block.calls == []


def test_the_cost_of_logging():
    logged = loop_turns.Logged
    turns = [[logged(1.02 * n, 0.05 * n, 0.97 * n), logged(n, 0.02 * n, 0.98 * n)] for n in range(1, 8)]
    found = loop_turns.cost_of_logging(turns, host_bound=True)
    assert [found[name] for name in ("cost %", "host %", "of it the monitor %")] == pytest.approx([2, 2, 3])
    assert found["monitor us a row"] == pytest.approx(120)
    assert (found["never ms"], found["95 % interval"]) == (4, "2.0, 2.0")
    found = loop_turns.cost_of_logging(turns, host_bound=False)
    assert (found["cost %"], found["host %"]) == (pytest.approx(2), None)


def test_what_others_take_belongs_to_no_step():
    blocks, cpu_ms = [], []

    def between(block, cpu):
        blocks.append(block)
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
    assert max(Durations.of(clock.take()).step_ms) < 200


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
