"""Peaks: of exactly the cards they belong to, in the type that a run multiplies in."""

from types import SimpleNamespace

import pytest
import torch

from fusedmlp.training import peaks
from fusedmlp.training.peaks import Peak, find_peak, matmul_dtype, table_tflops


@pytest.mark.parametrize(
    ("gpu", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100-PG509-200", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300X OAM", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
    ],
)
def test_the_common_cards(gpu, bf16):
    assert find_peak(gpu, "bf16-mixed", None) == find_peak(gpu, "bf16-true", None) == Peak(bf16, "table")
    assert table_tflops(gpu, "fp16") == bf16


@pytest.mark.parametrize(
    "gpu",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA L40S-24Q",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "GRID A100-40C",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA GB300",
        "NVIDIA RTX 5000 Ada Generation",
        "NVIDIA A100-SXM-64GB",
        "AMD Instinct MI300A",
        "AMD Instinct MI300X VF",
        "",
    ],
)
def test_cards_that_only_look_like_them_have_none(gpu):
    assert find_peak(gpu, "bf16-mixed", None) == Peak(None, None)


def test_tensor_cores_halve_their_rate_from_fp8_to_half_precision_to_tf32():
    """Holds for every card here; a rate with sparsity, which is twice as high, in one column would break it."""
    for rates in peaks._RATES.values():
        assert rates.half / rates.tf32 == pytest.approx(2, rel=0.02)
        assert rates.fp8 is None or rates.fp8 / rates.half == pytest.approx(2, rel=0.02)
        assert rates.fp32 <= rates.tf32


@pytest.mark.parametrize(("allowed", "dtype", "tflops"), [("ieee", "fp32", 67), ("tf32", "tf32", 494.5)])
def test_fp32_is_tf32_where_pytorch_may_use_it(monkeypatch, allowed, dtype, tflops):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=allowed))
    assert matmul_dtype("32-true") == dtype
    assert find_peak("NVIDIA H200", "32-true", None) == Peak(tflops, "table")
    assert matmul_dtype("bf16-mixed") == "bf16"


def test_tf32_is_off_unless_it_is_allowed():
    assert matmul_dtype("32-true") == "fp32"


def test_convolutions_in_fp32_are_tf32_unless_that_is_forbidden(monkeypatch):
    """cuDNN's are by default: against the peak of fp32 a ResNet would have an MFU above 100 %."""
    a100 = "NVIDIA A100-SXM4-80GB"
    assert find_peak(a100, "32-true", None, convolution=1.0) == Peak(156, "table")
    # A quarter of the work takes 1/8 of the time.
    assert find_peak(a100, "32-true", None, 0.25).tflops == pytest.approx(1 / (0.75 / 19.5 + 0.25 / 156))
    assert find_peak(a100, "bf16-mixed", None, 0.25) == Peak(312, "table")
    assert find_peak("a GPU of tomorrow", "32-true", None, 0.25) == Peak(None, None)
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision="ieee"))
    assert find_peak(a100, "32-true", None, 0.25) == Peak(19.5, "table")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert find_peak(a100, "32-true", None, convolution=1.0) == Peak(19.5, "table"), "whatever products may be"


def test_what_a_model_computes_in_16_bits_in_an_fp32_run_has_the_peak_of_that():
    """A model built with dtype=bfloat16, under trainer.precision=32-true."""
    h200 = "NVIDIA H200"
    assert find_peak(h200, "32-true", None, half=1.0) == find_peak(h200, "bf16-true", None, half=1.0)
    assert find_peak(h200, "32-true", None, 0.25, 0.5).tflops == pytest.approx(
        1 / (0.25 / 67 + 0.25 / 494.5 + 0.5 / 989)
    )


def test_products_in_8_bits_have_the_peak_of_those():
    assert find_peak("NVIDIA H200", "bf16-mixed", None, fp8=1.0) == Peak(1979, "table")
    assert find_peak("NVIDIA H200", "bf16-mixed", None, fp8=0.5).tflops == pytest.approx(1 / (0.5 / 989 + 0.5 / 1979))
    assert find_peak("NVIDIA A100-SXM4-80GB", "bf16-mixed", None, fp8=0.5) == Peak(None, None), (
        "it has no such products"
    )


def test_a_part_of_a_card_that_has_the_name_of_the_whole_has_none():
    """AMD's partitions; NVIDIA's slices have names of their own."""
    for gpu in ("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI325X"):
        assert find_peak(gpu, "bf16-mixed", None, units=38) == Peak(None, None)
        assert find_peak(gpu, "bf16-mixed", None, units=304) == Peak(1307.4, "table")
    assert find_peak("NVIDIA H200", "bf16-mixed", None, units=132) == Peak(989, "table")


def test_the_config_wins_on_any_device():
    for gpu in ("NVIDIA H200", "a GPU of tomorrow", None):
        assert find_peak(gpu, "bf16-mixed", 123.0) == Peak(123.0, "config")


def test_a_cpu_has_no_peak():
    assert find_peak(None, "32-true", None) == Peak(None, None)
