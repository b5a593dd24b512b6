"""How a model is put in shards."""

from types import SimpleNamespace

import pytest
from torch import nn
from training.runs import fits, train

from fusedmlp.training import strategies
from fusedmlp.training.task import LanguageModelTask


@pytest.mark.parametrize(("ranks", "reshard"), [(1, False), (2, None)])
def test_one_rank_keeps_its_parameters_together_until_the_backward_pass(monkeypatch, ranks, reshard):
    asked = []
    monkeypatch.setattr(strategies, "fully_shard", lambda unit, **options: asked.append((unit, options)))
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    strategies.shard(model, SimpleNamespace(size=lambda: ranks), "32-true")
    assert [unit for unit, _ in asked] == [*model, model]
    assert {options["reshard_after_forward"] for _, options in asked} == {reshard}


@fits
@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")  # torch 2.14
def test_ddp_takes_no_times_after_its_first_ten_steps(tmp_path, monkeypatch):
    """For each of them it waits for the GPU, which `set_sync_debug_mode` does not see."""
    micro_step, timed = LanguageModelTask.micro_step, []

    def looking(self, batch):
        micro_step(self, batch)
        timed.append(self.trainer.strategy.model.logger._get_ddp_logging_data().ints_map["iteration"])

    monkeypatch.setattr(LanguageModelTask, "micro_step", looking)
    settings = ("trainer.strategy=ddp", "trainer.max_steps=102", "trainer.log_every=50", "trainer.checkpoint=false")
    assert train(tmp_path / "run", *settings).status == "completed"
    assert timed[-1] == timed[20] == 10
