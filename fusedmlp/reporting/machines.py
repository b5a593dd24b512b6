"""Where runs were made: machine, versions and commit, and what tells several of these apart."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fusedmlp.reporting.runs import Run

ENVIRONMENT = (
    "gpu", "gpu_memory_gib", "driver", "cuda", "torch", "triton", "lightning", "python", "platform", "cpu_count",
)  # fmt: skip
FIELDS = (*ENVIRONMENT, "commit", "dirty")

Machine = tuple[Any, ...]  # the values of FIELDS


def machines(runs: Sequence[Run]) -> list[Machine]:
    """The machine (with its software and the commit) of every run.

    The runs of a sweep on one kind of GPU count as one machine even if the commit, a version or the node changed on the
    way, which `mixtures` tells; a run that died before it wrote down where it was is taken for one of them.
    """
    known = [_of(run) for run in runs]
    found: list[Machine] = []
    for run, own in zip(runs, known, strict=True):
        peers = [other for peer, other in zip(runs, known, strict=True) if other and peer.root == run.root]
        alike = [other for other in peers if own is None or other[0] == own[0]]
        found.append(Counter(alike).most_common(1)[0][0] if alike else (None,) * len(FIELDS))
    return found


def mixtures(runs: Sequence[Run]) -> list[str]:
    """What changed within a sweep, one sentence per field."""
    sentences = []
    for root in dict.fromkeys(run.root for run in runs):
        found = [machine for run in runs if run.root == root and (machine := _of(run))]
        for position, name in enumerate(FIELDS):
            counts = Counter(machine[position] for machine in found)
            if name != "gpu" and len(counts) > 1:
                values = ", ".join(f"{value} ({count} runs)" for value, count in counts.most_common())
                sentences.append(f"Within {root.name}, {name.replace('_', ' ')} was not the same for all: {values}.")
    return sentences


def _of(run: Run) -> Machine | None:
    environment, git = run.fields.get("environment"), run.fields.get("git") or {}
    if not environment:
        return None
    values = (*(environment.get(name) for name in ENVIRONMENT), git.get("commit"), git.get("dirty"))
    return tuple(value if isinstance(value, str | int | float) else None for value in values)


def name_of(machine: Machine) -> str:
    """GPU, or CPU with its cores."""
    values = dict(zip(FIELDS, machine, strict=True))
    if values["gpu"]:
        return values["gpu"]
    return f"CPU, {values['cpu_count']} cores" if values["cpu_count"] else "an unknown machine"


def commit_of(machine: Machine) -> str:
    """Short commit, with a word on changes to it."""
    values = dict(zip(FIELDS, machine, strict=True))
    if not values["commit"]:
        return "no commit known"
    return values["commit"][:9] + (" with changes" if values["dirty"] else "")


def labels(found: Sequence[Machine]) -> dict[Machine, str]:
    """A short name for each, in the order given: what differs between them, the machine and commit first."""
    distinct = list(dict.fromkeys(found))
    names = {machine: [name_of(machine), commit_of(machine)] for machine in distinct}
    varying = [position for position in range(len(FIELDS)) if len({machine[position] for machine in distinct}) > 1]
    for machine in distinct:
        twins = [other for other in distinct if names[other][:2] == names[machine][:2]]
        if len(twins) > 1:
            differing = [at for at in varying if len({other[at] for other in twins}) > 1]
            names[machine] = names[machine] + [f"{FIELDS[at]} {machine[at]}" for at in differing]
    return {machine: ", ".join(parts) for machine, parts in names.items()}
