"""What is read from a trace, held against a machine whose every microsecond is known."""

import numpy as np
import pytest
from profiling.simulated import ADAM, GELU, GEMM, NORM, Kernel, Machine, Step, content, layers

from fusedmlp.profiling import trace as traces
from fusedmlp.profiling.analysis import Analysis, analyse
from fusedmlp.profiling.intervals import gaps, holder, overlap, total, union
from fusedmlp.profiling.report import merged, values
from fusedmlp.profiling.trace import from_events
from fusedmlp.profiling.verdict import judge


def analysed(*steps: Step, unprofiled_step_ms: float | None = None) -> Analysis:
    return analyse(traces.from_events(content(*steps)["traceEvents"]), unprofiled_step_ms)


def only(category: str) -> list[dict]:
    """A trace of two steps without the events of one category."""
    return [event for event in content(*[layers(10.0, 4.0, 40.0)] * 2)["traceEvents"] if event.get("cat") != category]


def test_intervals():
    covered = union(np.array([5.0, 0.0, 1.0, 9.0]), np.array([7.0, 4.0, 2.0, 9.5]))
    assert [times.tolist() for times in covered] == [[0, 5, 9], [4, 7, 9.5]]
    assert total(covered) == 6.5
    assert [times.tolist() for times in gaps(covered, -1.0, 8.0)] == [[-1, 4, 7], [0, 5, 8]]
    assert overlap(covered, (np.array([3.0, 4.5]), np.array([6.0, 4.8]))).tolist() == [2.0, 0.0]
    assert holder(covered, np.array([-1.0, 0.0, 4.0, 6.0, 20.0])).tolist() == [-1, 0, -1, 1, -1]
    nested = union(np.array([0.0, 1.0, 5.0]), np.array([10.0, 2.0, 6.0]))
    assert [times.tolist() for times in nested] == [[0], [10]]
    nothing = union(np.array([]), np.array([]))
    assert total(nothing) == 0
    assert overlap(nothing, covered).tolist() == [0, 0, 0]
    assert [times.tolist() for times in gaps(nothing, 1.0, 2.0)] == [[1], [2]]


def test_a_kernel_that_is_launched_early_has_waited_for_the_one_before():
    """On its own stream, and if it is one of those that wait."""
    own = "_linear_gelu_fwd_kernel"
    spans = [
        ("gemm", 0, 10, 7),
        (own, 4, 15, 7),
        (own, 8, 14, 7),
        ("theirs", 9, 20, 7),
        (own, 5, 12, 8),
        (own, 30, 31, 7),
    ]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}
        for name, begin, end, stream in spans
    ]
    gpu = from_events(events).gpu
    assert gpu.names == ["gemm", own, "theirs", own, own, own]
    assert gpu.start.tolist() == [0, 5, 9, 10, 15, 30]
    assert gpu.duration.tolist() == [10, 7, 11, 5, 0, 1]


def test_kernels_of_two_streams_that_overlap_are_busy_once():
    machine = Machine()
    for number in range(2):
        machine.step(number, Step((Kernel(GEMM, 100.0),), data_us=500.0))
    (first, *_) = [event for event in machine.events if event["cat"] == "kernel"]
    other = first | {"ts": first["ts"] + 50.0, "tid": 9, "args": first["args"] | {"stream": 9}}
    found = analyse(traces.from_events([*machine.events, other]))
    assert found.busy_ms == pytest.approx(0.150)
    assert found.kinds["GEMM"] == pytest.approx(0.150), "three kernels of 100 us in two steps"


def test_a_step_on_the_gpu_lasts_until_the_next_begins():
    found = analysed(*[layers(100.0, 60.0, 5.0)] * 3)
    assert found.step_ms == pytest.approx(found.busy_ms)
    assert found.cpu_step_ms < 0.2
    assert found.steps == 3


