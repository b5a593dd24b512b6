"""The words: a win is claimed where the measurements carry it, and nowhere else."""

import pytest
from reporting.fakes import H200, failed, result, write_sweep

from fusedmlp.reporting.agreement import agrees, difference
from fusedmlp.reporting.cells import Spread, group
from fusedmlp.reporting.runs import load
from fusedmlp.reporting.verdict import judge, separated


@pytest.fixture
def judged(tmp_path):
    """The verdict on a sweep in which every impl takes these ms per step, one number per repeat."""

    def judge_sweep(steps: dict[str, list[float]], *others: dict):
        runs = [result(impl, step_ms=ms) for impl, all_ms in steps.items() for ms in all_ms]
        (one,) = group(load([write_sweep(tmp_path / "sweep", [*runs, *others])]))
        return judge(one)

    return judge_sweep


@pytest.mark.parametrize(
    ("fast", "slow", "answer"),
    [
        (Spread(8, 7.9, 8.1, 3), Spread(10, 9.9, 10.1, 3), True),
        (Spread(8, 7.9, 8.1, 3), Spread(8.1, 8.05, 8.2, 3), False),  # they overlap
        (Spread(8, 7.9, 8.1, 3), Spread(8.2, 8.15, 8.6, 3), False),  # apart by less than a spread
        (Spread(8, 8, 8, 1), Spread(100, 99, 101, 3), None),
        (Spread(8, 7.9, 8.1, 3), Spread(100, 100, 100, 1), None),
    ],
)
def test_separation(fast, slow, answer):
    assert separated(fast, slow) is answer


def test_a_win_over_all_names_the_ratios(judged):
    verdict = judged({"native": [10.0, 10.1], "compiled": [9.0, 9.1], "triton": [8.0, 8.1]})
    assert verdict.winner == "triton"
    assert verdict.text == (
        "mlp, dim 512: triton wins, 1.25 times native, 1.12 times compiled, the next (8.05 against 9.05 ms a step); "
        "2 runs each, all apart."
    )


def test_the_baseline_can_win(judged):
    verdict = judged({"native": [8.0, 8.1], "triton": [10.0, 10.1]})
    assert verdict.winner == "native"
    assert "native wins, 1.25 times triton (8.05 against 10.1 ms a step)" in verdict.text


def test_within_the_spread_nobody_wins(judged):
    verdict = judged({"native": [10.0, 10.1], "compiled": [8.0, 8.3], "triton": [8.1, 8.2]})
    assert verdict.winner is None
    assert "no winner, " in verdict.text
    assert "compiled (8.15 ms)" in verdict.text
    assert "are within the spread of their runs, all at least 1.23 times native." in verdict.text
    assert "wins" not in verdict.text


def test_one_run_each_is_no_win_whatever_the_ratio(judged):
    verdict = judged({"native": [10.0], "triton": [5.0]})
    assert verdict.winner is None
    assert "triton was fastest, 2.00 times native" in verdict.text
    assert "how far runs spread is unknown (within the runs p10 to p90 of the steps do not overlap)" in verdict.text
    assert "wins" not in verdict.text


def test_steps_that_overlap_within_the_runs_are_said_to(judged):
    assert "of the steps overlap)" in judged({"native": [10.0], "triton": [9.9]}).text


def test_an_impl_with_another_loss_does_not_win(judged):
    verdict = judged(
        {"native": [10.0, 10.1], "triton": [9.0, 9.1]}, *2 * [result("cuda", step_ms=1.0, final_train_loss=3.2)]
    )
    assert verdict.winner == "triton"
    assert verdict.text.endswith("left out, because the final loss is not native's: cuda (1 ms).")


def test_one_whose_loss_parted_later_is_ranked_and_named(judged):
    early = {"steps": 5, "loss": 4.5}
    native = [result("native", step_ms=ms, early_train_loss=early) for ms in (10.0, 10.1)]
    cuda = [result("cuda", step_ms=ms, early_train_loss=early, final_train_loss=2.94) for ms in (5.0, 5.1)]
    verdict = judged({}, *native, *cuda)
    assert verdict.winner == "cuda"
    assert verdict.text.endswith("; losses that began as native's and ended apart: cuda -2.0 %.")


def test_who_is_missing_is_named(judged):
    assert judged({"native": [10.0]}, failed("cuda")).text == (
        "mlp, dim 512: only native has been measured, 10 ms a step; did not complete: cuda."
    )


def test_nothing_completed(judged):
    assert judged({}, failed("cuda"), failed("triton")).text == (
        "mlp, dim 512: nothing to rank; did not complete: triton, cuda."
    )


def test_a_run_of_one_step_has_completed_and_has_no_time(judged):
    assert judged({}, result("native", throughput=None, steps=1), failed("cuda")).text == (
        "mlp, dim 512: nothing to rank; too few steps to time: native; did not complete: cuda."
    )


@pytest.mark.parametrize(
    ("precision", "changes", "answer"),
    [
        ("bf16-true", {"final_train_loss": 3.04}, True),
        ("bf16-true", {"final_train_loss": 3.05}, False),
        ("bf16-true", {"final_train_loss": 2.95}, False),
        ("32-true", {"final_train_loss": 3.0029}, True),
        ("32-true", {"final_train_loss": 3.0031}, False),
        ("auto", {"final_train_loss": 3.04}, True),  # bf16 on a GPU
        ("auto-cpu", {"final_train_loss": 3.04}, False),
        ("bf16-true", {"steps": 49}, None),
        ("bf16-true", {"final_val_loss": 3.0}, None),  # validation against training loss
        ("bf16-true", {"final_train_loss": None}, None),
        ("bf16-true", {"status": "diverged"}, None),
        # What began alike may part further.
        ("bf16-true", {"final_train_loss": 3.2, "early_train_loss": {"steps": 5, "loss": 4.515}}, True),
        ("bf16-true", {"final_train_loss": 3.2, "early_train_loss": {"steps": 5, "loss": 4.52}}, False),
        ("bf16-true", {"final_train_loss": 3.24, "early_train_loss": {"steps": 5, "loss": 4.5}}, False),
        ("bf16-true", {"final_train_loss": 3.2, "early_train_loss": {"steps": 2, "loss": 4.5}}, False),
        ("bf16-true", {"final_train_loss": 3.2, "early_train_loss": {"steps": 5, "loss": None}}, False),
        ("bf16-true", {"final_train_loss": 3.2, "early_train_loss": "edited"}, False),
        ("32-true", {"final_train_loss": 3.014, "early_train_loss": {"steps": 5, "loss": 4.5004}}, True),
        ("32-true", {"final_train_loss": 3.014, "early_train_loss": {"steps": 5, "loss": 4.501}}, False),
    ],
)
def test_agreement_of_losses(tmp_path, precision, changes, answer):
    precision, _, device = precision.partition("-c")
    runs = [result("native", early_train_loss={"steps": 5, "loss": 4.5}), result("triton", **changes)]
    for run in runs:
        run["environment"] = {**H200, "device": "cpu" if device else "cuda"}
    (one,) = group(load([write_sweep(tmp_path / "sweep", runs, trainer={"precision": precision})]))
    assert agrees(one, one.cell("triton")) is answer
    assert (difference(one, one.cell("triton")) is None) == (answer is None)
    assert agrees(one, one.baseline) is None


def test_without_a_baseline_nothing_agrees_or_disagrees(judged, tmp_path):
    verdict = judged({"compiled": [10.0, 10.1], "triton": [5.0, 5.1]})
    assert verdict.winner == "triton"
    assert "native" not in verdict.text
