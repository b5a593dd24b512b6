"""Runs put together: repeats of one configuration with one impl make a cell, the impls of a configuration a group."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedmlp.reporting.machines import Machine, machines
from fusedmlp.reporting.runs import Run
from fusedmlp.sweep.ledger import COMPLETED, RUNNING, WAITING

BASELINE = "native"
# The order of tables and plots; what is not listed comes after, by name.
IMPLS = ("manual", "native", "compiled", "triton", "cuda", "auto")

Setting = tuple[tuple[str, str], ...]  # key and value of what was swept, the model first, dim last


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of `runs` runs, in the unit of what was measured."""

    median: float
    low: float
    high: float
    runs: int


@dataclass
class Cell:
    """The runs of one impl in one configuration on one machine."""

    impl: str
    runs: list[Run] = field(default_factory=list)

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.status == COMPLETED]

    @property
    def measured(self) -> list[Run]:
        """The runs that its numbers come from: those that completed or, if none did, those that came to measure."""
        return self.completed or [run for run in self.runs if run.speed]

    @property
    def resolved(self) -> str | None:
        return next((run.fields["impl_resolved"] for run in self.runs if run.fields.get("impl_resolved")), None)

    def spread(self, name: str) -> Spread | None:
        """Of a field of `throughput`, over the runs."""
        values = [float(run.speed[name]) for run in self.measured if run.speed.get(name) is not None]
        return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None

    @property
    def step_ms(self) -> Spread | None:
        """Median step of each run."""
        return self.spread("step_ms_median")

    def within(self) -> tuple[float, float] | None:
        """p10 and p90 of the steps within the run, in ms, where there is only one."""
        if len(self.measured) != 1:
            return None
        low, high = (self.measured[0].speed.get(name) for name in ("step_ms_p10", "step_ms_p90"))
        return None if low is None or high is None else (float(low), float(high))

    def median(self, read: Callable[[Run], float | None]) -> float | None:
        values = [value for run in self.measured if (value := read(run)) is not None]
        return statistics.median(values) if values else None

    @property
    def peak_gib(self) -> float | None:
        return max((run.fields["peak_memory_gib"] for run in self.measured if run.fields.get("peak_memory_gib")),
                   default=None)  # fmt: skip

    @property
    def trace(self) -> dict[str, Any]:
        """What a trace of one of its runs says; empty without one."""
        return next((run.fields["trace"] for run in self.measured if run.fields.get("trace")), {})

    @property
    def time_by_kind_ms(self) -> dict[str, float]:
        """Milliseconds of a step by kind of kernel, from a trace; empty without one."""
        kinds = {
            kind: found.get("ms") for kind, found in self.trace.get("kinds", {}).items() if isinstance(found, dict)
        }
        found = self.trace.get("time_by_kind_ms") or kinds
        return {kind: float(ms) for kind, ms in found.items() if isinstance(ms, int | float)}

    @property
    def captured(self) -> str | None:
        """Whether steps were replayed from a CUDA graph, "yes", "no" or "some"; None if that is not known."""
        said = (run.fields["cuda_graph"].get("captured") for run in self.measured if run.fields.get("cuda_graph"))
        known = {captured for captured in said if captured is not None}
        return None if not known else "some" if len(known) > 1 else "yes" if known.pop() else "no"

    @property
    def status(self) -> str:
        """Of its runs: "completed", "completed, 3 runs", "2 completed, 1 timed out"."""
        statuses = [run.status for run in self.runs]
        if len(set(statuses)) == 1:
            return statuses[0] + (f", {len(statuses)} runs" if len(statuses) > 1 else "")
        return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))

    @property
    def pending(self) -> bool:
        return any(run.status in (WAITING, RUNNING) for run in self.runs)

    @property
    def reasons(self) -> list[str]:
        """Why runs of it did not complete, each reason once."""
        return list(dict.fromkeys(str(run.fields["reason"]) for run in self.runs if run.fields.get("reason")))


