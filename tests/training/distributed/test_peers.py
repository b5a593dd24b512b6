"""Meeting the other ranks."""

import signal

import pytest
import torch
import torch.distributed as dist
from training.runs import config, fits

from fusedmlp.training import peers
from fusedmlp.training.failures import Ending
from fusedmlp.training.interrupt import StopRequests
from fusedmlp.training.messages import FOLDER, post_failure, prefixed
from fusedmlp.training.place import Place
from fusedmlp.training.run import run


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


@fits
@pytest.mark.parametrize("told", [(), (FOLDER,)])
def test_a_rank_that_hears_of_a_failure_before_it_trains_ends_without_a_word_of_its_own(tmp_path, told):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    post_failure(
        prefixed(store), 0, Ending("failed", "trainer.max_steps=0: expected an integer of at least 1", None, 1)
    )
    for name in told:
        prefixed(store).set(name, str(tmp_path / "run"))
    place = Place(1, 1, 2, 2, "127.0.0.1", store.port, hosted=True)
    _, ending = run(config(), tmp_path / "run", [], None, place)
    assert (ending.status, ending.exit_code, ending.bug) == ("failed", 1, False)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_failure_after_training_does_not_end_what_records_it(monkeypatch):
    ours = peers.Peers(Place(0, 0, 2, 2), StopRequests())
    with ours.heeded():
        pass
    ours._said = {"rank": 1}
    ours._woken(0, None)
    with pytest.raises(peers.PeerFailed), ours.heeded():
        pass


@pytest.mark.parametrize(("hosted", "who"), [(True, "the process that started the ranks"), (False, "rank 0")])
def test_a_rank_whose_host_is_gone_says_who_that_was(monkeypatch, hosted, who):
    monkeypatch.setattr(peers.Peers, "_end_main_thread", lambda self, ending: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with peers.Peers(Place(1, 1, 2, 2, "127.0.0.1", store.port, hosted=hosted), StopRequests()) as ours:
        del store
        ours._thread.join(10.0)
        assert ours._said["ending"]["reason"].startswith(f"{who} is gone: ")


def test_only_the_first_rank_says_that_a_signal_waits(capfd):
    for rank, said in ((0, "stopping after this step"), (1, "")):
        stop = StopRequests()
        peers.Peers(Place(rank, rank, 2, 2), stop)
        with stop:
            stop.deferred = True
            signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err.strip().partition(";")[0] == said
        assert stop.received == signal.SIGTERM


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
