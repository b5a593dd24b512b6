"""The cuBLASLt peer: which products and epilogues make its ops, with the epilogues computed by PyTorch here."""

import pytest
import torch
import torch.nn.functional as F

from fusedmlp.bench import candidates, cublaslt
from fusedmlp.bench.cases import Case, make_tensors
from fusedmlp.bench.gate import make_oracle, results


def product_of_torch(seen):
    """A product as cuBLASLt defines it: column-major, a bias along its columns."""

    def product(a, b, epilog="", **inputs):
        seen.append(epilog)
        out, beside = a @ b, {}
        assert list(inputs) == ["bias"] * epilog.endswith("BIAS") + ["gelu_aux"] * (epilog == "DGELU")
        if epilog.endswith("BIAS"):
            out = out + inputs["bias"][:, None]
        if epilog == "BGRADB":
            beside["bgradb"] = b.sum(0)
        if "AUX" in epilog:
            beside["gelu_aux"] = out.t().contiguous().t()
        if epilog == "DGELU":
            out = torch.ops.aten.gelu_backward(out, inputs["gelu_aux"], approximate="tanh")
        elif epilog.startswith("GELU"):
            out = F.gelu(out, approximate="tanh")
        return out.t().contiguous().t(), beside

    return product


@pytest.mark.parametrize("fused_sums", [True, False])
@pytest.mark.parametrize("op", ["linear_gelu", "mlp"])
def test_right_in_both_directions(op, fused_sums, monkeypatch):
    seen = []
    monkeypatch.setattr(cublaslt, "product", product_of_torch(seen))
    monkeypatch.setattr(cublaslt, "_ms", lambda way: float((way.__name__ == "separate") == fused_sums))
    monkeypatch.setattr(cublaslt, "_fused_sums", {})
    case = Case(op, (16, 8, 24, 8) if op == "mlp" else (16, 8, 24), "fp32", "tanh")
    tensors = make_tensors(case, torch.device("cpu"))
    dy = torch.randn(16, 24 if op == "linear_gelu" else 8)
    make_oracle(case, tensors, dy).check(results(getattr(cublaslt, op), tensors, dy))
    assert ("BGRADB" in seen) == fused_sums
    assert "GELU_AUX_BIAS" in seen
    with torch.no_grad():
        seen.clear()
        getattr(cublaslt, op)(*tensors.values())
        # Nothing is kept where no gradient will be wanted.
        assert seen[0] == "GELU_BIAS"


def test_without_biases(monkeypatch):
    seen = []
    monkeypatch.setattr(cublaslt, "product", product_of_torch(seen))
    x, weight1, weight2 = (torch.randn(4, 6, requires_grad=True) for _ in range(3))
    weight2 = torch.randn(6, 4, requires_grad=True)
    y = cublaslt.mlp(x, weight1, None, weight2, None)
    torch.testing.assert_close(y, F.gelu(x @ weight1.t(), approximate="tanh") @ weight2.t())
    gradients = torch.autograd.grad(y.sum(), (x, weight1, weight2))
    assert all(gradient is not None for gradient in gradients)
    assert seen[:2] == ["GELU_AUX", ""]


def test_only_for_the_tanh_form(monkeypatch):
    monkeypatch.setattr(candidates.importlib.util, "find_spec", lambda name: object())
    assert candidates.peer_op("cublaslt", Case("mlp", (16, 8, 24, 8), "bf16", "tanh")) is cublaslt.mlp
    assert candidates.peer_op("cublaslt", Case("mlp", (16, 8, 24, 8), "bf16", "none")) is None
    assert candidates.peer_op("cublaslt", Case("gelu", (16, 8), "bf16", "tanh")) is None
