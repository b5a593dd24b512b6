"""The table of measured choices: one JSON file in the package's cache directory, shared by processes and ranks."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusedmlp.cache import cache_dir
from fusedmlp.errors import UserError

FORMAT = 1
LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Entry:
    """What was measured for one bucket of calls.

    Attributes:
        ms: implementation -> median time of a call in ms, forward and, where gradients are wanted, backward.
        left: implementation -> why it was not timed.
        pinned: the entry came with an imported table and is not measured again.
    """

    ms: dict[str, float]
    left: dict[str, str] = field(default_factory=dict)
    pinned: bool = False

    def covers(self, names: list[str]) -> bool:
        """Whether nothing is to be measured for these candidates."""
        return self.pinned or all(name in self.ms or name in self.left for name in names)


Choices = dict[str, dict[str, Entry]]  # environment -> key of the call -> entry


def path() -> Path:
    return cache_dir() / "auto-choices.json"


def read(file: Path | None = None) -> Choices:
    """The choices in the file; one that is missing, damaged or of another format counts as empty."""
    try:
        return parse((file or path()).read_text())
    except (OSError, ValueError, RuntimeError):
        return {}


def parse(text: str) -> Choices:
    """Raises: ValueError for anything but a table."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a table of choices ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"not a table of choices in format {FORMAT}")
    try:
        return {
            environment: {key: _entry(fields) for key, fields in entries.items()}
            for environment, entries in content["choices"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a damaged table of choices: {error}") from error


def _entry(fields: dict[str, Any]) -> Entry:
    ms = {str(name): float(value) for name, value in fields["ms"].items()}
    if not ms:
        raise ValueError("an entry without times")
    return Entry(ms, dict(fields.get("left", {})), bool(fields.get("pinned", False)))


def dump(choices: Choices) -> str:
    entries = {environment: {k: asdict(e) for k, e in sorted(known.items())} for environment, known in choices.items()}
    return json.dumps({"format": FORMAT, "choices": entries}, indent=1) + "\n"


def write(choices: Choices) -> None:
    """Replaces the file in one step. Call it with the lock held. Raises: OSError."""
    replace(path(), dump(choices))


def replace(file: Path, text: str) -> None:
    """Writes beside `file` and renames, so that a reader sees the old or the new one, whole. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as temporary:
        temporary.write(text)
    os.chmod(temporary.name, 0o644)  # temporary files are for their owner alone; the table is for every rank
    os.replace(temporary.name, file)


@contextmanager
def locked(found: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Holds the table for itself: one process measures, the others wait and read what it found.

    Args:
        found: asked while another process has it; once true there is nothing to wait for.
    Yields: whether the lock is held; not after `found`, nor where the directory cannot be written, the system has no
        file locks, or another process has held it for a minute.
    """
    file = None
    with suppress(OSError, RuntimeError):
        path().parent.mkdir(parents=True, exist_ok=True)
        file = open(path().with_suffix(".lock"), "a")  # noqa: SIM115
    if file is None:
        yield False
        return
    with file:
        yield _acquire(file, found)


def _acquire(file: Any, found: Callable[[], bool]) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            # The system lets go of it when the file is closed, also when the process is killed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if found() or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError:
            return False


def update(changes: Choices, overwrite: bool = True) -> None:
    """Adds entries to the file. Raises: OSError where it cannot be written."""
    with locked():
        merge(changes, overwrite)


def merge(changes: Choices, overwrite: bool = True) -> None:
    """As `update`, for a caller that holds the lock."""
    known = read()
    for environment, entries in changes.items():
        mine = known.setdefault(environment, {})
        mine.update(entries if overwrite else {k: e for k, e in entries.items() if k not in mine})
    write(known)


def from_file(file: Path) -> Choices:
    """A table that somebody exported. Raises: UserError if it is none."""
    try:
        return parse(file.read_text())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is {error}; expected what `python -m fusedmlp.auto export FILE` writes") from error