def test_a_batch_that_is_copied_while_the_step_before_computes_does_not_begin_the_next():
    machine = Machine()
    for number, early in enumerate((0.0, 10.0, 70.0)):
        machine.step(number, Step((Kernel(GEMM, 100.0, 5.0),)))
        (*_, kernel) = [event for event in machine.events if event["cat"] == "kernel"]
        copy = kernel | {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "dur": 5.0, "tid": 9}
        machine.events.append(copy | {"ts": kernel["ts"] - early, "args": kernel["args"] | {"stream": 9}})
    found = analyse(traces.from_events(machine.events))
    assert found.step_ms == found.busy_ms == pytest.approx(0.1)


def test_one_step_ends_with_its_last_kernel_or_on_the_cpu():
    gpu = analysed(layers(100.0, 60.0, 5.0))
    assert (gpu.step_ms, gpu.busy_percent) == (pytest.approx(2.545), pytest.approx(100.0))
    cpu = analysed(layers(10.0, 4.0, 40.0))
    assert cpu.step_ms == pytest.approx(32 * 0.040 + 0.010)
    assert cpu.busy_ms == pytest.approx(0.253)
    assert sum(cpu.idle_causes.values()) == pytest.approx(cpu.idle_ms)


def test_what_was_launched_before_the_window_belongs_to_no_step():
    events = content(*[layers(100.0, 60.0, 5.0)] * 3)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    late = dict(kernels[0], ts=900.0, dur=700.0, args=kernels[0]["args"] | {"correlation": 1})
    found = analyse(traces.from_events([*events, late]))
    assert found.kernels == 32
    assert found.outside_percent == pytest.approx(100 * 586 / (586 + 2 * 2545)), (
        "of it 586 us after the first step began"
    )
    assert any("belongs to none of its steps" in note for note in judge(found).notes)


def test_what_the_gpu_still_had_to_do_before_the_first_step_is_not_missed():
    machine = Machine()
    machine.now = 5000.0
    for number in range(3):
        machine.step(number, layers(100.0, 60.0, 5.0))
    kernel = next(event for event in machine.events if event["cat"] == "kernel")
    before = dict(kernel, ts=3000.0, dur=1500.0, args=kernel["args"] | {"correlation": 1})
    found = analyse(traces.from_events([*machine.events, before]))
    assert found.outside_percent == 0
    assert not any("none of its steps" in note for note in judge(found).notes)


def test_without_step_ranges_the_steps_of_the_profiler_count():
    with_both = analysed(*[layers(10.0, 4.0, 40.0)] * 3)
    events = [e for e in content(*[layers(10.0, 4.0, 40.0)] * 3)["traceEvents"] if e.get("name") != "step"]
    found = analyse(traces.from_events(events))
    assert (found.steps, found.steps_named) == (3, True)
    assert found.kernels == with_both.kernels
    assert found.step_ms == pytest.approx(with_both.step_ms)


def test_without_any_steps_the_whole_trace_is_one():
    found = analyse(traces.from_events(only("user_annotation")))
    assert (found.steps, found.steps_named, found.kernels) == (1, False, 64)
    assert found.rows[0].kind == "GEMM"
    assert "marks no steps" in judge(found).notes[0]


def test_launches_without_kernels_are_no_run_on_a_cpu():
    verdict = judge(analyse(traces.from_events(only("kernel"))))
    assert verdict.bound == "unknown"
    assert "though the CPU made 32 launches a step" in verdict.sentence


def test_a_trace_without_calls_is_still_read():
    found = analyse(traces.from_events([e for e in only("cuda_runtime") if e.get("name") not in ("step",)
                                        and not str(e.get("name")).startswith("ProfilerStep")]))  # fmt: skip
    assert found.ahead_ms is None
    assert found.kernels == 64


def test_the_profilers_own_cost_is_taken_out_where_the_step_without_it_is_known():
    steps = [layers(10.0, 4.0, 40.0)] * 3
    assert judge(analysed(*steps)).bound == "launch"
    with_it = analysed(*steps, unprofiled_step_ms=0.3)
    assert with_it.unprofiled_busy_percent == pytest.approx(100 * 0.253 / 0.3)
    assert judge(with_it).bound == "memory", "28 % of the kernels' time is GELU and the optimizer"
    assert values(with_it)["gpu_busy_percent"] == pytest.approx(19.6, abs=0.1)


