"""Where the package keeps what is expensive to make again: packed corpora, built kernels, measured choices."""

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """$FUSEDMLP_CACHE, else fusedmlp in the platform's cache directory.

    Raises: RuntimeError when that directory cannot be told, because there is no home directory.
    """
    if chosen := os.environ.get("FUSEDMLP_CACHE"):
        return Path(chosen).expanduser()
    return _platform_cache() / "fusedmlp"


def _platform_cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore a relative path
        return Path(xdg)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"