@dataclass
class Group:
    """One configuration on one machine, with every impl that ran it."""

    setting: Setting
    machine: Machine
    cells: list[Cell]

    @property
    def baseline(self) -> Cell | None:
        """The cell of native, if it completed."""
        return next((cell for cell in self.cells if cell.impl == BASELINE and cell.completed), None)

    def cell(self, impl: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.impl == impl), None)

    def speed_up(self, cell: Cell) -> float | None:
        """Of a cell that completed over the baseline: the ratio of their median step times."""
        if self.baseline is None or not cell.completed or not cell.step_ms or not self.baseline.step_ms:
            return None
        return self.baseline.step_ms.median / cell.step_ms.median


def group(runs: Sequence[Run]) -> list[Group]:
    """All groups, in the order of machines, then of their settings.

    Jobs of whose configuration nothing is known yet, because none like them has begun, are left out.
    """
    runs = [run for run in runs if run.status != WAITING or run.config]
    places = machines(runs)
    order = {machine: position for position, machine in enumerate(dict.fromkeys(places))}
    keys = swept_keys(runs)
    found: dict[tuple[Machine, Setting], dict[str, Cell]] = {}
    for run, machine in zip(runs, places, strict=True):
        setting = (("model", model_of(run)), *((key, run.value(key)) for key in keys), ("dim", dim_of(run)))
        cells = found.setdefault((machine, setting), {})
        cells.setdefault(run.impl, Cell(run.impl)).runs.append(run)
    groups = [
        Group(setting, machine, sorted(cells.values(), key=lambda cell: impl_order(cell.impl)))
        for (machine, setting), cells in found.items()
    ]
    return sorted(groups, key=lambda one: (order[one.machine], [sortable(value) for _, value in one.setting]))


def swept_keys(runs: Sequence[Run]) -> list[str]:
    """Keys besides impl, model and dim that not all runs have the same value of, in the order of the command lines."""
    candidates = dict.fromkeys(key for run in runs for key in run.keys() if key != "model")  # noqa: SIM118
    kept: list[str] = []
    # Two keys that change together, as an experiment and what it sets, are one.
    partitions = {_partition([model_of(run) for run in runs])}
    for key in candidates:
        partition = _partition([run.value(key) for run in runs])
        if any(partition) and partition not in partitions and not key.startswith("logger"):
            kept.append(key)
            partitions.add(partition)
    return kept


def _partition(values: Sequence[str]) -> tuple[int, ...]:
    """Equal numbers for equal values, counted from 0."""
    number = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return tuple(number[value] for value in values)


def model_of(run: Run) -> str:
    """The model's name: its option in the config group, or its class."""
    if "model" in run.overrides:
        return run.overrides["model"]
    name = run.fields.get("model") or str((run.config.get("model") or {}).get("_target_", "")).rpartition(".")[2]
    if name:
        return str(name).removesuffix("LanguageModel").lower()
    return "unknown model"


def dim_of(run: Run) -> str:
    dim = run.fields.get("dim")
    return str(run.overrides.get("dim", run.config.get("dim", "default")) if dim is None else dim)


def impl_order(impl: str) -> tuple[int, str]:
    return (IMPLS.index(impl) if impl in IMPLS else len(IMPLS), impl)


def sortable(value: str) -> tuple[int, float, str]:
    """Numbers by value, before words."""
    try:
        return (0, float(value), "")
    except ValueError:
        return (1, 0.0, value)


def title(setting: Setting, *, without: Sequence[str] = ()) -> str:
    """A setting in words: "mlp, cuda_graph=true, dim 512"."""
    words = []
    for key, value in setting:
        if key in without:
            continue
        last = key.rpartition(".")[2]
        short = last if sum(other.rpartition(".")[2] == last for other, _ in setting) == 1 else key
        words.append(value if key == "model" else f"dim {value}" if key == "dim" else f"{short}={value}")
    return ", ".join(words)
