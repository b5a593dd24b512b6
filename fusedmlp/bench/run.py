"""A run of scripts/bench.py: table after table, each written down as soon as it is there."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fusedmlp.bench import alignment, calibration, ceilings, console, maps, plots, record, scaling, traffic
from fusedmlp.bench.cards import CARDS
from fusedmlp.bench.measure import Bench, measure_case
from fusedmlp.bench.options import Options
from fusedmlp.bench.predict import Entry, Rates, rates
from fusedmlp.bench.selection import OPS, cases
from fusedmlp.bench.verdict import agreement, verdicts
from fusedmlp.errors import UserError, is_out_of_memory

Rows = list[dict[str, Any]]


def run(options: Options) -> int:
    """Measure what the options ask for; returns the exit status: 1 if an implementation failed or was wrong."""
    torch.manual_seed(options.pace.seed)
    out = console.make_console()
    bench = Bench(
        options.device, options.pace, options.impls, options.peers, options.directions, lambda line: out.print(line)
    )
    # Wrong shapes and places are reported before anything has taken time.
    chosen = {op: _cases(op, options, bench) for op in options.tables if op in OPS}
    entries = calibration.load(options.calibration) if options.calibration else calibration.BUILT_IN
    record.claim(options.out)
    facts = record.environment(options.device)
    console.show_header(out, facts)
    tables: dict[str, Rows] = {}
    limits: dict[str, float] = {}
    with traffic.static_uncached_compilation():
        for name in options.tables:
            tables[name] = []
            for rows in _table(name, options, bench, chosen):
                tables[name] += rows
                limits |= ceilings.limits(tables.get("copy", ()), tables.get("matmul", ()))
                # After every case, so that whatever stops the run costs that case alone.
                record.write(options.out, facts, limits, tables)
            console.show(out, name, tables[name])
    if judged := _judge(tables, limits, options, facts, entries):
        tables["advice"] = judged
        console.show(out, "advice", judged)
        right, of = agreement(judged)
        out.print(f"predicted winner right in {right} of {of} cells")
    record.write(options.out, facts, limits, tables)
    paths = plots.draw(options.out, limits, tables) if options.plots else []
    names = ["bench.json", "bench.md", "a CSV for each table", *(path.name for path in paths)]
    out.print(f"written to {options.out}: {', '.join(names)}")
    return 1 if any(row.get("failure") for rows in tables.values() for row in rows) else 0


def _cases(op: str, options: Options, bench: Bench):
    return cases(op, options.shapes, options.dtypes, options.kinds, bench.on_gpu, options.full)


def _table(name: str, options: Options, bench: Bench, chosen: dict[str, list]) -> Iterator[Rows]:
    """Rows of one table, in as many parts as may be written down singly. Raises: UserError if memory runs out."""
    try:
        yield from _parts(name, options, bench, chosen)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{name} needs more memory than there is; give a smaller --shape or --size") from error


def _parts(name: str, options: Options, bench: Bench, chosen: dict[str, list]) -> Iterator[Rows]:
    if name in OPS:
        for case in chosen[name]:
            yield measure_case(case, bench)
            if bench.on_gpu:
                torch.cuda.empty_cache()
    elif name in ("copy", "matmul", "kernels"):
        function = {"copy": ceilings.copy_rows, "matmul": ceilings.matmul_rows, "kernels": maps.kernel_rows}[name]
        yield function(bench, options.sizes, options.dtypes)
    elif name == "mlp_scaling":
        yield scaling.scaling_rows(bench, options.dtypes)
    else:
        yield {"padding": alignment.padding_rows, "waves": alignment.wave_rows}[name](bench, options.dtypes)


def _judge(
    tables: dict[str, Rows],
    limits: dict[str, float],
    options: Options,
    facts: dict[str, Any],
    entries: Sequence[Entry] = tuple(calibration.BUILT_IN),
) -> Rows:
    """The predictions for this GPU against what was measured; nothing on a CPU, for which there are none."""
    if options.device.type != "cuda":
        return []
    card = CARDS.get(facts["gpu"])
    if card is not None:
        sustained = rates(card)
    elif {"copy_gb_per_s", "matmul_tflops_per_s"} <= set(limits):
        gemm = limits["matmul_tflops_per_s"] * 1e9
        sustained = Rates(facts["sms"], limits["copy_gb_per_s"] * 1e6, {"bf16": gemm, "fp16": gemm, "fp32": gemm / 10})
    else:
        return []
    rows = [row for name, table in tables.items() if name in OPS for row in table]
    return verdicts(rows, sustained, entries, options.impls)
