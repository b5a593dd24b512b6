"""Where this process stands among those of its run, and who started it: torchrun, Slurm, this program, or nobody.

A rank is a process that trains on one device; the ranks of a host are its local ranks.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusedmlp.errors import UserError
from fusedmlp.training.options import DISTRIBUTED, require, shown

_RANKS_PER_CORE = 4


@dataclass(frozen=True)
class Place:
    """This process among the ranks of a run.

    Attributes:
        address, port: where the ranks meet; port 0 for any free one, when there is one rank.
        hosted: whether somebody else listens there, such as torchrun or the process that started the ranks.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size


@dataclass(frozen=True)
class Start:
    """The ranks that this process has to start on its host: `count` of `world_size`, beginning with rank `first`.

    `port` is 0 where one host has all of them.
    """

    count: int
    first: int
    world_size: int
    address: str = "127.0.0.1"
    port: int = 0


def find(trainer: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Place | Start:
    """What this process is to do for a run with this section `trainer`: be a rank, or start ranks and wait for them.

    Values that are no counts are left to `TrainerOptions`, which says so.

    Raises: UserError where the processes that were started are not those that `trainer` asks for.
    """
    if trainer.get("strategy") not in DISTRIBUTED:
        return _only_one(environment)
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _checked(_of_torchrun(environment), devices, nodes)
    wanted = _local_devices(devices, trainer.get("accelerator"))
    if wanted is None or type(nodes) is not int or nodes < 1:
        return Place()
    tasks = _count(environment, "SLURM_STEP_NUM_TASKS", 1)
    if tasks > 1 or nodes > 1:
        return _of_slurm(environment, tasks, wanted, devices, nodes)
    # Each is a process: a slip of the hand must not fill the machine with them.
    most = max(torch.cuda.device_count(), _RANKS_PER_CORE * (os.cpu_count() or 1))
    require("trainer.devices", wanted, wanted <= most, f"at most {most} on this host")
    return Place() if wanted == 1 else Start(wanted, 0, wanted)


def _only_one(environment: Mapping[str, str]) -> Place:
    # Lightning reads them as numbers when it is imported.
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        _count(environment, name, 0)
    others = _count(environment, "WORLD_SIZE", 1) if "RANK" in environment else 1
    if others > 1:
        raise UserError(
            f"{others} processes were started for one run, and trainer=default trains on one device; choose "
            "trainer=ddp or trainer=fsdp"
        )
    return Place()


def _of_torchrun(environment: Mapping[str, str]) -> Place:
    rank, world_size = _count(environment, "RANK"), _count(environment, "WORLD_SIZE")
    return Place(
        rank,
        _count(environment, "LOCAL_RANK", rank),
        world_size,
        _count(environment, "LOCAL_WORLD_SIZE", world_size),
        environment.get("MASTER_ADDR", "127.0.0.1"),
        _count(environment, "MASTER_PORT", 0),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _of_slurm(environment: Mapping[str, str], tasks: int, wanted: int, devices: Any, nodes: int) -> Place | Start:
    """One task of srun per device is a rank; one per host starts those of its host."""
    # Whoever only starts ranks need not wait for Lightning.
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    if tasks == 1:
        raise UserError(
            f"trainer.num_nodes={nodes}: a process has to be started on every host; use torchrun or srun, see README"
        )
    hosts_of_step = environment.get("MASTER_ADDR") or environment.get("SLURM_STEP_NODELIST")
    address = SLURMEnvironment.resolve_root_node_address(hosts_of_step or _given(environment, "SLURM_NODELIST"))
    # Jobs that share a host have different numbers.
    port = _count(environment, "MASTER_PORT", 15000 + _count(environment, "SLURM_JOB_ID", 0) % 40000)
    hosts = _count(environment, "SLURM_STEP_NUM_NODES", _count(environment, "SLURM_NNODES", 1))
    if tasks == hosts and wanted > 1:
        if nodes != hosts:
            raise UserError(f"trainer.num_nodes={nodes}: Slurm runs this step on {hosts} hosts")
        return Start(wanted, _count(environment, "SLURM_NODEID") * wanted, wanted * nodes, address, port)
    rank, local_rank = _count(environment, "SLURM_PROCID"), _count(environment, "SLURM_LOCALID")
    return _checked(Place(rank, local_rank, tasks, tasks // hosts, address, port), devices, nodes)


def _given(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise UserError(
            f"the environment looks like a step of Slurm (SLURM_STEP_NUM_TASKS) but has no {name}; start train.py with "
            "srun, or unset what another job has left there"
        )
    return environment[name]


def _count(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in a variable that torchrun or Slurm sets; empty counts as not set."""
    if default is not None and not environment.get(name):
        return default
    text = _given(environment, name)
    if not text.isdecimal():
        raise UserError(
            f"the environment variable {name}={text}: expected a number, as torchrun and srun set it; unset it to "
            "train with one process"
        )
    return int(text)


def _checked(place: Place, devices: Any, nodes: Any) -> Place:
    """Raises: UserError unless these are the processes that were asked for; "auto" takes what there is."""
    if devices != "auto" and (devices != place.local_world_size or nodes != place.num_nodes):
        raise UserError(
            f"trainer.devices={shown(devices)}, trainer.num_nodes={shown(nodes)}: {place.local_world_size} processes "
            f"on each of {place.num_nodes} hosts were started; give those numbers, or trainer.devices=auto"
        )
    return place


def _local_devices(devices: Any, accelerator: Any) -> int | None:
    """How many devices are asked for on this host; None for what is not accepted."""
    if devices == "auto":
        return max(torch.cuda.device_count(), 1) if accelerator != "cpu" else 1
    return devices if type(devices) is int and devices >= 1 else None
