"""Runs of several ranks, each rank in a process that lasts for all runs of a test: importing takes longer than they do.

As a program it is such a rank: its argument is a list of runs in JSON, of which one for a single device is rank 0's.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from python_path import ROOT, python_path
from torch.distributed import TCPStore

TIMEOUT_S = 400
# Two GPUs with NCCL where there are two, else two processes with gloo.
ON_GPUS = torch.cuda.device_count() >= 2
ACCELERATOR = "trainer.accelerator=gpu" if ON_GPUS else "trainer.accelerator=cpu"


def train_all(runs: list[dict], **environment: str) -> str:
    """Trains runs of `folder`, `overrides` and `world_size` one after another; what the two ranks printed.

    In those with `waits` False, a step that waits for a GPU fails.
    """
    # One place to meet for each run, where nobody else listens.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    tasks = json.dumps([run | {"port": store.port} for run, store in zip(runs, stores, strict=True)])
    world_size = max(run["world_size"] for run in runs)
    command = [sys.executable, "-W", "error::UserWarning:fusedmlp", __file__, tasks]
    shared = os.environ | environment | {"PYTHONPATH": python_path(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    # A rank that crashes says where.
    shared |= {"PYTHONFAULTHANDLER": "1", "NCCL_DEBUG": "WARN"}
    if not ON_GPUS:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    ranks = [
        subprocess.Popen(command, env=shared | {"TEST_RANK": str(rank)}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, start_new_session=True)
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        output = "\n".join(rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
    codes = [rank.returncode for rank in ranks]
    assert codes == [0] * world_size, f"exit codes {codes}\n{output}"
    return output


def main(tasks: list[dict], rank: int) -> int:
    from training.runs import RANDOM_BYTES, TINY, config, waiting_forbidden

    from fusedmlp.training.place import Place
    from fusedmlp.training.run import run

    for task in tasks:
        world_size = task["world_size"]
        if rank >= world_size:
            continue
        place = Place(rank, rank, world_size, world_size, port=task["port"], hosted=True) if world_size > 1 else None
        fixed = (*TINY, *RANDOM_BYTES, ACCELERATOR, "trainer.rank_timeout=60", "trainer.precision=32-true")
        overrides = [*fixed, *task["overrides"]]
        with contextlib.nullcontext() if task.get("waits", True) else waiting_forbidden():
            _, ending = run(config(*overrides), Path(task["folder"]), overrides, None, place)
        if ending.status != "completed":
            print(f"rank {rank}, {task['folder']}: {ending}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(os.environ["TEST_RANK"])))
