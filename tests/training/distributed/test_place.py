"""Who is which rank: torchrun, Slurm, this program, or one process alone."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import raises
from omegaconf import OmegaConf
from python_path import python_path
from training.runs import config

from fusedmlp.errors import UserError
from fusedmlp.sweep.isolated import IsolatedLauncher
from fusedmlp.training.options import TrainerOptions, build
from fusedmlp.training.place import Place, Start, find

DDP = {"strategy": "ddp", "devices": 2, "num_nodes": 1, "accelerator": "cpu"}
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
# srun --nodes=2 --ntasks-per-node=4: task 5, the second on the second host
SLURM = {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456",
}  # fmt: skip


def test_one_device_is_this_process():
    alone = {"strategy": "single", "devices": 1, "num_nodes": 1}
    assert find(alone, {}) == Place()
    assert find(DDP | {"devices": 1}, {}) == Place()
    assert find(alone, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Place(), "sbatch without srun"


def test_several_devices_of_this_host_are_started():
    assert find(DDP, {}) == Start(2, 0, 2)
    count = max(torch.cuda.device_count(), 1)
    every = find(DDP | {"devices": "auto", "accelerator": "auto"}, {})
    assert every == (Place() if count == 1 else Start(count, 0, count))
    with raises(UserError, "trainer.devices=1000000: expected at most", "on this host"):
        find(DDP | {"devices": 10**6}, {})


@pytest.mark.parametrize("values", [{"devices": 0}, {"devices": "all"}, {"num_nodes": "two"}, {"devices": 1.5}])
def test_what_is_no_count_is_left_to_the_options(values):
    assert find(DDP | values, {}) == Place()


def test_torchrun():
    place = Place(3, 1, 4, 2, "node1", 29500, hosted=True)
    assert find(DDP | {"num_nodes": 2}, TORCHRUN) == place
    assert find(DDP | {"devices": "auto"}, TORCHRUN) == place
    assert (place.num_nodes, place.node) == (2, 1)
    with raises(UserError, "trainer.devices=4", "trainer.num_nodes=1", "2 processes", "2 hosts", "devices=auto"):
        find(DDP | {"devices": 4}, TORCHRUN)
    with raises(UserError, "4 processes", "trainer=default", "trainer=ddp"):
        find({"strategy": "single", "devices": 1}, TORCHRUN)


def test_slurm_with_a_task_per_device():
    port = 15000 + 123456 % 40000
    place = find(DDP | {"devices": 4, "num_nodes": 2}, SLURM)
    assert place == Place(5, 1, 8, 4, "gpu07", port)
    assert not place.hosted, "rank 0 listens"
    with raises(UserError, "trainer.devices=2", "4 processes"):
        find(DDP, SLURM)


def test_slurm_with_a_task_per_host():
    tasks = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    found = find(DDP | {"devices": 4, "num_nodes": 2}, tasks)
    assert found == Start(4, 4, 8, "gpu07", 15000 + 123456 % 40000)
    with raises(UserError, "trainer.num_nodes=3", "2 hosts"):
        find(DDP | {"devices": 4, "num_nodes": 3}, tasks)


def test_several_hosts_need_a_process_on_each():
    with raises(UserError, "trainer.num_nodes=2", "torchrun or srun"):
        find(DDP | {"num_nodes": 2}, {})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("trainer.devices=2",),
            ("trainer.devices=2: expected 1 with trainer=default", "trainer=ddp and trainer=fsdp"),
        ),
        (("trainer.num_nodes=2",), ("trainer.num_nodes=2: expected 1 with trainer=default",)),
        (("trainer=ddp", "trainer.devices=0"), ("trainer.devices=0: expected an integer of at least 1, or auto",)),
        (("trainer=ddp", "trainer.devices=all"), ("trainer.devices=all: expected", "auto")),
        (("trainer=ddp", "trainer.cuda_graph=true"), ("a step under trainer=ddp is not captured",)),
        (("trainer.strategy=dpp",), ("trainer.strategy=dpp is unknown; accepted: ddp",)),
    ],
)
def test_what_does_not_fit_is_one_message(overrides, words):
    section = OmegaConf.to_container(config(*overrides).trainer, resolve=True)
    with raises(UserError, *words):
        build("trainer", section, TrainerOptions)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, ("WORLD_SIZE=two", "a number", "unset it")),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, ("MASTER_PORT=http", "a number")),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ("a step of Slurm", "has no SLURM_NODELIST", "srun, or unset")),
        ({"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "a"}, ("has no SLURM_PROCID",)),
        ({"SLURM_STEP_NUM_TASKS": "2(x3)"}, ("SLURM_STEP_NUM_TASKS=2(x3)", "a number")),
    ],
)
def test_what_another_job_left_in_the_environment_is_named(environment, words):
    with raises(UserError, *words):
        find({"strategy": "ddp", "devices": 2, "num_nodes": 1, "accelerator": "cpu"}, environment)


def test_a_process_that_only_starts_others_does_not_wait_for_lightning():
    code = "import sys, train; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": python_path()}).returncode == 0


def test_a_sweep_is_not_started_by_every_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises(UserError, "torchrun", "start train.py -m without"):
        IsolatedLauncher().setup(hydra_context=None, task_function=None, config=None)
