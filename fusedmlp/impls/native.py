"""native: what PyTorch ships, `F.linear`, `F.gelu`, `F.softmax`. The baseline."""

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def unavailable() -> str | None:
    return None


def gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def softmax(x: Tensor, dim: int) -> Tensor:
    return F.softmax(x, dim)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str
) -> Tensor:
    return F.linear(linear_gelu(x, weight1, bias1, approximate), weight2, bias2)
