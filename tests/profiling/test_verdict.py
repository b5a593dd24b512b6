"""The sentence about a trace, for each bound."""

import pytest
from profiling.simulated import ADAM, GELU, GEMM, Kernel, Step, layers
from profiling.test_analysis import analysed

from fusedmlp.profiling.report import values
from fusedmlp.profiling.verdict import judge


@pytest.mark.parametrize(("us", "bound"), [(9.9, "size"), (10.0, "GEMM")])
def test_short_kernels_bound_a_busy_gpu_whatever_they_compute(us, bound):
    found = analysed(*[Step((Kernel(GEMM, us, 2.0),) * 30 + (Kernel(GELU, 20.0, 2.0),))] * 3)
    verdict = judge(found)
    assert verdict.bound == bound
    if bound == "size":
        assert found.short_percent == pytest.approx(100 * 297 / 317)
        assert "94 % of the kernels' time in kernels under 10 us (31 a step, 10.2 us on average)" in verdict.sentence
        assert values(found)["short_kernels_percent"] == pytest.approx(found.short_percent)


def test_who_captures_is_told_what_comes_next():
    small = judge(analysed(*[layers(5.0, 2.0, 40.0)] * 3))
    assert small.bound == "launch"
    assert any(note.startswith("launched faster, small kernels will bound it") for note in small.notes)
    assert not any("small kernels" in note for note in judge(analysed(*[layers(12.0, 2.0, 40.0)] * 3)).notes)


@pytest.mark.parametrize(
    ("kernels", "bound", "words"),
    [
        ((Kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 50.0), Kernel(GEMM, 60.0)), "communication", "45 %"),
        ((Kernel(GEMM, 60.0), Kernel(ADAM, 40.0)), "optimizer", "the update takes 40 %"),
        ((Kernel(GEMM, 60.0), Kernel(ADAM, 40.0)), "optimizer", "samples, and trainer.adamw=triton moves less memory"),
        ((Kernel("void flash_fwd_kernel<...>", 60.0), Kernel(GEMM, 60.0)), "GEMM", "GEMMs and attention (50 %)"),
        ((Kernel("_hopper_linear_gelu_fwd_kernel", 90.0), Kernel(GELU, 5.0)), "GEMM", "95 %"),
    ],
)
def test_other_bounds(kernels, bound, words):
    verdict = judge(analysed(*[Step(kernels * 8)] * 3))
    assert verdict.bound == bound
    assert words in verdict.sentence


def test_our_adamw_is_not_told_to_become_itself():
    verdict = judge(analysed(*[Step((Kernel(GEMM, 60.0), Kernel("_adamw_kernel", 40.0)) * 8)] * 3))
    assert verdict.sentence.endswith("among more samples")


def test_a_graph_between_slow_steps_is_not_told_to_capture():
    verdict = judge(analysed(*[layers(3.0, 1.0, 5.0, graph=True, data_us=10.0), Step((), data_us=10.0)] * 1,
                             *[layers(3.0, 1.0, 5.0, graph=True)] * 2, unprofiled_step_ms=1.0))  # fmt: skip
    assert verdict.bound == "launch"
    assert "capture the step" not in verdict.sentence
