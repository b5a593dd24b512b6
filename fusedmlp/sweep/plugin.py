"""Makes the launchers of sweeps known to Hydra: hydra/launcher=isolated and slurm."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydra.core.plugins import Plugins

from fusedmlp.sweep.isolated import IsolatedLauncher
from fusedmlp.sweep.launcher import SweepLauncher
from fusedmlp.sweep.slurm import SlurmLauncher


def register(ended: Callable[[dict[str, Any]], None]) -> None:
    """Registers them; `ended` is told the fields of result.json of every job."""
    SweepLauncher.report = staticmethod(ended)
    plugins = Plugins.instance()
    # Hydra instantiates what it can find in the namespace hydra_plugins and nothing else. It may not exist; where other
    # plugins have made it, this is one more name in it.
    namespace = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    setattr(namespace, "fusedmlp", sys.modules[__name__])  # noqa: B010
    plugins.register(IsolatedLauncher)
    plugins.register(SlurmLauncher)
