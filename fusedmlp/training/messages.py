"""What ranks tell each other on the host, through the store where they meet: no device takes part and none waits.

The first failure counts: the others that follow from it keep quiet.
"""

import json
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore, Store

from fusedmlp.training.failures import Ending

FOLDER, FAILED, STOP = "folder", "failed", "stop"


def prefixed(store: Store) -> PrefixStore:
    """The part of the store that is ours."""
    return PrefixStore("fusedmlp", store)


def left(rank: int) -> str:
    """The key that says that a rank needs nothing from the others any more."""
    return f"left/{rank}"


def post_failure(store: Store, rank: int, ending: Ending, traceback: str = "") -> dict[str, Any]:
    """Says how the run ends because of `rank`, unless another has said so before; returns what counts."""
    words = json.dumps({"rank": rank, "ending": asdict(ending), "traceback": traceback})
    return json.loads(store.compare_set(FAILED, "", words))


def failure(store: Store) -> dict[str, Any] | None:
    """The failure that counts, if there is one."""
    return json.loads(store.get(FAILED)) if store.check([FAILED]) else None


def ending_for(said: dict[str, Any], rank: int) -> Ending:
    """The ending of the run on `rank`, from what was said."""
    ending = Ending(**said["ending"])
    reason = ending.reason or ""
    if said["rank"] == rank or ending.status != "failed" or reason.startswith("rank "):
        return ending
    return Ending(ending.status, f"rank {said['rank']}: {reason}", ending.hint, ending.exit_code, ending.bug)
