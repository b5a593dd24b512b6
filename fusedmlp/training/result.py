"""A run's directory and its result.json, which tells what came of the run whatever happened to it."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusedmlp.errors import UserError

SCHEMA_VERSION = 1
STATUSES = ("running", "completed", "interrupted", "diverged", "timed out", "failed")
FILE = "result.json"


class Result:
    """The content of result.json: written when the run starts, with status "running", and when it ends.

    Args:
        folder: the run's directory.
        fields: what is known at the start.
    """

    def __init__(self, folder: Path, **fields: Any):
        self.folder = folder
        self.fields: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "reason": None,
            "hint": None,
        }
        self.fields |= fields

    @property
    def status(self) -> str:
        return self.fields["status"]

    def write(self, **fields: Any) -> None:
        """Updates the fields and replaces the file in one step: a reader sees the old or the new one, always whole."""
        self.fields |= fields
        assert self.status in STATUSES
        text = json.dumps(_plain(self.fields), indent=2, allow_nan=False) + "\n"
        file, partial = self.folder / FILE, self.folder / f"{FILE}.partial"
        try:
            partial.write_text(text)
            os.replace(partial, file)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            if not _overwritten(file, text):
                raise OSError(error.errno, error.strerror, str(file)) from error


def _overwritten(file: Path, text: str) -> bool:
    """Writes over what is there, where no new file can be: on a full disk a file still has its own blocks."""
    try:
        if len(text) > file.stat().st_blocks * 512:
            return False
        with open(file, "r+") as opened:
            opened.write(text)
            opened.truncate()
    except OSError:
        return False
    return True


class UnwrittenResult(Result):
    """The same fields on a rank that writes no file."""

    def write(self, **fields: Any) -> None:
        self.fields |= fields


def claim_folder(wanted: Path) -> Path:
    """Makes a directory for one run: `wanted`, or `wanted`-2, -3 and so on if a run has it already.

    Raises: UserError if it cannot be made or written.
    """
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Exclusive creation decides between runs that start in the same second.
            (folder / FILE).touch(exist_ok=False)
            return folder
        except FileExistsError:
            if not folder.is_dir():
                raise UserError(f"the run's directory {folder} cannot be made: a file is in the way") from None
            number += 1
        except OSError as error:
            raise UserError(
                f"the run's directory {folder} cannot be written ({error.strerror}); choose one with hydra.run.dir=DIR"
            ) from error


def _plain(value: Any) -> Any:
    """`value` with what JSON has no word for replaced: NaN and infinities by None, paths by text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
