"""Meeting the other ranks."""

import pytest
import torch
import torch.distributed as dist

from fusedmlp.training import peers
from fusedmlp.training.interrupt import StopRequests
from fusedmlp.training.place import Place


@pytest.mark.parametrize(("kind", "expected"), [("cuda", ["cuda:1", None, None]), ("cpu", [None, None, None])])
def test_only_the_first_group_of_a_process_is_bound_to_its_gpu(monkeypatch, kind, expected):
    """Where one is split, as FSDP2's mesh does, PyTorch crashes if another was there before."""
    bound = []
    monkeypatch.setattr(peers, "_bound_before", False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, device_id, **__: bound.append(device_id))
    for _ in range(3):
        peers.Peers(Place(0, 0, 1, 1), StopRequests()).meet(torch.device(kind, 1 if kind == "cuda" else 0), 60.0)
    assert bound == [None if name is None else torch.device(name) for name in expected]
