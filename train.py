"""Train a network whose GELUs, softmaxes and MLPs come from one implementation, and measure it.

python train.py                                               # the default: an MLP on text, best on any machine
python train.py impl=triton model=gpt dim=512                 # choose the parts
python train.py -m impl=manual,native,compiled dim=128,256    # every combination, each in a process of its own
python train.py --help                                        # all groups, options and values
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

# Imports take seconds; Ctrl-C meanwhile ends the process, without a traceback. A run takes the signals over.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# PyTorch's libraries would end the process with a message about themselves.
try:
    os.getcwd()
except FileNotFoundError:
    sys.exit("error: the current directory does not exist any more; change to one that does")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fusedmlp.profiling.relaunch import relaunch
from fusedmlp.signals import Signals
from fusedmlp.sweep import outcome, plugin
from fusedmlp.sweep.command import job_command
from fusedmlp.sweep.job import GROUP, PARENT, join_sweep, wait_until_let_go
from fusedmlp.training import environment
from fusedmlp.training.cli import Jobs, launch, multirun_first, past_hydra, register_impls
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.place import Start, find
from fusedmlp.training.supervisor import STOPPED, start_ranks

jobs = Jobs()
group = join_sweep()
register_impls()
plugin.register(jobs.ended_elsewhere)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
@past_hydra
def main(cfg: DictConfig) -> None:
    job = HydraConfig.get()
    sweep = Path(job.sweep.dir) if job.mode == RunMode.MULTIRUN else None
    if sweep is not None:
        print(f"\n[{job.job.num}] {' '.join(job.overrides.task)}", flush=True)
    else:
        code = relaunch(cfg.profile, Path(job.runtime.output_dir), {GROUP: group} if group else {})
        if code is not None:
            return jobs.ended_under(code)
    name = group if sweep is None else "-".join(sweep.parts[-2:])
    folder, overrides = Path(job.runtime.output_dir), list(job.overrides.task)
    if isinstance(place := find(cfg.trainer), Start):
        config: Any = HydraConfig.instance().cfg
        number = 0 if OmegaConf.is_missing(job.job, "num") else job.job.num
        shared = {PARENT: str(os.getpid())} | ({GROUP: name} if name else {})
        code = start_ranks(place, job_command(config, overrides, folder, number), shared)
        if code in STOPPED:
            raise Interrupted(code - 128)
        fields = outcome.read(folder) if sweep is not None else {}
        return jobs.ended_elsewhere(fields) if fields else jobs.ended_under(code)
    # Here, because it imports Lightning, which takes seconds that a process which only starts others need not wait.
    from fusedmlp.training.run import run

    with Signals(held=place.world_size > 1):
        result, ending = run(cfg, folder, overrides, name, place)
        return jobs.ended(result, ending) if place.rank == 0 else jobs.ended_under(ending.exit_code)


if __name__ == "__main__":
    environment.held_s = wait_until_let_go(after_import="fusedmlp.training.run")
    sys.argv[1:] = multirun_first(sys.argv[1:])
    launch(main, jobs)
