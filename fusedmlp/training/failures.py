"""How a run ended: status, reason, hint and exit code for whatever was raised."""

import errno
import re
import signal
from dataclasses import dataclass

from fusedmlp.errors import UserError, is_out_of_memory
from fusedmlp.training.interrupt import Interrupted

EXIT_FAILED = 1
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class Diverged(Exception):
    """The loss or the gradients are no longer finite."""


@dataclass(frozen=True)
class Ending:
    """How a run ended. `bug` says that nobody foresaw it, so that its traceback is worth keeping."""

    status: str
    reason: str | None = None
    hint: str | None = None
    exit_code: int = 0
    bug: bool = False


def ending_of(error: BaseException | None) -> Ending:
    """The ending that `error` makes; a run without one has completed."""
    if error is None:
        return Ending("completed")
    if isinstance(error, Interrupted):
        return Ending("interrupted", str(error), None, error.exit_code)
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        # Lightning's `fit` makes that of one that was raised, as by a debugger, and not sent.
        error = error.__context__
    if isinstance(error, KeyboardInterrupt):
        return ending_of(Interrupted(signal.SIGINT))
    if isinstance(error, Diverged):
        hint = "try a smaller trainer.learning_rate, more trainer.warmup_steps or a smaller trainer.max_grad_norm"
        return Ending("diverged", str(error), hint, EXIT_FAILED)
    if is_out_of_memory(error):
        hint = (
            "halve data.batch_size and double trainer.accumulate, or take a smaller dim, model.num_layers or "
            "model.context; trainer.precision=bf16-true needs half the memory of 32-true"
        )
        return Ending("failed", f"out of memory: {_one_line(error)}", hint, EXIT_FAILED)
    if isinstance(error, UserError):
        return Ending("failed", str(error), None, EXIT_FAILED)
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename else ""
        hint = "free some space or permissions, or choose another directory with hydra.run.dir=DIR"
        # Of a file that the model misses, say, that would be no help.
        unwritable = error.errno in _UNWRITABLE
        return Ending("failed", f"{error.strerror}{where}", hint if unwritable else None, EXIT_FAILED, bug=True)
    reason = _of_worker(error) or f"{type(error).__name__}: {_one_line(error)}"
    return Ending("failed", reason, None, EXIT_FAILED, bug=True)


def _of_worker(error: BaseException) -> str | None:
    """What was raised in a worker of a DataLoader, whose traceback is the message of what is raised here."""
    text = str(error)
    caught = re.match(r"Caught (\w+) in DataLoader worker process (\d+)", text)
    if caught is None:
        return None
    name, worker = caught.groups()
    raised = re.findall(rf"^(?:\w+\.)*({name}(?:: .*)?)$", text, re.MULTILINE)
    return f"{raised[-1]}, in data worker {worker}" if raised else None


def _one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
