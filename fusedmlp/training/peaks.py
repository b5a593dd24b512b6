"""Dense peak rates of GPUs, against which MFU (model FLOPs utilization) is taken.

Matched by the whole name that the driver reports, so that no other card (a laptop's, an export variant, a MIG slice)
gets a peak that is not its own: for those MFU is unknown unless `trainer.peak_tflops` gives the peak.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """The peak rate that MFU is taken against.

    Attributes:
        tflops: dense TFLOP/s; None if unknown.
        source: "table" (this file), "config" (`trainer.peak_tflops`) or None.
    """

    tflops: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class Rates:
    """Dense TFLOP/s of matrix products by the type of their factors, all of them accumulated in fp32."""

    fp32: float  # without tensor cores
    tf32: float
    half: float  # bf16 and fp16
    fp8: float | None = None  # None: it multiplies no such factors


# From the vendors' documents. Where they give a tensor core's rate with 2:4 sparsity, half of it stands here.
_A100 = Rates(19.5, 156, 312)  # NVIDIA A100 datasheet, all forms
_A10 = Rates(31.2, 62.5, 125)  # NVIDIA A10 datasheet
_RTX_A6000 = Rates(38.7, 77.4, 154.8)  # NVIDIA GA102 whitepaper, appendix C
_RTX_3090 = Rates(35.6, 35.6, 71)  # NVIDIA GA102 whitepaper, appendix A
_H100_SXM = Rates(67, 494.5, 989, 1979)  # NVIDIA H100 datasheet, H100 SXM: 67, 989 and 1,979 with sparsity
_H100_PCIE = Rates(51, 378, 756, 1513)  # NVIDIA H100 PCIe datasheet: 51, 756 and 1,513 with sparsity
_H100_NVL = Rates(60, 417.5, 835.5, 1670.5)  # NVIDIA H100 datasheet, H100 NVL: 60, 835 and 1,671 with sparsity
_H200_SXM = Rates(67, 494.5, 989, 1979)  # NVIDIA H200 datasheet, H200 SXM: 67, 989 and 1,979 with sparsity
_H200_NVL = Rates(60, 417.5, 835.5, 1670.5)  # NVIDIA H200 datasheet, H200 NVL: 60, 835 and 1,671 with sparsity
_B200 = Rates(75, 1125, 2250, 4500)  # NVIDIA HGX B200 datasheet: 600, 18,000 and 36,000 with sparsity for 8 GPUs
_GH200 = Rates(67, 494.5, 989, 1979)  # NVIDIA GH200 datasheet: 67, 989 and 1,979 with sparsity
_GB200 = Rates(80, 1250, 2500, 5000)  # NVIDIA DGX GB200 and HGX B200 datasheet, one GPU: 2,500 and 5,000 with sparsity
_L4 = Rates(30.3, 60, 121, 242.5)  # NVIDIA L4 datasheet: 30.3, 120 and 242 with sparsity
_L40 = Rates(90.5, 90.5, 181, 362)  # NVIDIA L40 datasheet: 90.5, 181 and 362 with sparsity
_L40S = Rates(91.6, 183, 362, 733)  # NVIDIA L40S datasheet
_RTX_6000_ADA = Rates(91.1, 182.1, 364.2, 728.5)  # NVIDIA RTX 6000 Ada datasheet: 91.1, and 1,457 in fp8 with sparsity
_RTX_4090 = Rates(82.6, 82.6, 165.2, 330.3)  # NVIDIA Ada GPU architecture whitepaper, appendix A
_RTX_5090 = Rates(104.8, 104.8, 209.5, 419)  # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A
_MI300X = Rates(163.4, 653.7, 1307.4, 2614.9)  # AMD Instinct MI300X datasheet; matrix cores in fp32 too
_MI325X = Rates(163.4, 653.7, 1307.4, 2614.9)  # AMD Instinct MI325X datasheet

_RATES = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100-PG509-200": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "A100-SXM4-40GB": _A100,  # drivers before R470 leave the vendor out
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "NVIDIA A10": _A10,
    "NVIDIA RTX A6000": _RTX_A6000,
    "NVIDIA GeForce RTX 3090": _RTX_3090,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA B200": _B200,
    "NVIDIA GH200 120GB": _GH200,
    "NVIDIA GH200 480GB": _GH200,
    "NVIDIA GH200 144G HBM3e": _GH200,
    "NVIDIA GB200": _GB200,
    "NVIDIA L4": _L4,
    "NVIDIA L40": _L40,
    "NVIDIA L40S": _L40S,
    "NVIDIA RTX 6000 Ada Generation": _RTX_6000_ADA,
    "NVIDIA GeForce RTX 4090": _RTX_4090,
    "NVIDIA GeForce RTX 5090": _RTX_5090,
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI300X OAM": _MI300X,
    "AMD Instinct MI325X": _MI325X,
}
# Compute units of cards whose parts have the name of the whole: AMD's partitions in mode DPX, QPX or CPX.
_WHOLE = dict.fromkeys(("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI325X"), 304)


def table_tflops(gpu: str, dtype: str, units: int | None = None) -> float | None:
    """Dense peak in TFLOP/s of the GPU with this name; None if the table lacks it.

    Args:
        gpu: as `torch.cuda.get_device_name()` has it.
        dtype: of the factors: "fp32", "tf32", "bf16", "fp16" or "fp8".
        units: its multiprocessors, where they are known.
    """
    rates = _RATES.get(gpu)
    if rates is None or units not in (None, _WHOLE.get(gpu, units)):
        return None
    return getattr(rates, {"bf16": "half", "fp16": "half"}.get(dtype, dtype))


def matmul_dtype(precision: str) -> str:
    """What the products of a run of this Lightning precision are computed from; TF32 where PyTorch may use it."""
    if precision.startswith("bf16"):
        return "bf16"
    # `allow_tf32` raises where the user has set this newer setting, which knows of both.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


def convolution_dtype(precision: str) -> str:
    """What the convolutions of such a run are computed from: in fp32, cuDNN's are TF32 unless that is forbidden."""
    if precision.startswith("bf16"):
        return "bf16"
    return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "fp32"  # type: ignore[attr-defined]


def find_peak(
    gpu: str | None,
    precision: str,
    configured: float | None,
    convolution: float = 0.0,
    half: float = 0.0,
    fp8: float = 0.0,
    units: int | None = None,
) -> Peak:
    """The peak of a run: the rate at which its FLOPs would be done, each kind at its own peak.

    Args:
        gpu: the GPU's name; None on a CPU, which has no peak in the table.
        precision: Lightning's, decided: "32-true", "bf16-mixed" or "bf16-true".
        configured: `trainer.peak_tflops`, which wins.
        convolution, half, fp8: shares of the FLOPs that are convolutions, and that have 16-bit and 8-bit factors
            whatever the precision.
        units: the GPU's multiprocessors, where they are known.
    """
    if configured is not None:
        return Peak(configured, "config")
    kinds = (
        (matmul_dtype(precision), 1 - convolution - half - fp8),
        (convolution_dtype(precision), convolution),
        ("bf16", half),
        ("fp8", fp8),
    )
    seconds: dict[float, float] = {}  # that a TFLOP takes, of each rate
    for dtype, share in kinds:
        if share <= 0:
            continue
        rate = None if gpu is None else table_tflops(gpu, dtype, units)
        if rate is None:
            return Peak()
        seconds[rate] = seconds.get(rate, 0.0) + share / rate
    return Peak(next(iter(seconds)) if len(seconds) == 1 else 1 / sum(seconds.values()), "table")
