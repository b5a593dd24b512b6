"""Which kernels are compiled ahead: all that typical calls launch, by Triton's own keys, on cards that are not here."""

import functools
import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import INTERPRETER

triton = pytest.importorskip("triton")
if INTERPRETER:
    pytest.skip("kernels are plain Python under TRITON_INTERPRET=1", allow_module_level=True)

from kernels.fake_driver import fake_driver  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

from fusedmlp.bench.cards import find_card  # noqa: E402
from fusedmlp.bench.cases import parse_case  # noqa: E402
from fusedmlp.bench.inspection.fake_gpu import fake_gpu  # noqa: E402
from fusedmlp.bench.inspection.triton_kernels import record  # noqa: E402
from fusedmlp.impls import triton as impl_triton  # noqa: E402
from fusedmlp.kernels import adamw, configs, gelu, gemm, gemm_stack, reduce, softmax, softmax_team, softmax_wide  # noqa: E402
from fusedmlp.kernels.ahead import calls, run  # noqa: E402
from fusedmlp.kernels.ahead.specialisation import build, recorded, specialisation  # noqa: E402
from fusedmlp.kernels.ahead.workers import Outcome  # noqa: E402
from fusedmlp.kernels.configs import Problem  # noqa: E402
from fusedmlp.kernels.linear_gelu import dgelu_gemm, linear_gelu_fwd, stack_bwd, takes_stack  # noqa: E402
from fusedmlp.kernels.softmax import softmax_bwd, softmax_fwd  # noqa: E402

H200, A100 = find_card("h200"), find_card("a100")
# With the kernels in Gluon wherever these can be read, as with the Triton that they run with.
HAS_GLUON = configs.TRITON in ("3.6", "3.8")


