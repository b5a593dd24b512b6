"""Runs one after another, whose next ones have their processes already."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fusedmlp.signals import Signals
from fusedmlp.sweep import ahead as module
from fusedmlp.sweep.ahead import Ahead, Run

ROOT = Path(__file__).parents[2]
# What train.py does at its gate, without its imports; then what a test gives, with its directory as `folder`.
PROCESS = """
import json, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ.get("RANK", "0")
def note(what):
    (folder / f"{what}-{rank}").write_text(json.dumps([time.time(), os.getpid(), dict(os.environ)]))
note("started")
time.sleep(0.3)
gate = os.environ.pop("FUSEDMLP_SWEEP_GATE", None)
if gate:
    let_go, ready = map(int, gate.split(","))
    note("ready")
    os.close(ready)
    if not os.read(let_go, 1):
        sys.exit(143)
note("begun")
"""


def run(folder: Path, code: str = "", ranks: int = 1) -> Run:
    folder.mkdir()
    command = [sys.executable, "-c", PROCESS + code + "\nnote('ended')", str(folder)]
    return Run(command, folder, folder / "log", folder, ranks, {"OF": folder.name})


def at(folder: Path, what: str, rank: int = 0) -> float:
    return json.loads((folder / f"{what}-{rank}").read_text())[0]


def environment(folder: Path, rank: int = 0) -> dict[str, str]:
    return json.loads((folder / f"begun-{rank}").read_text())[2]


def pids(*folders: Path) -> set[int]:
    return {json.loads(file.read_text())[1] for folder in folders for file in folder.glob("started-*")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def folders(tmp_path):
    yield (found := [tmp_path / name for name in "abc"])
    left = [pid for pid in pids(*found) if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes are left"


def test_the_next_run_is_started_while_one_is_under_way_and_begins_when_that_has_ended(folders):
    a, b, c = folders
    with Ahead([run(folder, "time.sleep(0.5)") for folder in folders], 1, Signals()) as ahead:
        endings = [ahead.follow(20).result() for _ in folders]
    assert [ending.exit_code for ending in endings] == [0, 0, 0]
    assert at(b, "ready") < at(a, "ended") < at(b, "begun")
    assert at(a, "ended") < at(c, "started"), "one is ahead, not two"
    assert at(c, "ready") < at(b, "ended") < at(c, "begun")
    assert environment(c)["OF"] == "c"
    assert "FUSEDMLP_SWEEP_GROUP" not in environment(c), "its result would say that it was a sweep's"


def test_nothing_is_held_without_preload(folders):
    a, b, _ = folders
    with Ahead([run(a), run(b)], 0, Signals()) as ahead:
        assert [ahead.follow(20).result().exit_code for _ in "ab"] == [0, 0]
    assert at(a, "ended") < at(b, "started")
    assert not (a / "ready-0").exists()


def test_a_quiet_run_begins_when_all_others_have_imported(folders):
    with Ahead([run(folder) for folder in folders], 2, Signals(), quiet=True) as ahead:
        ahead.follow(20).result()
    assert max(at(folder, "ready") for folder in folders) <= at(folders[0], "begun")
    assert not (folders[1] / "begun-0").exists(), "left out, and withdrawn"


OVER = "(folder / 'result.json').write_text('{\"status\": \"completed\"}'); time.sleep(1)"


@pytest.mark.parametrize(("preload", "quiet"), [(1, False), (1, True), (0, False)])
def test_the_next_run_begins_while_one_that_is_over_leaves(folders, preload, quiet):
    a, b, _ = folders
    with Ahead([run(a, OVER), run(b)], preload, Signals(), quiet) as ahead:
        first, second = ahead.follow(20), ahead.follow(20)
        assert [first.result().exit_code, second.result().exit_code] == [0, 0]
    assert (at(b, "begun") < at(a, "ended")) is (preload == 1 and not quiet)


def test_ranks_have_the_environment_of_torchrun_and_a_port_of_their_own(folders):
    a, b, _ = folders
    meet = (
        "from torch.distributed import TCPStore\n"
        "TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False).set(rank, 'here')"
    )
    with Ahead([run(a, meet, ranks=2), run(b, ranks=2)], 1, Signals(), quiet=True) as ahead:
        assert [ahead.follow(60).result().exit_code for _ in "ab"] == [0, 0]
    for rank in range(2):
        found = environment(a, rank)
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (found["LOCAL_WORLD_SIZE"], found["TORCHELASTIC_USE_AGENT_STORE"]) == ("2", "True")
    assert environment(a)["MASTER_PORT"] == environment(a, 1)["MASTER_PORT"] != environment(b)["MASTER_PORT"]
    ready, begun = ([at(a, what, rank) for rank in range(2)] for what in ("ready", "begun"))
    assert max(ready) < min(begun), "both import at the same time"


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
DIES = "if rank == '1': print('no luck'); sys.exit(3)\ntime.sleep(600)"


@pytest.mark.parametrize("code", [DIES, STUBBORN + DIES], ids=["listens", "does not"])
def test_a_rank_that_dies_ends_the_run_and_not_the_next(folders, monkeypatch, code):
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    monkeypatch.setattr("fusedmlp.training.supervisor.LAST_GRACE_S", 0.3)
    a, b, _ = folders
    with Ahead([run(a, code, ranks=2), run(b)], 1, Signals()) as ahead:
        ended = ahead.follow(60).result()
        assert (ended.exit_code, ended.timed_out) == (3, False)
        assert not any(alive(pid) for pid in pids(a))
        assert ahead.follow(60).result().exit_code == 0
    assert "no luck" in (a / "log").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_exceeds_its_time_limit_is_ended(folders, monkeypatch, ranks):
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    with Ahead([run(folders[0], STUBBORN + "time.sleep(600)", ranks)], 1, Signals()) as ahead:
        ended = ahead.follow(1.5).result()
    assert ended.timed_out
    assert ended.exit_code != 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_ends_the_run_and_leaving_withdraws_the_others(folders, ranks):
    signals, a = Signals(), folders[0]

    def stop() -> None:
        while not (a / f"begun-{ranks - 1}").exists():
            time.sleep(0.05)
        signals.received.append(signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    with Ahead([run(folder, "time.sleep(600)", ranks) for folder in folders], 2, signals) as ahead:
        assert ahead.follow(60).result().exit_code != 0
    thread.join()
    assert len(pids(*folders)) == 3 * ranks
    assert not (folders[1] / "begun-0").exists()


def test_what_train_imports_before_its_turn_touches_no_gpu():
    code = """
import torch
def touched(*_, **__):
    raise AssertionError("the GPU was touched")
for where, name in ((torch._C, "_cuda_getDeviceCount"), (torch._C, "_cuda_init"), (torch.cuda, "_lazy_init"),
                    (torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "current_device")):
    if hasattr(where, name):
        setattr(where, name, touched)
import train
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
