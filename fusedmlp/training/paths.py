"""Paths that the user wrote."""

import os
from pathlib import Path


def from_user_directory(path: str) -> Path:
    """Resolve a path that the user wrote, against the directory they started the program in.

    Hydra can move a job to a directory of its own; a relative path still means what it meant on the command line.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd

    start = get_original_cwd() if HydraConfig.initialized() else os.getcwd()
    return Path(start) / Path(path).expanduser()
