"""How a model is put in shards."""

from types import SimpleNamespace

import pytest
from torch import nn

from fusedmlp.training import strategies


@pytest.mark.parametrize(("ranks", "reshard"), [(1, False), (2, None)])
def test_one_rank_keeps_its_parameters_together_until_the_backward_pass(monkeypatch, ranks, reshard):
    asked = []
    monkeypatch.setattr(strategies, "fully_shard", lambda unit, **options: asked.append((unit, options)))
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    strategies.shard(model, SimpleNamespace(size=lambda: ranks), "32-true")
    assert [unit for unit, _ in asked] == [*model, model]
    assert {options["reshard_after_forward"] for _, options in asked} == {reshard}