def test_a_gap_in_the_queue_is_the_gpus_own():
    machine = Machine()
    for number in range(2):
        machine.step(number, Step((Kernel(GEMM, 100.0), Kernel(GELU, 10.0))))
    for event in machine.events:
        if event["cat"] == "kernel" and event["name"] == GELU:
            event["ts"] += 8.0
    found = analyse(traces.from_events(machine.events))
    assert found.idle_causes["queue"] == pytest.approx(0.008)


def test_a_gap_between_the_kernels_of_a_graph_is_the_gpus_own_while_the_launch_still_runs():
    machine = Machine()
    for number in range(2):
        machine.step(number, Step((Kernel(GEMM, 5.0), Kernel(GELU, 5.0), Kernel(GELU, 5.0)), graph=True))
    kernels = [event for event in machine.events if event["cat"] == "kernel"]
    for event, later in zip(kernels, (0, 2.0, 3.0) * 2, strict=True):
        event["ts"] += later
    found = analyse(traces.from_events(machine.events))
    assert found.idle_causes["queue"] == pytest.approx(0.003)
    assert sum(found.idle_causes.values()) == pytest.approx(found.idle_ms)


def test_what_the_optimizer_launches_is_the_optimizers():
    found = analysed(*[Step((Kernel(GEMM, 10.0), Kernel(NORM, 3.0)), (), (Kernel(NORM, 5.0), Kernel(ADAM, 20.0)))] * 2)
    assert found.kinds == pytest.approx({"optimizer": 0.025, "GEMM": 0.010, "reduction": 0.003})


def test_blocks_and_phases():
    machine = Machine()
    machine.step(0, Step((Kernel(GEMM, 10.0), Kernel(GELU, 3.0)), (Kernel(GEMM, 20.0),)))
    (forward,) = [event for event in machine.events if event["name"] == "forward"]
    machine.events.append(forward | {"name": "block layers.0"})
    found = analyse(traces.from_events(machine.events))
    assert found.ranges["forward"] == pytest.approx((0.010, 0.013))
    assert found.ranges["block layers.0"] == pytest.approx((0.010, 0.013))
    assert found.ranges["backward"] == pytest.approx((0.005, 0.020))


def test_kernels_that_differ_in_types_are_one_line_but_two_in_the_file():
    found = analysed(*[Step((Kernel(GELU, 10.0), Kernel(GELU.replace("BFloat16", "Half"), 4.0)))] * 2)
    assert len(found.rows) == 2
    (row,) = merged(found.rows)
    assert (row.count, row.ms) == (2, pytest.approx(0.014))


def test_the_gpu_that_does_most_is_looked_at():
    events = content(*[layers(10.0, 4.0, 40.0)] * 2)["traceEvents"]
    other = [dict(e, args=e["args"] | {"device": 1}) for e in events if e.get("cat") == "kernel"][:5]
    assert analyse(traces.from_events([*events, *other])).kernels == 32


def test_cpu_operations_count_without_those_they_call():
    def op(name, start, duration, tid=1):
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration}

    events = [
        op("outer", 0, 100),
        op("inner", 10, 40),
        op("innermost", 20, 5),
        op("inner", 60, 10),
        op("other", 0, 7, 2),
    ]
    found = analyse(traces.from_events(events))
    assert not found.on_gpu
    assert {row.name: (row.count, row.ms) for row in found.cpu_ops} == {
        "outer": (1, pytest.approx(0.050)), "inner": (2, pytest.approx(0.045)), "other": (1, pytest.approx(0.007)),
        "innermost": (1, pytest.approx(0.005)),
    }  # fmt: skip
    assert judge(found).sentence.startswith("CPU only")


def test_a_launch_that_runtime_and_driver_both_report_is_one():
    events = content(*[layers(10.0, 4.0, 40.0)] * 2)["traceEvents"]
    twice = [dict(e, cat="cuda_driver", name="cuLaunchKernel") for e in events if e.get("name") == "cudaLaunchKernel"]
    assert analyse(traces.from_events([*events, *twice])).launches == 32
