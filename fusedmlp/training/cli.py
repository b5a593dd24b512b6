"""The command line around a run: the impl group, messages for what Hydra refuses, and the last lines printed."""

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fusedmlp import impls, streams
from fusedmlp.errors import UserError
from fusedmlp.sweep.command import written
from fusedmlp.training.explain import explain, of_config, of_hydra, raised_by_hydra
from fusedmlp.training.failures import EXIT_FAILED, Ending
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.progress import utilization
from fusedmlp.training.result import Result

EXIT_USAGE = 2


def register_impls() -> None:
    """Makes every implementation an option of the config group impl, so that a new file needs no config."""
    for name in impls.names():
        ConfigStore.instance().store(group="impl", name=name, package="_global_", node={"impl": name})


class _Raised(BaseException):
    """Carries what a job raised past Hydra, which would print a line about it first."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error


def past_hydra(job: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """A job of a Hydra application of which `launch` tells what it raises, and nobody else."""

    @functools.wraps(job)
    def guarded(cfg: DictConfig) -> Any:
        try:
            return job(cfg)
        except Exception as error:
            raise _Raised(error) from error

    return guarded


class Jobs:
    """The runs of one command: one, or several in a sweep."""

    def __init__(self) -> None:
        # The fields of result.json, and the exit code.
        self._ended: list[tuple[dict[str, Any], int]] = []

    def ended(self, result: Result, ending: Ending) -> None:
        """Shows how a run ended. Raises: Interrupted if the user stopped it, so that no further one starts."""
        self._ended.append((result.fields, ending.exit_code))
        print("\n".join(last_lines(result)), flush=True)
        if ending.status == "interrupted":
            raise Interrupted(ending.exit_code - 128)

    def ended_elsewhere(self, fields: dict[str, Any]) -> None:
        """Takes a run that ended in a process of its own, where it was shown."""
        self._ended.append((fields, 0 if fields["status"] == "completed" else EXIT_FAILED))

    def ended_under(self, code: int) -> None:
        """Takes the exit code of a run that a profiler started and that has been shown."""
        self._ended.append(({}, code))

    @property
    def exit_code(self) -> int:
        return max((code for _, code in self._ended), default=0)

    def table(self) -> list[str]:
        """One line per run of a sweep, as far as it came."""
        lines = [f"{'impl':10} {'dim':>6} {'status':12} {'tokens/s':>12} {'step ms':>9} {'val loss':>9}"]
        for fields, _ in self._ended:
            speed = fields.get("throughput") or {}
            numbers = (
                _number(speed.get("tokens_per_s"), ",.0f", 12),
                _number(speed.get("step_ms_median"), ".2f", 9),
                _number(fields.get("final_val_loss"), ".3f", 9),
            )
            reason = f"  {fields['reason']}" if fields.get("reason") else ""
            impl, dim, status = (str(fields.get(name)) for name in ("impl", "dim", "status"))
            lines.append(f"{impl:10} {dim:>6} {status:12} {' '.join(numbers)}{reason}")
        return lines


def launch(main: Callable[[], Any], jobs: Jobs) -> NoReturn:
    """Calls the Hydra application and exits: 0 completed, 1 a run failed, 2 wrong usage, 129, 130 or 143 stopped."""
    # Hydra prints its own exceptions and exits; with this it hands them on, and they are explained here.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    def work() -> int:
        code = _exit_code(main, jobs)
        if len(jobs._ended) > 1:
            print("\n".join(["", *jobs.table()]))
        return code

    sys.exit(streams.exit_code(work))


def multirun_first(words: list[str]) -> list[str]:
    """The command line with -m in front: between two overrides argparse takes it for the end of them."""
    flags = ("-m", "--multirun")
    return [*(word for word in words if word in flags), *(word for word in words if word not in flags)]


def _exit_code(main: Callable[[], Any], jobs: Jobs) -> int:
    """Calls the application; what it raises is told in a line."""
    try:
        _call(main)
        return jobs.exit_code
    except HydraException as error:
        return _complain(explain(error), EXIT_USAGE)
    except OmegaConfBaseException as error:
        return _complain(of_config(error), EXIT_USAGE)
    except UserError as error:
        return _complain(str(error), EXIT_FAILED)
    except BrokenPipeError:
        raise
    except OSError as error:
        # Hydra makes the run's directory before the run begins.
        reason = str(error.strerror or error)
        if error.filename is not None:
            remedy = "choose another with hydra.run.dir=DIR, or hydra.sweep.dir=DIR with -m"
            reason = f"the run's directory cannot be made: {error.filename}: {reason}; {remedy}"
        return _complain(reason, EXIT_FAILED)
    except (Interrupted, KeyboardInterrupt) as error:
        return error.exit_code if isinstance(error, Interrupted) else 130
    except Exception as error:
        # What Hydra's code lets through comes from an odd override, `=3` for one.
        if not raised_by_hydra(error):
            raise
        return _complain(f"cannot compose the config: {of_hydra(str(error))}", EXIT_USAGE)


def _call(main: Callable[[], Any]) -> None:
    try:
        main()
    except _Raised as raised:
        raise raised.error from raised.error.__cause__


def last_lines(result: Result) -> list[str]:
    """What to print when a run is over: what came of it, where everything is, what to try next."""
    fields, folder = result.fields, result.folder
    lines = ["", *_outcome(fields), f"run        {_shown(folder)}"]
    places: dict[str, Path | None] = {"result": folder / "result.json", "log": folder / "train.log"}
    if fields.get("steps"):
        places |= {"metrics": folder / "metrics.csv"}
    trace = fields.get("trace") or {}
    places |= {"trace": trace.get("file"), "kernels": trace.get("kernels_file")}
    places |= {"checkpoint": fields.get("checkpoint"), "W&B": fields.get("wandb")}
    lines += [f"  {name:10} {_shown(Path(place))}" for name, place in places.items() if place]
    return [*lines, *(f"next       {line}" for line in _next_steps(fields, folder))]


def _outcome(fields: dict[str, Any]) -> list[str]:
    lines = []
    if fields["status"] != "completed":
        lines.append(f"{fields['status']}: {fields['reason']}")
    if fields["hint"]:
        lines.append(f"hint: {fields['hint']}")
    if fields.get("final_val_loss") is not None:
        lines.append(
            f"validation loss {fields['final_val_loss']:.3f} nats/token; byte frequencies alone give "
            f"{fields['data']['unigram_loss']:.3f}"
        )
    speed = fields.get("throughput")
    if speed:
        memory = fields.get("peak_memory_gib")
        lines.append(
            f"{speed['tokens_per_s']:,.0f} tokens/s, {speed['step_ms_median']:.2f} ms/step "
            f"(p10 {speed['step_ms_p10']:.2f}, p90 {speed['step_ms_p90']:.2f})"
            + (f", peak {memory:.2f} GiB" if memory else "")
            + (", step from a CUDA graph" if (fields.get("cuda_graph") or {}).get("captured") else "")
        )
        if speed.get("devices", 1) > 1:
            lines.append(f"{speed['tokens_per_s_per_device']:,.0f} tokens/s on each of {speed['devices']} devices")
        waited = f"{speed['data_wait_percent']:.1f} % of the time waiting for data"
        rate = speed["tflops_per_s"]
        lines.append(waited if rate is None else f"{utilization(rate, speed['mfu_percent'])}, {waited}")
    return lines


def _next_steps(fields: dict[str, Any], folder: Path) -> list[str]:
    def command(*changes: str) -> str:
        changed = tuple(change.partition("=")[0] + "=" for change in changes if "=" in change)
        kept = [word for word in fields["overrides"] if not word.startswith((*changed, "resume=", "profile.relaunch="))]
        return shlex.join(["python", _program(), *changes, *kept])

    if fields["status"] == "interrupted" and fields.get("checkpoint"):
        return [command(f"resume={written(_shown(folder))}")]
    if fields["status"] != "completed" or fields["group"] is not None:
        return []
    runnable = [name for name in impls.names() if impls.unavailable(name) is None and name != "auto"]
    others = [name for name in ("triton", "compiled", "native") if name in runnable and name != fields["impl"]]
    steps = [f"{command(f'impl={name}')}   # the same with another implementation" for name in others[:1]]
    every = f"impl={','.join(runnable)}"
    steps.append(f"{command('-m', every)}   # all of them, side by side")
    if fields.get("checkpoint"):
        longer = f"trainer.max_steps={2 * fields['steps']}"
        steps.append(f"{command(f'resume={written(_shown(folder))}', longer)}   # train on")
    return steps


def _program() -> str:
    """train.py as it was called, from wherever that was."""
    return sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"


def _shown(path: Path) -> str:
    """Relative to the current directory where it lies below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _number(value: float | None, form: str, width: int) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def _complain(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