@pytest.fixture
def hopper(monkeypatch):
    if HAS_GLUON:
        monkeypatch.setattr(configs, "HOPPER_TRITON", (configs.TRITON,))
    for variable in ("FUSEDMLP_TUNE", "FUSEDMLP_MLP_KEEP", "FUSEDMLP_LINK_STACK", "FUSEDMLP_MERGE_STACK"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """A driver of a GPU that is not there, of a number that no other test asks Triton for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", fake_driver(1234), raising=False)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: 0)


def key(kernel, arguments, options) -> tuple:
    """By which Triton would look for a compiled kernel."""
    found: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda *, key, **_: found.append(key) or True)
        kernel.warmup(*arguments, grid=(1,), **options)
    return kernel.__module__, kernel.__name__, *found


@functools.cache
def planned(card, *dtypes):
    """The plan in the setting of `hopper`, made once."""
    with fake_gpu(card):
        return calls.specialisations(0, dtypes)


SHAPES = {
    # Bytes, GPT-2's attention and vocabulary as it is and padded, ViT's attention, ImageNet's classes, Llama's, Qwen's,
    # Gemma's vocabularies.
    "softmax": [
        (4096, 256), (98_304, 1024), (12_288, 512), (37_824, 197), (4096, 50_257), (4096, 50_304), (256, 1000),
        (8192, 32_000), (2048, 128_256), (2048, 151_936), (512, 262_144), (520, 262_208), (4096, 10_003),
    ],
    "gelu": [(4096, 3072), (12_608, 1536), (25, 77), (2**20, 4096)],
    # GPT-2, small and XL, ViT-S and ViT-B, Whisper, the lecture's stack, bench tables, an odd batch.
    "mlp": [
        (4096, 768, 3072), (2048, 1600, 6400), (12_608, 384, 1536), (591, 384, 1536), (25_216, 768, 3072),
        (1500, 1280, 5120), (16_384, 4096, 16_384), (16_384, 1024, 4096), (33, 768, 3072),
    ],
    "linear_gelu": [(1024, 512, 512), (1024, 1024, 1024), (1024, 2048, 2048), (197, 768, 3072), (8, 128, 128)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("card", "dtype"), [(H200, "bf16"), (H200, "fp32"), (A100, "bf16")], ids=lambda value: getattr(value, "name", value)
)
def test_typical_calls_find_their_kernels(card, dtype, hopper, no_gpu):
    plan = planned(card, dtype)
    keys = {key(item.kernel(), item.stand_ins(), dict(item.options)) for item in plan}
    assert len(keys) == len(plan), "nothing is compiled twice"
    launched = set()
    for op, shapes in SHAPES.items():
        for shape, kind in itertools.product(shapes, ("none", "tanh")[: 1 + (op != "softmax")]):
            case = parse_case(op, "x".join(map(str, shape)), dtype, kind)
            for direction in ("forward", "step"):
                for launch in record(impl_triton, case, direction, card):
                    own = key(launch.kernel, launch.arguments.values(), launch.options)
                    assert own in keys, f"{case} {direction}: {launch.kernel.__name__} {own[-1]}"
                    launched.add(own)
    assert len(launched) > 50


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda:0")


@pytest.mark.parametrize("card", [H200, A100], ids=lambda card: card.name)
def test_no_size_that_a_network_has_is_left_out(card, hopper):
    """Random sizes, gradients and layouts, of which the plan knows nothing."""
    plan = set(planned(card, "bf16"))
    generator = random.Random(0)
    with fake_gpu(card), recorded() as found:
        for _ in range(150):
            M = generator.choice((2, 16, 128, 4096, 2**16)) + generator.choice((0, 0, 1, 8, 5, 100))
            K, N = (16 * generator.randrange(8, 2 ** generator.randrange(4, 11)) for _ in range(2))
            kind, bias, grads = generator.choice(calls.KINDS), generator.choice((empty(N), None)), generator.random()
            linear_gelu_fwd(empty(M, K), empty(N, K), bias, kind, grads < 0.5)
            dgelu_gemm(empty(M, N), empty(N, K), empty(M, K), kind, False, grads < 0.5)
            reduce.dgelu_dbias(empty(M, N), empty(M, N), kind, grads < 0.5)
            gelu.gelu_bwd(empty(M, N), empty(M, N), kind)
            linear_gelu_fwd(empty(M, K), empty(K, N).t(), empty(N), "tanh", grads < 0.5)
            if card is H200:
                dgelu_gemm(empty(M, N), empty(N, K), empty(M, K), kind, False, grads < 0.5, True)
        merged = 0
        for dim, kind, batch in itertools.product(
            (256, 512, 768, 1024, 1152, 2048), calls.KINDS, (16, 33, 256, 999, 1024, 2048)
        ):
            dy, weight, bias = empty(batch, dim), empty(dim, dim), generator.choice((None, "of one", "of all"))
            if takes_stack(dy, weight, dy):
                sums = torch.empty((batch + 63) // 64, dim, device="cuda:0") if bias == "of all" else None
                stack_bwd(dy, weight, dy, dy, sums, kind, bias is not None)
                merged += 1
        assert merged > 20 or card is not H200
        for _ in range(200):
            n_cols = generator.randrange(2, 2 ** generator.randrange(2, 19) + 1)
            x = empty(generator.choice((512, 521, 4096, 2**16 + 3) if n_cols > 8192 else (2, 16, 4099)), n_cols)
            softmax_fwd(x, 1)
            softmax_bwd(x, x, 1)
    assert len(found) > 100
    for item in found:
        assert item in plan, str(item)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_width_is_left_out(dtype, hopper):
    """The narrow ones, and around the powers of two."""
    plan = set(planned(H200, dtype))
    powers = [2**power for power in range(7, 15)]
    offsets = (-200, -64, -24, -12, -7, 0, 4, 9, 40)
    with fake_gpu(H200), recorded() as found:
        for n_cols in (
            *range(1, 130),
            *(power + offset for power in powers for offset in offsets if power + offset > 0),
        ):
            x = torch.empty(512, n_cols, dtype=calls.DTYPES[dtype], device="cuda:0")
            softmax_fwd(x, 1)
            softmax_bwd(x, x, 1)
    assert set(found) <= plan


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("card", ["a100", "h200", "b200", "rtx4090"])
def test_every_configuration_is_covered(card, backward, hopper, monkeypatch):
    """Those that the rule takes; where it may measure, all there are for the card."""
    card = find_card(card)
    generator = random.Random(1)
    with fake_gpu(card):
        has_tma = configs.has_tma(0)
        for dtype, precision in ((torch.float16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")):
            chosen = calls.chosen_at(dtype, precision, backward, 0)
            for _ in range(1000):
                M, N, K = (int(2 ** generator.uniform(4, high)) for high in (20, 16, 15))
                problem = Problem(M, 16 * -(-N // 16), 16 * -(-K // 16), dtype, precision, has_tma, backward, "", 0)
                assert configs.by_rule(problem) in chosen, problem
            for config, (M, K, N) in chosen.items():
                assert config in configs.candidates(Problem(M, N, K, dtype, precision, has_tma, backward, "", 0))
        monkeypatch.setenv("FUSEDMLP_TUNE", "1")
        table = configs._BACKWARD if backward else configs._FORWARD
        names = ("16 bit", "16 bit, sm_90", "one wave, sm_90", "hopper") if card.sm == 90 else ("16 bit",)
        there = [config for name in names for config in table[name] if config.kernel == "plain" or HAS_GLUON]
        shared = configs.card(0)[2]
        fitting = {config for config in there if config.shared_bytes(2, has_tma, backward) <= shared}
        assert set(calls.chosen_at(torch.float16, "ieee", backward, 0)) == fitting


def test_every_configuration_of_a_stack_is_covered(hopper):
    generator = random.Random(2)
    with fake_gpu(H200):
        covered = calls.stack_configs(torch.float16, 0)
        for _ in range(2000):
            M, N, K = (16 * generator.randrange(1, 160) for _ in range(3))
            found = configs.for_stack(M, N, K, 2, 0, generator.random() < 0.5)
            assert found is None or found in covered


def test_the_other_dtypes_have_as_many_kernels(hopper):
    def kinds(dtype):
        return Counter((item.name, item.options) for item in planned(H200, dtype))

    assert kinds("fp16") == kinds("bf16")
    assert {item.name for item in planned(H200, "fp32")} <= {item.name for item in planned(H200, "bf16")}


def test_what_was_measured_before_is_covered(hopper, monkeypatch):
    table = configs._FORWARD
    with fake_gpu(H200):
        rare = next(c for c in table["16 bit, sm_90"] if c not in calls.chosen_at(torch.float16, "ieee", False, 0) or 1)
        monkeypatch.setattr(calls.choice, "_measured_cache", {"a problem": rare, "another card's": table["tf32"][0]})
        chosen = calls.chosen_at(torch.float16, "ieee", False, 0)
        assert rare in chosen
        assert table["tf32"][0] not in chosen
        monkeypatch.setenv("FUSEDMLP_TUNE", "0")
        if HAS_GLUON:
            assert rare not in calls.chosen_at(torch.float16, "ieee", False, 0)


def test_every_kernel_is_in_the_plan_but_that_for_rows_beyond_it(hopper):
    modules = [adamw, gelu, gemm, gemm_stack, reduce, softmax, softmax_team]
    if HAS_GLUON:
        from fusedmlp.kernels import gemm_hopper

        modules.append(gemm_hopper)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {item.name for item in planned(H200, "bf16")} == kernels
    assert not kernels & set(vars(softmax_wide))


def test_options_are_followed(hopper, monkeypatch):
    only = planned(H200, "tf32")
    assert {item.name for item in only} == {"_linear_gelu_fwd_kernel", "_dgelu_kernel", "_column_sum_kernel"}
    assert all("tf32" in item.arguments for item in only if item.name != "_column_sum_kernel")
    half, full = torch.bfloat16, torch.float32
    with fake_gpu(A100):
        assert calls._seconds(half, 0) == [""]
    with fake_gpu(H200):
        assert (calls._seconds(half, 0), calls._seconds(full, 0)) == (["", "product"], [""])
        monkeypatch.setenv("FUSEDMLP_LINK_STACK", "always")
        assert calls._seconds(full, 0) == ["", "product"]
        monkeypatch.setenv("FUSEDMLP_LINK_STACK", "never")
        monkeypatch.setenv("FUSEDMLP_MLP_KEEP", "preact")
        assert calls._seconds(half, 0) == ["", "act"]


INTEGERS = (0, 1, 2, 3, 8, 15, 16, 17, 4096, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40 + 16, 2**40 + 8)


@pytest.mark.parametrize(
    ("kernel", "rest"),
    [(reduce._column_sum_kernel, ((1024, 32, 32, False), 0)), (reduce._column_sum_kernel, ((9, 32, 32, False), 1))],
)
def test_integers_are_told_apart_as_triton_does(kernel, rest, no_gpu):
    """The first integer, P, is one that the kernel does not specialise on; the second, N, one that it does."""
    others, place = rest
    keys, items = {}, {}
    for value in INTEGERS:
        integers = (value, others[0]) if place == 0 else (others[0], value)
        arguments = (torch.empty(64), torch.empty(64, dtype=torch.bfloat16), *integers, *others[1:])
        item = specialisation(kernel, arguments, {"num_warps": 4})
        keys[value], items[value] = key(kernel, arguments, {"num_warps": 4}), item
        assert key(kernel, item.stand_ins(), {"num_warps": 4}) == keys[value], value
    for one, other in itertools.combinations(INTEGERS, 2):
        assert (items[one] == items[other]) == (keys[one] == keys[other]), (one, other)


def test_pointers_are_told_apart_as_triton_does(no_gpu):
    whole = torch.empty(64, dtype=torch.bfloat16)
    keys = set()
    for x in (whole, whole[1:], whole[8:], whole.float()):
        arguments = (x, whole, 63, "none", 2048, False)
        item = specialisation(gelu._gelu_fwd_kernel, arguments, {"num_warps": 4})
        own = key(gelu._gelu_fwd_kernel, arguments, {"num_warps": 4})
        assert key(item.kernel(), item.stand_ins(), dict(item.options)) == own
        keys.add(own)
    assert len(keys) == 3


def test_a_launch_finds_on_disk_what_was_built(no_gpu, monkeypatch):
    """Of other sizes, in a process that has compiled nothing; what was not built is compiled."""
    kernel, rest = gelu._gelu_fwd_kernel, ("tanh", 2048, False)
    x = torch.empty(64, dtype=torch.bfloat16)
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: hits.append(event["cache_hit"]))
    build(specialisation(kernel, (x, x, 32, *rest), {"num_warps": 4}))
    build(specialisation(kernel, (x, x, 31, *rest), {"num_warps": 4}))
    assert hits == [False, False]
    for n, hit in ((4096, True), (1023, True), (1, False)):
        kernel.device_caches.pop(1234)
        kernel[(1,)](x, x, n, *rest, num_warps=4)
        assert hits.pop() is hit, n


def test_a_kernel_that_does_not_compile_says_so(no_gpu):
    x = torch.empty(64, dtype=torch.bfloat16)
    bad = specialisation(gelu._gelu_fwd_kernel, (x, x, 32, "tanh", 1000, False), {"num_warps": 4})
    with pytest.raises(triton.compiler.CompilationError):
        build(bad)
    assert str(bad) == "_gelu_fwd_kernel(bfloat16, n=16n, APPROXIMATE=tanh, BLOCK=1000, PDL=False, num_warps=4)"
    for n, words in ((1, "n=1"), (30, "n=n"), (2**40, "n=16n >= 2**31")):
        assert f" {words}, " in str(specialisation(gelu._gelu_fwd_kernel, (x, x, n, "tanh", 1000, False), {}))


def test_recording_leaves_nothing_behind(hopper):
    """Launches that were recorded launch nothing, and none of them is found later."""
    from fusedmlp.kernels import linear_gelu, prepared

    tables = (prepared._prepared, linear_gelu._prepared, linear_gelu._prepared_stack)
    before = [dict(table) for table in tables]
    with fake_gpu(H200), recorded() as found:
        gelu.gelu_fwd(empty(64), "none")
        linear_gelu_fwd(empty(64, 64), empty(64, 64), None, "none", False)
        stack_bwd(empty(64, 64), empty(64, 64), empty(64, 64), empty(64, 64), None, "none", False)
    assert len(found) == 3
    assert [dict(table) for table in tables] == before
    assert prepared.recorder is None


@pytest.fixture
def machine(monkeypatch, tmp_path, hopper):
    """One H200 and a cache of Triton's; kernels are not compiled but noted, and `fails` says which fail."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    seen = SimpleNamespace(compiled=[], said=[], processes=[], fails=lambda item: None)

    def in_processes(work, items, count, prepare, arguments):
        assert (work, prepare, arguments) == (build, run._on_gpu, (0,))
        seen.processes.append(count)
        for item in items:
            seen.compiled.append(item)
            yield Outcome(item, seen.fails(item))

    monkeypatch.setattr(run, "in_processes", in_processes)
    monkeypatch.setattr(run, "specialisations", lambda device, dtypes: planned(H200, *dtypes))

    def compile_ahead(*dtypes, processes=None):
        with fake_gpu(H200):
            return run.compile_ahead(seen.said.append, dtypes, processes)

    seen.run = compile_ahead
    return seen


def test_what_is_compiled_already_is_left(machine, monkeypatch, tmp_path):
    first = machine.run("tf32", processes=3)
    assert first.compiled == first.kernels == len(machine.compiled) > 20
    assert machine.processes == [3]
    assert f"{first.kernels} of {first.kernels} Triton kernels for {H200.name} in 3 processes" in machine.said[0]
    assert str(first) == f"compiled {first.kernels} Triton kernels in 0 s, {first.kernels} are in {tmp_path / 'triton'}"
    again = machine.run("tf32")
    assert (again.compiled, again.kernels, len(machine.processes)) == (0, first.kernels, 1)
    assert str(again) == f"all {first.kernels} Triton kernels are in {tmp_path / 'triton'} already"
    both = machine.run("fp32", "tf32")
    assert both.kernels - both.compiled >= first.kernels - 1
    # Another setting that the compiler reads, or sources that have changed.
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert machine.run("tf32").compiled == first.kernels
    # Who empties Triton's cache has emptied the record.
    monkeypatch.delenv("DISABLE_LLVM_OPT")
    for file in (tmp_path / "triton").iterdir():
        file.unlink()
    assert machine.run("tf32").compiled == first.kernels


def test_one_that_fails_is_named_and_tried_again(machine):
    machine.fails = lambda item: "CompilationError: at 7:3" if "HAS_BIAS=False" in str(item) else None
    report = machine.run("tf32")
    assert report.failures
    assert report.compiled + len(report.failures) == report.kernels
    assert all("could not compile _linear_gelu_fwd_kernel(float32, stride_x=16n," in line for line in report.failures)
    assert all(line.endswith(": CompilationError: at 7:3") for line in report.failures)
    assert [line for line in machine.said if "could not" in line] == report.failures
    assert f"{report.compiled} of {report.kernels} Triton kernels are in" in str(report)
    assert str(report).endswith(f"{len(report.failures)} are not")
    machine.fails, machine.compiled[:] = (lambda item: None), []
    again = machine.run("tf32")
    assert (again.failures, len(machine.compiled)) == ([], len(report.failures))


def test_a_reason_that_all_share_does_not_fill_the_screen(machine):
    machine.fails = lambda item: "FileNotFoundError: ptxas"
    report = machine.run("tf32")
    assert len(report.failures) == report.kernels > run.MOST_LINES
    assert len(machine.said) == 1 + run.MOST_LINES


def test_no_process_to_compile_in(machine, monkeypatch):
    reason = Outcome(None, "AcceleratorError: CUDA error: out of memory")
    monkeypatch.setattr(run, "in_processes", lambda *args, **kwargs: iter([reason, reason]))
    report = machine.run("tf32")
    assert machine.said[1] == "a process to compile in could not start: AcceleratorError: CUDA error: out of memory"
    assert machine.said[2:] == report.failures
    assert report.failures == [f"{report.kernels} Triton kernels were not compiled: no process was left to compile in"]
    assert str(report).startswith(f"0 of {report.kernels} Triton kernels are in")


def test_progress_is_told(machine, monkeypatch):
    monkeypatch.setattr(run, "PROGRESS_S", 0.0)
    report = machine.run("tf32")
    assert f"{report.kernels} of {report.kernels} Triton kernels, 0 s" in machine.said[-1]
    assert len(machine.said) == 1 + report.kernels


def test_an_interruption_keeps_what_is_compiled(machine):
    def fails(item):
        if len(machine.compiled) == 10:
            raise KeyboardInterrupt

    machine.fails = fails
    with pytest.raises(KeyboardInterrupt):
        machine.run("tf32")
    machine.fails, kernels = (lambda item: None), machine.compiled[:9]
    machine.compiled.clear()
    assert machine.run("tf32").compiled == len(machine.compiled)
    assert not set(machine.compiled) & set(kernels)


def test_processes_fit_cores_and_memory(monkeypatch):
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda pid: range(16), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    assert run._processes(0) == 16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 2**40))
    assert run._processes(0) == 3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**40))
    assert run._processes(0) == 1
