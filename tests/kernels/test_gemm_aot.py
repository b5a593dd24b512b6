"""What the compiler makes of the GEMM kernels, for GPUs that need not be there: spills, tensor cores, shared memory."""

import itertools
import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are plain Python under TRITON_INTERPRET=1", allow_module_level=True)

triton = pytest.importorskip("triton")

from fusedmlp.kernels import configs, gemm, gemm_stack, reduce  # noqa: E402
from fusedmlp.kernels.aot import (  # noqa: E402
    SHARED_BYTES_PER_BLOCK,
    KernelReport,
    compile_kernel,
    waits_for_each_product,
)
from fusedmlp.kernels.configs import GemmConfig  # noqa: E402

TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}
SIZES = dict.fromkeys(("M", "N", "K", "num_programs"), "i32")
# Sizes of real models are multiples of 16, which is what lets accesses be 16 bytes wide.
MULTIPLES = ("N", "K")


def plain_kernel(
    config: GemmConfig, sm: int, backward: bool, precision: str, approximate: str, flags=None, multiples=MULTIPLES
) -> KernelReport:
    """The plain kernel, by default with all that its epilogue can do: descriptors where the card has them, else
    pointers."""
    use_tma, element = sm >= 90, "fp32" if precision == "tf32" else "bf16"
    a, result = (config.BLOCK_M, config.BLOCK_K), (config.BLOCK_M, config.BLOCK_N)
    b = (config.BLOCK_K, config.BLOCK_N) if backward else (config.BLOCK_N, config.BLOCK_K)

    def matrix(block):
        return f"tensordesc<{element}{list(block)}>" if use_tma else f"*{element}"

    if backward:
        names, vector = ("preact", "dpreact", "second"), "partial_ptr"
        flags = flags or {"STORE_ACT": True, "SUM_ROWS": True, "STORE_PRODUCT": False}
        kernel, left = gemm._dgelu_kernel, "dy"
    else:
        names, vector = ("act", "preact"), "bias_ptr"
        flags = flags or {"HAS_BIAS": True, "STORE_PREACT": True}
        kernel, left = gemm._linear_gelu_fwd_kernel, "x"
    strides = {f"stride_{left}": "i32", "stride_w": "i32"}
    types = {left: matrix(a), "weight": matrix(b), **{name: matrix(result) for name in names}}
    if config.READ_FIRST and backward:
        types["preact"] = f"*{element}"
    types |= {vector: "*fp32" if backward else f"*{element}", **strides, **SIZES}
    constants = {"APPROXIMATE": approximate, "PRECISION": precision, "B_IS_NK": not backward, "USE_TMA": use_tma}
    fields = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "READ_FIRST")
    constants |= {name: getattr(config, name) for name in fields}
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    return compile_kernel(
        kernel, types, flags | constants, sm, multiples_of_16=[*pointers, *strides, *multiples],
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def plain_configs(precision: str, sm: int, backward: bool) -> list[GemmConfig]:
    table = configs._BACKWARD if backward else configs._FORWARD
    if precision == "tf32":
        return table["tf32"]
    return (table["one wave, sm_90"] + table["16 bit, sm_90"] if sm == 90 else []) + table["16 bit"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"], ids=["bf16", "tf32"])
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_plain_kernel(sm, precision, backward):
    itemsize, use_tma = 4 if precision == "tf32" else 2, sm >= 90
    product = {"STORE_ACT": False, "SUM_ROWS": True, "STORE_PRODUCT": True}
    for config, flags in itertools.product(plain_configs(precision, sm, backward), (None, product)[: 1 + backward]):
        report = plain_kernel(config, sm, backward, precision, "none", flags)
        # One address of 8 bytes may go to the stack; spilled products would take a hundred times as much.
        assert report.stack_bytes <= 8, f"{config}: registers are spilled, {report.stack_bytes} bytes a thread"
        assert report.tensor_core[TENSOR_CORES[sm]] > 0, f"{config}: {dict(report.tensor_core)}"
        estimate = config.shared_bytes(itemsize, use_tma, backward)
        assert report.shared_bytes <= estimate <= SHARED_BYTES_PER_BLOCK[90 if use_tma else 80], config
        assert not (sm == 90 and precision == "ieee" and report.waits_for_each_product()), config
        if use_tma:
            assert "cp.async.bulk.tensor" in report.ptx, f"{config}: matrices do not go through TMA"
        else:
            assert set(report.stores) - {4} == {16}, f"{config}: stores of {dict(report.stores)} bytes"


HGMMA = "        /*1ba0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;\n"
WAIT = "        /*1dd0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{} ;\n"


def test_products_that_wait_for_one_another_are_noticed():
    assert waits_for_each_product((HGMMA + WAIT.format(0)) * 4)
    pipelined = HGMMA * 4 + WAIT.format(1)
    assert not waits_for_each_product(pipelined + WAIT.format(0))
    # Two loops, each of which ends with its last product.
    assert not waits_for_each_product((pipelined + WAIT.format(0)) * 2)


@pytest.mark.skipif(configs.TRITON != "3.6", reason="other versions of Triton have another ptxas")
def test_what_triton_36_makes_of_tiles_of_128_that_read_the_bias_first():
    """Why the forward kernel of 1024 x 2048 x 2048 is not that one."""
    loop, early = (GemmConfig("plain", 128, 128, 64, 8, 5, 8, READ_FIRST=first) for first in (False, True))
    assert plain_kernel(early, 90, False, "ieee", "none").waits_for_each_product()
    assert not plain_kernel(loop, 90, False, "ieee", "none").waits_for_each_product()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_tf32_through_tma_in_99_kb(backward):
    """The most shared memory that any kernel asks for, on cards that have TMA and little of it."""
    limit = SHARED_BYTES_PER_BLOCK[120]
    fitting = [c for c in plain_configs("tf32", 120, backward) if c.shared_bytes(4, True, backward) <= limit]
    report = plain_kernel(fitting[0], 120, backward, "tf32", "none")
    assert report.shared_bytes <= fitting[0].shared_bytes(4, True, backward)
    assert report.tensor_core["mma"] > 0
    assert "cp.async.bulk.tensor" in report.ptx


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("config", configs._BACKWARD["one wave, sm_90"], ids=str)
def test_the_preact_is_read_before_the_products(config, approximate):
    """In 16 bytes, also where N is a multiple of 8 only; and as many programs fit as the choice counts on."""
    for sum_rows, product in ((False, False), (True, False), (True, True)):
        flags = {"STORE_ACT": False, "SUM_ROWS": sum_rows, "STORE_PRODUCT": product}
        report = plain_kernel(config, 90, True, "ieee", approximate, flags, multiples=())
        assert report.stack_bytes == 0
        assert set(report.loads) == {16}, dict(report.loads)
        assert not re.search(r"^\s*ld\.global", report.ptx, re.MULTILINE), "a load without a mask reads beyond"
        assert report.ptx.index("ld.global") < report.ptx.index("wgmma.mma_async")
        assert not report.waits_for_each_product()
        programs = 228 * 1024 // (config.shared_bytes(2, True, True) + 1024)
        assert programs * (report.shared_bytes + 1024) <= 228 * 1024
        assert programs * report.registers * 32 * config.num_warps <= 65_536


def stack_kernel(config: configs.StackConfig, approximate: str, sum_rows: bool, multiples: tuple) -> KernelReport:
    dx, dweight = config.dx, config.dweight

    def matrix(*block):
        return f"tensordesc<bf16{list(block)}>"

    results = matrix(dx.BLOCK_M, dx.BLOCK_N)
    types = {"dy": matrix(dx.BLOCK_M, dx.BLOCK_K), "weight": matrix(dx.BLOCK_K, dx.BLOCK_N)}
    types |= {"dpreact": results, "dx": results, "dy_columns": matrix(dweight.BLOCK_K, dweight.BLOCK_M)}
    types |= {"x": matrix(dweight.BLOCK_K, dweight.BLOCK_N), "dweight": matrix(dweight.BLOCK_M, dweight.BLOCK_N)}
    pointers = {"preact": "*bf16", "partial_ptr": "*fp32", "sums_ptr": "*fp32", "dbias_ptr": "*bf16"}
    strides = dict.fromkeys(("stride_dy", "stride_w", "stride_x"), "i32")
    types |= pointers | strides | dict.fromkeys(("M", "N", "K", "P"), "i32")
    constants = {"APPROXIMATE": approximate, "SUM_ROWS": sum_rows, "PRECISION": "ieee", "USE_TMA": True}
    constants |= {name: getattr(dx, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")}
    constants |= {"DWEIGHT_K": dweight.BLOCK_M, "DWEIGHT_N": dweight.BLOCK_N, "DWEIGHT_STEP": dweight.BLOCK_K}
    constants |= {"DWEIGHT_STAGES": dweight.num_stages, "DX_FIRST": config.DX_FIRST}
    return compile_kernel(
        gemm_stack._stack_bwd_kernel, types, constants | {"SUM_BLOCK": configs.STACK_COLUMNS}, 90,
        multiples_of_16=[*pointers, *strides, *multiples], num_warps=dx.num_warps, num_stages=dx.num_stages,
    )  # fmt: skip


@pytest.mark.parametrize("config", [*itertools.chain(*configs._STACK.values())], ids=str)
def test_stack_kernel(config):
    """Both products by wgmma from shared memory, also dy transposed; what one kind of tile keeps there, the other may
    use; and as many programs fit as the choice counts on."""
    assert config.dx.BLOCK_M == configs.STACK_ROWS
    assert config.dx.num_warps == config.dweight.num_warps
    for approximate, sum_rows, multiples in (("none", True, MULTIPLES), ("tanh", True, ()), ("none", False, ())):
        report = stack_kernel(config, approximate, sum_rows, multiples)
        assert report.stack_bytes == 0
        assert not re.search(r"^\s*ld\.global", report.ptx, re.MULTILINE), "a load without a mask reads beyond"
        # The accumulator, then two addresses, a predicate, two signs, and whether each operand is transposed.
        operands = re.findall(r"wgmma\.mma_async.*?\{[^}]*\}, (%rd\d+), (%rd\d+), [^;]*, (\d), (\d);", report.ptx)
        assert len(operands) == report.tensor_core["wgmma"] > 0
        assert {(a, b) for _, _, a, b in operands} == {("0", "1"), ("1", "1")}
        # Two matrices for a step, all stages but one before the first product, and one more a step.
        loads = len(re.findall(r"cp\.async\.bulk\.tensor\.\S+shared::\w+\.global\.mbarrier", report.ptx))
        assert loads >= 2 * (config.dx.num_stages + config.dweight.num_stages)
        assert report.shared_bytes <= config.shared_bytes(2) <= SHARED_BYTES_PER_BLOCK[90]
        assert not report.waits_for_each_product()
        programs = 228 * 1024 // (config.shared_bytes(2) + 1024)
        assert programs * report.registers * 32 * config.dx.num_warps <= 65_536


def hopper_kernel(backward: bool, approximate: str, flags: dict, b_is_nk: bool, element: str) -> KernelReport:
    from triton.experimental.gluon import language as gl

    from fusedmlp.kernels import gemm_hopper

    (config,) = (configs._BACKWARD if backward else configs._FORWARD)["hopper"]

    def matrix(*block):
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if element == "bf16" else gl.float16)
        return f"tensordesc<{element}{list(block)},{layout!r}>"

    a, result = matrix(config.BLOCK_M, config.BLOCK_K), matrix(config.BLOCK_M, config.BLOCK_N)
    b = matrix(config.BLOCK_N, config.BLOCK_K) if b_is_nk else matrix(config.BLOCK_K, config.BLOCK_N)
    if backward:
        types = {"dy_desc": a, "weight_desc": b, "preact_desc": result, "dpreact_desc": result, "second_desc": result}
        kernel, types = gemm_hopper._hopper_dgelu_kernel, types | {"partial_ptr": "*fp32"}
    else:
        types = {"x_desc": a, "weight_desc": b, "act_desc": result, "preact_desc": result, "bias_ptr": f"*{element}"}
        kernel = gemm_hopper._hopper_linear_gelu_fwd_kernel
    constants = {"APPROXIMATE": approximate, **flags, "B_IS_NK": b_is_nk, "GROUP_M": config.GROUP_M}
    constants["STAGES"] = config.num_stages
    report = compile_kernel(kernel, types | SIZES, constants, 90, num_warps=4, maxnreg=gemm_hopper.MAXNREG)
    assert report.shared_bytes <= config.shared_bytes(2, True, backward) <= SHARED_BYTES_PER_BLOCK[90]
    return report


needs_gluon = pytest.mark.skipif(
    configs.TRITON not in ("3.6", "3.8"),
    reason=f"gemm_hopper.py is written for Triton 3.6 and 3.8, not {configs.TRITON}",
)


@needs_gluon
@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_hopper_forward_kernel(approximate, element):
    for has_bias, store_preact, b_is_nk in ((True, True, True), (True, False, True), (False, False, False)):
        flags = {"HAS_BIAS": has_bias, "STORE_PREACT": store_preact}
        check_hopper(hopper_kernel(False, approximate, flags, b_is_nk, element), limit=0)


@needs_gluon
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_hopper_backward_kernel(approximate):
    for sum_rows, second in ((False, None), (True, None), (True, "act"), (True, "product")):
        flags = {"STORE_ACT": second == "act", "SUM_ROWS": sum_rows, "STORE_PRODUCT": second == "product"}
        # With a second matrix some addresses go to the stack; products would take 500 bytes.
        check_hopper(hopper_kernel(True, approximate, flags, False, "bf16"), limit=64 if second else 0)


def check_hopper(report: KernelReport, limit: int) -> None:
    assert report.tensor_core["wgmma"] > 0
    assert "cp.async.bulk.tensor" in report.ptx
    if configs.TRITON in configs.HOPPER_TRITON:
        # A version that the launcher does not use the kernel with may allocate registers in another way.
        assert report.stack_bytes <= limit, f"registers are spilled, {report.stack_bytes} bytes a thread"


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_pointwise_and_reducing_kernels(sm):
    types = {"dy_ptr": "*bf16", "preact_ptr": "*bf16", "dpreact_ptr": "*bf16", "partial_ptr": "*fp32"}
    types |= {"stride_dm": "i32", "M": "i32", "N": "i32"}
    multiples = [name for name, kind in types.items() if kind.startswith("*")] + ["stride_dm", "N"]
    for approximate, strips in itertools.product(("none", "tanh"), (reduce.LONG, reduce.SHORT)):
        constants = {"stride_dn": 1, "APPROXIMATE": approximate, "SUM_ROWS": True}
        constants |= dict(zip(("STRIP", "BLOCK_M", "BLOCK_N"), strips, strict=True))
        report = compile_kernel(reduce._dgelu_dbias_kernel, types, constants, sm, multiples_of_16=multiples)
        assert report.stack_bytes == 0
        assert set(report.loads) == {16}, dict(report.loads)
        # dpreact in 16 bytes; the column sums, one row of a strip's, in less.
        assert report.stores[16] > 0, dict(report.stores)
    types = {"partial_ptr": "*fp32", "out_ptr": "*bf16", "P": "i32", "N": "i32"}
    report = compile_kernel(
        reduce._column_sum_kernel, types, {"BLOCK_P": 32, "BLOCK_N": 32}, sm, multiples_of_16=["partial_ptr", "N"]
    )
    assert report.stack_bytes == 0
    assert set(report.loads) == {16}, dict(report.loads)
