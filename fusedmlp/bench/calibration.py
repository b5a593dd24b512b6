"""What the cost model is calibrated on: measured values of how well each implementation does, in calibration.json.

Its `sources` say where they come from: H200s, torch 2.11, Triton 3.6. Newer ones come from records of
`scripts/bench.py`, on that or on another card; several runs of one card, from several machines, say more than one:

    python scripts/advise.py --calibrate RECORD/bench.json [RECORD/bench.json ...] --out mine.json
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedmlp.bench.predict import Entry, Run, calibrate
from fusedmlp.errors import UserError

FILE = Path(__file__).with_name("calibration.json")


def load(path: Path = FILE) -> list[Entry]:
    """Entries from a calibration file, or from a record of `scripts/bench.py`. Raises: UserError."""
    found = _read(path)
    return found if isinstance(found, list) else calibrate([found])


def from_records(paths: Sequence[Path]) -> list[Entry]:
    """Entries from records of `scripts/bench.py`, of one kind of card. Raises: UserError."""
    runs: list[Run] = []
    for path in paths:
        found = _read(path)
        if isinstance(found, list):
            raise UserError(f"{path} is a calibration; expected records of scripts/bench.py")
        runs.append(found)
    return calibrate(runs)


def _read(path: Path) -> list[Entry] | Run:
    """The entries of a calibration file, or what a record measured."""
    try:
        content = json.loads(path.read_text())
        if "entries" in content:
            return [Entry(*entry) for entry in content["entries"]]
        return _measured(content)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is neither a calibration nor a record of scripts/bench.py: no text") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is neither a calibration nor a record of scripts/bench.py: {_said(error)}") from error


def _measured(content: dict[str, Any]) -> Run:
    """Rows and copy bandwidth of a record."""
    if "tables" in content and "copy_gb_per_s" not in content.get("limits", {}):
        raise ValueError("the record has no measured copy bandwidth; let bench.py measure the table copy too, on a GPU")
    rows = [row for table in content["tables"].values() for row in table if "share_of_limit" in row]
    run = rows, float(content["limits"]["copy_gb_per_s"])
    calibrate([run])  # here, where a row that lacks something is known to be of this file
    return run


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


BUILT_IN = load()


def update(found: Sequence[Entry], known: Sequence[Entry]) -> list[Entry]:
    """What was found, and of the known entries those for an op, implementation and direction that it lacks."""
    measured = {entry[:3] for entry in found}
    return [*(entry for entry in known if entry[:3] not in measured), *found]


def save(path: Path, sources: Sequence[str], entries: Sequence[Entry]) -> None:
    """Write a calibration file, an entry a line."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    content = f'{{\n "sources": {json.dumps(list(sources))},\n "entries": [\n{lines}\n ]\n}}\n'
    try:
        path.write_text(content)
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from error
