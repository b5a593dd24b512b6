"""Where a process that a test starts finds modules."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH with these folders and the project's before what this process has been given."""
    return os.pathsep.join(map(str, filter(None, [*folders, ROOT, os.environ.get("PYTHONPATH")])))
