"""The command line around a run: the impl group, messages for what Hydra refuses, and the last lines printed."""

import contextlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from fusedmlp import impls
from fusedmlp.errors import UserError
from fusedmlp.training.failures import EXIT_FAILED, Ending
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.options import by_closeness
from fusedmlp.training.progress import utilization
from fusedmlp.training.result import Result

EXIT_USAGE = 2


def register_impls() -> None:
    """Makes every implementation an option of the config group impl, so that a new file needs no config."""
    for name in impls.names():
        ConfigStore.instance().store(group="impl", name=name, package="_global_", node={"impl": name})


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
            reason = f"  {fields['reason']}" if fields["reason"] else ""
            lines.append(f"{fields['impl']:10} {fields['dim']:>6} {fields['status']:12} {' '.join(numbers)}{reason}")
        return lines


def launch(main: Callable[[], Any], jobs: Jobs) -> NoReturn:
    """Calls the Hydra application and exits: 0 completed, 1 a run failed, 2 wrong usage, 130 or 143 interrupted."""
    # Hydra prints its own exceptions and exits; with this it hands them on, and they are explained here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process
    try:
        main()
        code = jobs.exit_code
    except HydraException as error:
        code = _complain(explain(error), EXIT_USAGE)
    except OmegaConfBaseException as error:
        code = _complain(_of_config(error), EXIT_USAGE)
    except UserError as error:
        code = _complain(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # Whoever read the output (`| head`) has gone; Python would complain again when it flushes on exit.
        _leave_stdout()
        code = EXIT_FAILED
    except OSError as error:
        # Hydra makes the run's directory before the run begins; what has no name is stdout.
        what = "what is printed cannot be written" if error.filename is None else "the run's directory cannot be made"
        where = "" if error.filename is None else f": {error.filename}"
        code = _complain(f"{what}: {error.strerror}{where}", EXIT_FAILED)
        _leave_stdout()
    except (Interrupted, KeyboardInterrupt) as error:
        code = error.exit_code if isinstance(error, Interrupted) else 130
    except Exception as error:
        # What Hydra's code lets through comes from an odd override, `=3` for one.
        if not _raised_by_hydra(error):
            raise
        code = _complain(f"cannot compose the config: {_of_hydra(str(error))}", EXIT_USAGE)
    if len(jobs._ended) > 1:
        print("\n".join(["", *jobs.table()]))
    sys.exit(code)


def _leave_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):  # in a test there is no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain(error: HydraException) -> str:
    """One message for an override that Hydra refuses: what was given, and the choices, the closest first."""
    if isinstance(error, OverrideParseException):
        reason = _first_line(error.message)
        # Without an equals sign the parser says no more than that.
        reason = "expected KEY=VALUE" if reason.startswith("Error parsing override") else reason
        return f"cannot read the override {error.override!r}: {reason}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        if not group:
            return f"--config-name {option}: there is no such config; train.py's is train"
        choices = ", ".join(by_closeness(option, error.options or []))
        return f"{group}={option} is unknown; accepted: {choices}"
    cause = error.__cause__
    while isinstance(cause, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        return _unknown_key(str(cause.key), cause)
    if isinstance(cause, OmegaConfBaseException):
        return _of_config(cause)
    return re.sub(r"\s*\n\s*", "; ", str(error).strip())


def _raised_by_hydra(error: Exception) -> bool:
    *_, last = traceback.walk_tb(error.__traceback__)
    return str(last[0].f_globals.get("__name__", "")).partition(".")[0] in ("hydra", "omegaconf")


def _of_hydra(message: str) -> str:
    if message.startswith("Config group override must be"):
        return "a config group takes the name of one of its options, as in model=mlp; see train.py --help"
    return _first_line(message)


def _of_config(error: OmegaConfBaseException) -> str:
    key = str(error.full_key or error.key or "")
    return f"{key}: {_first_line(str(error))}" if key else _first_line(str(error))


def _unknown_key(key: str, cause: OmegaConfBaseException) -> str:
    section = str(cause.full_key or key).rpartition(".")[0]
    assert isinstance(cause.parent_node, DictConfig)
    known = [str(name) for name in cause.parent_node if name != "hydra"]
    if not known:
        return f"{section}.{key}: no such key; {section} is a value, which has no keys"
    where = f"keys of {section}" if section else "keys and groups"
    return f"{section}{'.' if section else ''}{key}: no such key; {where}: {', '.join(by_closeness(key, known))}"


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
        return [command(f"resume={_shown(folder)}")]
    if fields["status"] != "completed" or fields["group"] is not None:
        return []
    runnable = [name for name in impls.names() if impls.unavailable(name) is None and name != "auto"]
    others = [name for name in ("triton", "compiled", "native") if name in runnable and name != fields["impl"]]
    steps = [f"{command(f'impl={name}')}   # the same with another implementation" for name in others[:1]]
    every = f"impl={','.join(runnable)}"
    steps.append(f"{command('-m', every)}   # all of them, side by side")
    if fields.get("checkpoint"):
        longer = f"trainer.max_steps={2 * fields['steps']}"
        steps.append(f"{command(f'resume={_shown(folder)}', longer)}   # train on")
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


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "not understood"


def _complain(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
