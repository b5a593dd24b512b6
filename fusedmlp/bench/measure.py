"""One case, every implementation: right first, then timed in turns; a row for each implementation and direction."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedmlp.bench import candidates, gate, launches, traffic
from fusedmlp.bench.cases import USUAL_DIRECTIONS, Case, make_tensors
from fusedmlp.bench.clock import Function, Measured, Pace, in_turns
from fusedmlp.errors import UserError, is_out_of_memory
from fusedmlp.profiling.timing import peak_bytes

LIMIT = "limit"


@dataclass(frozen=True)
class Bench:
    """How a run measures.

    Attributes:
        impls, peers: names.  directions: empty for each op's usual ones.
        say: takes a line about what did not work.
    """

    device: torch.device
    pace: Pace
    impls: Sequence[str]
    peers: Sequence[str] = ()
    directions: Sequence[str] = ()
    say: Callable[[str], None] = field(default=print)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def measure_case(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """Rows of a case; an implementation that cannot run, is wrong, or raises has one row with its `failure`.

    Raises: UserError if the tensors themselves do not fit.
    """
    try:
        tensors = make_tensors(case, bench.device)
        native = candidates.impl_op("native", case)
        dy = torch.randn_like(native(*(t for t in tensors.values())))
        oracle = gate.make_oracle(case, tensors, dy)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{case} does not fit into memory; give a smaller --shape") from error
    checked, rows = [], []
    for name, op in _ops(case, bench):
        try:
            if isinstance(op, Exception):
                raise op
            with traffic.compiled_graphs() as graphs:
                worst = oracle.check(gate.results(op, tensors, dy))
            checked.append(Checked(name, op, worst, graphs))
        except Exception as error:
            rows.append(_row(case, None, name) | {"failure": reason(error)})
            bench.say(f"{case} {name}: {reason(error)}")
    del oracle
    for direction in bench.directions or USUAL_DIRECTIONS[case.op]:
        rows += _direction(case, direction, bench, checked, tensors, dy)
    return rows


@dataclass(frozen=True)
class Checked:
    """An op that passed the gate: its error, and the graphs that were compiled for it."""

    name: str
    op: candidates.Op
    error: float
    graphs: list[traffic.Graph]


def _ops(case: Case, bench: Bench) -> Iterator[tuple[str, Any]]:
    """(name, op) of everything to be measured; an exception in place of an op that is not there."""
    for name in bench.impls:
        try:
            yield name, candidates.impl_op(name, case)
        except RuntimeError as error:
            yield name, error
    for name in bench.peers:
        try:
            op = candidates.peer_op(name, case)
        except (ImportError, AttributeError, RuntimeError) as error:
            yield name, error
        else:
            if op is not None:
                yield name, op


def _direction(case: Case, direction: str, bench: Bench, checked: list[Checked], tensors, dy) -> list[dict[str, Any]]:
    calls, facts, rows = {}, {}, []
    for one in checked:
        try:
            calls[one.name] = call = candidates.call(one.op, tensors, dy, direction)
            facts[one.name] = {"error": one.error} | _facts(one, call, direction, bench)
        except Exception as error:
            calls.pop(one.name, None)
            rows.append(_row(case, direction, one.name) | {"failure": reason(error)})
            bench.say(f"{case} {direction} {one.name}: {reason(error)}")
    bound, factor = candidates.limit(case, tensors, dy, direction)
    try:
        times = in_turns({LIMIT: bound, **calls}, bench.device, bench.pace)
    except torch.OutOfMemoryError as error:
        remedy = "name fewer with --impl or give a smaller --shape"
        raise UserError(
            f"{case}: the implementations side by side do not fit into this GPU's memory; {remedy}"
        ) from error
    limit_ms = times.pop(LIMIT).timing.p50 * factor
    for name, measured in times.items():
        row = _row(case, direction, name) | speed(case, direction, measured, limit_ms) | facts[name]
        if row["bytes_moved"] is not None:
            row["bytes_ratio"] = row["bytes_moved"] / row["bytes_least"]
        rows.append(row)
    return rows


def _facts(one: Checked, call: Function, direction: str, bench: Bench) -> dict[str, Any]:
    """What does not depend on the clock: bytes, kernels, memory."""
    # A peer's kernels are not operators, so nobody sees what they read.
    moved = None if one.name in bench.peers else traffic.moved(call, direction, one.graphs)
    return {
        "bytes_moved": moved,
        "kernels": (len(launches.launched(call, bench.device)) or None) if bench.on_gpu else None,
        "peak_mib": peak_bytes(call) / 2**20 if bench.on_gpu else None,
    }


def speed(case: Case, direction: str, measured: Measured, limit_ms: float) -> dict[str, Any]:
    """The columns that follow from a time."""
    ms, least, flops = measured.timing.p50, case.least_bytes(direction), case.flops(direction)
    return {
        "ms": ms,
        "ms_p20": measured.timing.p20,
        "ms_p80": measured.timing.p80,
        "limit_ms": limit_ms,
        "share_of_limit": limit_ms / ms,
        "gb_per_s": least / ms / 1e6,
        "tflops_per_s": flops / ms / 1e9,
        "bytes_least": least,
        "intensity": flops / least,
        "host_us": measured.host_us,
    }


def _row(case: Case, direction: str | None, impl: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": case.op,
        "shape": "x".join(map(str, case.shape)),
        "dtype": case.dtype,
        "approximate": case.approximate if case.op != "softmax" else None,
        "direction": direction,
        "impl": impl,
    }
    return row | dict.fromkeys(COLUMNS)


COLUMNS = (
    "ms", "ms_p20", "ms_p80", "limit_ms", "share_of_limit", "gb_per_s", "tflops_per_s", "bytes_moved", "bytes_least",
    "bytes_ratio", "intensity", "kernels", "error", "peak_mib", "host_us", "failure",
)  # fmt: skip


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
