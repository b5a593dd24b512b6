"""Meeting the other ranks."""

import pytest
import torch
import torch.distributed as dist

from fusedmlp.training import peers
from fusedmlp.training.failures import Ending
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


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_that_waits_in_a_collective_is_let_go_before_it_is_ended(monkeypatch, backend):
    """NCCL's kernels wait for a rank that is no more, and no signal ends the call that waits for them."""
    happened: list[str] = []
    for name, seconds in (("_POLL_S", 0.01), ("_COLLECTIVE_S", 0.1), ("_ENDING_S", 0.5)):
        monkeypatch.setattr(peers, name, seconds)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: happened.append("let go"))
    monkeypatch.setattr(peers, "_leave_at_once", lambda code: happened.append("ended"))
    stuck = peers.Peers(Place(0, 0, 2, 2), StopRequests())
    stuck.on_stuck = lambda ending: happened.append(ending.reason)
    stuck._end_main_thread(Ending("failed", "rank 1: a bug", None, 1))
    assert happened == ["let go"] * (backend == "nccl") + ["rank 1: a bug", "ended"]

    # One that ends by itself is left alone.
    happened.clear()
    stuck._closing = True
    stuck._end_main_thread(Ending("failed", "rank 1: a bug", None, 1))
    assert happened == []
