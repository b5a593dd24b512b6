"""The command lines of a sweep: that of each job, and the one that goes on with the sweep."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

# What concerns the sweep and not a job of it.
_OF_THE_SWEEP = re.compile(r"[+~]*(sweep\.|hydra[./](sweep|launcher|mode|run\.dir|job\.(num|id)))")


def of_the_job(words: Sequence[str]) -> list[str]:
    """The overrides that a job needs, without those that concern the sweep."""
    return [word for word in words if not _OF_THE_SWEEP.match(word)]


def job_command(config: DictConfig, overrides: Sequence[str], folder: Path, number: int) -> list[str]:
    """The same program with the overrides of one job and its directory."""
    own = [f"hydra.run.dir={written(folder)}", f"hydra.job.num={number}"]
    program = str(Path(sys.argv[0]).absolute())
    kept = of_the_job(config.hydra.overrides.hydra)
    return [sys.executable, program, *_sources(config), *overrides, *kept, *own]


def resume_command(config: DictConfig, sweep: Path, timeout_s: float | None) -> str:
    """What goes on with the sweep in the directory `sweep`."""
    words = ["python", sys.argv[0], *_sources(config), "-m", f"sweep.resume={written(sweep)}"]
    if timeout_s is not None:
        words.append(f"sweep.timeout={timeout_s:g}")
    launcher = [word for word in config.hydra.overrides.hydra if re.match(r"hydra[./]launcher", word)]
    return shlex.join([*words, *launcher, *of_the_job(config.hydra.overrides.hydra)])


def _sources(config: DictConfig) -> list[str]:
    """Options of Hydra's command line that say where the configs are."""
    words = []
    for source in config.hydra.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != Path(sys.argv[0]).absolute().parent / "configs":
            words += ["--config-path", source.path]
    name = config.hydra.job.config_name
    return words if name == "train" else [*words, "--config-name", name]


def written(path: Path | str) -> str:
    """A path as the value of an override, in quotes where Hydra's grammar needs them."""
    if re.fullmatch(r"[\w./-]+", str(path), re.ASCII):
        return str(path)
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
