"""The kernels that would run on a named card, without one, and scripts/inspect_kernel.py."""

import pytest
import torch
from conftest import INTERPRETER, raises
from scripts_by_path import script

pytest.importorskip("triton", reason="Triton is not installed")

if INTERPRETER:
    pytest.skip("kernels are plain Python in the interpreter", allow_module_level=True)

from fusedmlp.bench.cards import find_card
from fusedmlp.bench.cases import parse_case
from fusedmlp.bench.inspection import inspect_op, triton_kernels
from fusedmlp.bench.inspection.compiled_source import reading, triton_sources
from fusedmlp.bench.inspection.fake_gpu import fake_gpu
from fusedmlp.errors import UserError
from fusedmlp.impls import triton as impl_triton
from fusedmlp.kernels import gelu, gemm_launch, launch, linear_gelu, toolchain

H200, A100 = find_card("h200"), find_card("a100")


def kernels(op, shape, dtype="bf16", direction="forward", card=H200, impl="triton"):
    found, _ = inspect_op(parse_case(op, shape, dtype, "tanh"), impl, direction, card)
    return found


@pytest.mark.parametrize("card", ["a100", "h200", "b200"])
def test_gelu_is_the_kernel_that_its_launcher_chooses(card):
    (kernel,) = kernels("gelu", "1000x1024", card=find_card(card))
    assert kernel.name == "_gelu_fwd_kernel"
    assert kernel.threads == 32 * gelu._NUM_WARPS
    block = gelu._BLOCK_BYTES // 2
    assert kernel.blocks == -(-1000 * 1024 // block)
    assert kernel.elements == block / kernel.threads
    assert set(kernel.loads) == set(kernel.stores) == {16}
    assert kernel.spill_bytes == 0


def test_forward_backward_and_step():
    ways = ("forward", "backward", "step")
    names = {way: [kernel.name for kernel in kernels("softmax", "64x1000", direction=way)] for way in ways}
    assert names == {
        "forward": ["_softmax_fwd_kernel"],
        "backward": ["_softmax_bwd_kernel"],
        "step": ["_softmax_fwd_kernel", "_softmax_bwd_kernel"],
    }


def test_odd_sizes_are_specialised_as_they_would_be():
    """1001 elements of 2 bytes: rows begin between vectors, so accesses are narrow."""
    (even,) = kernels("softmax", "64x1024")
    (odd,) = kernels("softmax", "64x1001")
    assert set(even.loads) == {16}
    assert max(odd.loads) < 16


def test_products_run_on_tensor_cores_of_either_card():
    (hopper,), (ampere,) = (kernels("linear_gelu", "512x256x512", card=card) for card in (H200, A100))
    assert hopper.tensor_core["HGMMA"] > 0
    assert hopper.bulk > 0
    assert ampere.tensor_core["HMMA"] > 0
    assert ampere.bulk == 0
    # Persistent: as many programs as multiprocessors, or tiles if there are fewer.
    assert hopper.blocks <= H200.sms
    assert ampere.blocks <= A100.sms


def test_mlp_step_has_the_kernels_of_both_passes():
    names = [kernel.name for kernel in kernels("mlp", "512x256", direction="step")]
    assert any("linear_gelu_fwd" in name for name in names)
    assert any("dgelu" in name for name in names)
    assert "_column_sum_kernel" in names


def test_nothing_is_remembered_of_a_card_that_is_not_there():
    linear_gelu._prepared[("kept",)] = "mine"
    try:
        kernels("linear_gelu", "512x256x512")
        assert linear_gelu._prepared == {("kept",): "mine"}
    finally:
        linear_gelu._prepared.clear()
    assert launch.num_sms.cache_info().currsize == 0
    assert isinstance(gemm_launch.Launch, type)
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


def test_launchers_see_the_card():
    with fake_gpu(A100):
        x = torch.empty(4, 4, device="cuda")
        assert launch.num_sms(x.device) == 108
        assert torch.cuda.get_device_capability() == (8, 0)


def test_recorded_arguments():
    (recorded,) = triton_kernels.record(impl_triton, parse_case("gelu", "8x16", "fp32", "tanh"), "forward", H200)
    assert recorded.arguments["n"] == 128
    assert recorded.arguments["APPROXIMATE"] == "tanh"
    assert recorded.options == {"num_warps": gelu._NUM_WARPS, "launch_pdl": True}


def test_compiled_softmax_goes_over_wide_rows_twice():
    _, modules = inspect_op(parse_case("softmax", "4096x50257", "bf16"), "compiled", "forward", H200)
    assert list(modules) == ["forward"]
    (source,) = triton_sources(modules["forward"]).values()
    assert "@triton.jit" in source
    assert "goes over each row 2 times" in reading(modules["forward"])[0]


def test_compiled_mlp_leaves_products_to_cublas():
    _, modules = inspect_op(parse_case("mlp", "512x256", "bf16"), "compiled", "step", A100)
    assert list(modules) == ["forward", "backward"]
    assert reading(modules["forward"])[-1] == "2 matrix products by cuBLAS"
    assert reading(modules["backward"])[-1] == "4 matrix products by cuBLAS"
    assert "cc=80" in modules["forward"]


needs_nvcc = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="nvcc is not installed")


@needs_nvcc
def test_cuda_gelu():
    (kernel,) = kernels("gelu", "64x64", dtype="fp32", direction="backward", impl="cuda")
    assert kernel.name == "gelu_bwd_kernel<fp32, true>"
    assert kernel.loads[16] > 0
    assert kernel.stores[16] > 0
    assert kernel.spill_bytes == 0
    assert ".entry" in kernel.ptx


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gelu"], "there is no GPU here; name one: --arch"),
        (["gelu", "--arch", "sm_70"], "--arch sm_70 is unknown; accepted: sm_80"),
        (["gelu", "--card", "gtx"], "'gtx' is unknown"),
        (["gelu", "--arch", "sm_90", "--impl", "fast"], "impl 'fast' is unknown"),
        (["gelu", "--arch", "sm_90", "--impl", "native"], "impl=native launches no Triton kernel"),
        (["gelu", "--arch", "sm_90", "--shape", "4"], "does not fit gelu"),
        (["gelu", "--arch", "sm_90", "--dtype", "fp8"], "dtype 'fp8' is unknown"),
        (["gelu", "--arch", "sm_90", "--shape", "8x8", "--show", "source"], "is for impl=compiled"),
    ],
)
def test_wrong_questions(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script("inspect_kernel").main(arguments) == 2
    assert words in capsys.readouterr().err


def test_script(tmp_path, capsys):
    main = script("inspect_kernel").main
    assert main(["gelu", "--arch", "sm_90", "--shape", "64x64", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "16 bytes at a time, 8 elements an access" in text
    assert "registers" in text
    assert ".entry" in (tmp_path / "0-gelu_fwd_kernel.ptx").read_text()
    assert "LDG.E.128" in (tmp_path / "0-gelu_fwd_kernel.sass").read_text()
    assert main(["gelu", "--arch", "sm_90", "--shape", "64x64", "--show", "sass"]) == 0
    assert "LDG.E.128" in capsys.readouterr().out
    assert main(["softmax", "--impl", "compiled", "--arch", "sm_90", "--shape", "64x64", "--out", str(tmp_path)]) == 0
    assert "@triton.jit" in capsys.readouterr().out
    assert "triton.jit" in (tmp_path / "forward.py").read_text()


def test_without_nvcc(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with raises(UserError, "needs nvcc"):
        kernels("gelu", "64x64", impl="cuda")
