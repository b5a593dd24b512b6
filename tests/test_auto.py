"""impl=auto: what is measured when, what is chosen, and what is said of it."""

import functools
import logging
import sys
import threading

import pytest
import torch
from conftest import raises
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fusedmlp import FusedMLP, auto, functional, impls
from fusedmlp.auto import call, candidates, measure, policy, sample

x, w, b = torch.randn(6, 8), torch.randn(12, 8), torch.randn(12)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A machine with native and manual to choose between and a table of its own; manual is the faster one."""
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path))
    monkeypatch.setenv("FUSEDMLP_AUTO_IMPLS", "native,manual")
    monkeypatch.delenv("FUSEDMLP_AUTO", raising=False)
    monkeypatch.setattr(policy, "measurable", lambda device: True)
    auto.forget()
    yield tmp_path
    auto.forget()


@pytest.fixture
def stopwatch(table, monkeypatch):
    """Times by name, instead of measured ones, and a list of what was measured."""

    class Stopwatch:
        ms = {"native": 2.0, "manual": 1.0}  # noqa: RUF012
        measured: list = []  # noqa: RUF012

        def __call__(self, functions, clock):
            self.measured.append(tuple(functions))
            return {name: self.ms[name] for name in functions}

    stopwatch = Stopwatch()
    stopwatch.measured = []
    monkeypatch.setattr(measure, "in_turns", stopwatch)
    return stopwatch


def linear_gelu(**options):
    return functional.linear_gelu(x, w, b, **options)


def chosen() -> set[str]:
    return set(auto.used().values())


def test_the_fastest_runs_and_is_measured_once(stopwatch):
    y = linear_gelu()
    torch.testing.assert_close(y, functional.linear_gelu(x, w, b, impl="manual"), rtol=0, atol=0)
    assert stopwatch.measured == [("native", "manual")]
    linear_gelu()
    functional.linear_gelu(torch.randn(5, 8), w, b)  # in the same bucket as 6 rows
    assert len(stopwatch.measured) == 1
    assert chosen() == {"manual"}
    assert impls.resolved("auto") == "manual"
    # Another process.
    auto.forget()
    assert impls.resolved("auto") in ("auto", "native")
    linear_gelu()
    assert len(stopwatch.measured) == 1
    assert chosen() == {"manual"}


def test_after_the_first_call_nothing_is_looked_up(stopwatch, monkeypatch):
    linear_gelu()
    # Calling it would raise.
    monkeypatch.setattr(policy, "choose", None)
    linear_gelu()
    assert len(stopwatch.measured) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: functional.linear_gelu(x, w, b, "tanh"),
        lambda: functional.linear_gelu(x.bfloat16(), w.bfloat16(), b.bfloat16()),
        lambda: functional.linear_gelu(x, w, None),
        lambda: functional.linear_gelu(torch.randn(7, 8), w, b),
        lambda: functional.linear_gelu(x, w[:11], b[:11]),
        lambda: functional.linear_gelu(x.t().contiguous().t(), w, b),
        lambda: functional.linear_gelu(x.clone().requires_grad_(), w, b),
        lambda: functional.linear_gelu(x, w.clone().requires_grad_(), b),
    ],
    ids=["gelu", "dtype", "bias", "rows", "features", "strides", "gradient of x", "gradient of weights"],
)
def test_other_kinds_of_calls_have_choices_of_their_own(stopwatch, other):
    linear_gelu()
    other()
    assert len(stopwatch.measured) == 2


def test_softmax_tells_rows_from_columns(stopwatch):
    for t, dim in ((torch.randn(64, 8), 1), (torch.randn(8, 64), 1), (torch.randn(64, 8), 0), (torch.randn(64, 7), 1)):
        functional.softmax(t, dim)
    functional.softmax(torch.randn(8, 8, 8), -1)  # 64 rows of 8 again
    assert len(stopwatch.measured) == 4


def test_the_baseline_wins_ties(stopwatch):
    stopwatch.ms = {"native": 1.0, "manual": 0.995}
    linear_gelu()
    assert chosen() == {"native"}
    stopwatch.ms = {"native": 1.0, "manual": 0.98}
    linear_gelu(approximate="tanh")
    assert chosen() == {"native", "manual"}
    assert impls.resolved("auto") == "manual+native"


def test_without_a_gpu_native_runs(stopwatch, monkeypatch):
    monkeypatch.undo()
    auto.forget()
    linear_gelu()
    assert chosen() == {"native"}


def test_fp64_and_empty_tensors_are_not_measured(stopwatch):
    functional.gelu(x.double())
    functional.mlp(torch.empty(0, 8), w, b, torch.randn(8, 12), None)
    assert stopwatch.measured == []


@pytest.fixture
def sixth(monkeypatch, tmp_path):
    """Adds an implementation whose linear_gelu is as given, and makes it a candidate."""

    def add(body):
        folder = tmp_path / "impls"
        folder.mkdir()
        common = "from fusedmlp.impls.manual import *\nfrom fusedmlp.impls.manual import unavailable\nimport torch\n"
        (folder / "sixth.py").write_text(f"{common}def linear_gelu(x, weight, bias, approximate):\n    {body}\n")
        monkeypatch.setattr(impls, "__path__", [*impls.__path__, str(folder)])
        monkeypatch.setattr(impls, "_loaded", {})
        monkeypatch.delenv("FUSEDMLP_AUTO_IMPLS")
        candidates.ready.cache_clear()

    yield add
    sys.modules.pop("fusedmlp.impls.sixth", None)
    if hasattr(impls, "sixth"):
        del impls.sixth


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias)) * 1.001", "y is off by"),
        ("return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias)) * float('nan')", "y is off by"),
        (
            "return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight.detach(), bias))",
            "RuntimeError: element 0 of tensors",
        ),
        ("raise ValueError('no kernel for this\\\\nmore')", "ValueError: no kernel for this"),
    ],
)
def test_what_disagrees_or_raises_is_left_with_the_reason(stopwatch, sixth, body, why):
    sixth(body)
    stopwatch.ms = {"native": 2.0, "sixth": 1.0}
    weight = w.clone().requires_grad_()
    functional.linear_gelu(x, weight, b)
    assert chosen() == {"native"}
    ((entry,),) = [entries.values() for entries in auto.choices().values()]
    assert entry.left["sixth"].startswith(why)
    assert "sixth: " in auto.show()


def test_a_sixth_implementation_is_a_candidate_and_measured_for_known_calls_too(stopwatch, sixth, monkeypatch):
    linear_gelu()
    assert stopwatch.measured == [("native", "manual")]
    sixth("return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate=approximate)")
    stopwatch.ms = {"native": 2.0, "sixth": 1.0, "triton": 3.0, "cuda": 3.0}
    auto.forget()
    linear_gelu()
    assert "sixth" in stopwatch.measured[-1]
    assert "manual" not in stopwatch.measured[-1], "by default the oracle is not timed"
    assert chosen() == {"sixth"}


def test_what_has_to_be_built_first_is_no_candidate(stopwatch, monkeypatch):
    from fusedmlp.impls import manual

    monkeypatch.setattr(manual, "built", lambda: False, raising=False)
    candidates.ready.cache_clear()
    linear_gelu()
    assert stopwatch.measured == []
    assert chosen() == {"native"}


class Passive(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_a_backward_pass():
    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, dy):
            linear_gelu()
            return dy

    Calls.apply(torch.ones(1, requires_grad=True)).sum().backward()


def under_a_dispatch_mode():
    with Passive():
        linear_gelu()


def in_a_capture():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        linear_gelu()


@pytest.mark.parametrize(
    ("situation", "words"),
    [
        (in_a_backward_pass, "during a backward pass"),
        (under_a_dispatch_mode, "under a dispatch mode"),
        (in_a_capture, "while a CUDA graph is captured"),
    ],
)
def test_nothing_is_measured_at_a_bad_moment_and_this_is_said_once(stopwatch, caplog, situation, words):
    with caplog.at_level(logging.WARNING, "fusedmlp.auto"):
        situation()
        situation()
    assert stopwatch.measured == []
    assert chosen() == {"native"}
    (message,) = [record.message for record in caplog.records]
    assert words in message
    assert "native runs" in message
    # At a better moment it is, and then the choice stands in the bad one too.
    linear_gelu()
    assert chosen() == {"manual"}
    situation()
    assert len(stopwatch.measured) == 1
    assert chosen() == {"manual"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's, of its own code
def test_transforms_and_dual_numbers_get_native(stopwatch, monkeypatch):
    linear_gelu()
    known = impls.load("auto")._functions
    known.update(dict.fromkeys(known))
    monkeypatch.setattr(impls.load("auto"), "_first", None)
    torch.func.grad(lambda t: functional.linear_gelu(t, w, b).sum())(x)
    torch.func.vmap(lambda t: functional.linear_gelu(t, w, b))(x)
    with torch.autograd.forward_ad.dual_level():
        functional.linear_gelu(torch.autograd.forward_ad.make_dual(x, x), w, b)
    assert len(stopwatch.measured) == 1


def test_fake_tensors_get_native(stopwatch):
    with FakeTensorMode(allow_non_fake_inputs=True):
        functional.linear_gelu(torch.empty(6, 8), torch.empty(12, 8), None)
    assert stopwatch.measured == []
    assert chosen() == {"native"}


def test_under_torch_compile_a_known_choice_runs(stopwatch, monkeypatch):
    monkeypatch.setattr(policy, "environment", lambda device: "here")
    ran = []
    compiled = torch.compile(lambda t: functional.gelu(t), fullgraph=True, backend="eager")
    policy._known = {"here": {
        "gelu float32 none elements<=8 gradients=none": policy.Entry({"native": 1.0, "manual": 2.0}),
        "gelu float32 none elements<=64 gradients=none": policy.Entry({"native": 20.0, "manual": 10.0}),
        "gelu float32 tanh elements<=64 gradients=none": policy.Entry({"native": 30.0, "manual": 60.0}),
        "gelu float32 none elements<=64 gradients=x": policy.Entry({"native": 30.0, "manual": 60.0}),
    }}  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert policy.while_traced("gelu", "none", torch.float32, "cuda", False) == "manual"
    assert policy.while_traced("gelu", "tanh", torch.float32, "cuda", False) == "native"
    assert policy.while_traced("gelu", "none", torch.float32, "cuda", True) == "native"
    assert policy.while_traced("softmax", 1, torch.float32, "cuda", False) == "native"
    torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x))
    assert ran == []
    assert auto.used()["gelu under torch.compile"] == "native"
    assert stopwatch.measured == []


def test_a_measurement_leaves_the_caller_alone(table):
    """Autocast, hooks on saved tensors, counters, random numbers and inference mode see nothing of it."""
    model = FusedMLP(8, impl="auto")
    plain = FusedMLP(8, impl="native")
    plain.load_state_dict(model.state_dict())
    state = torch.get_rng_state()
    y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(y, plain(x))
    with FlopCounterMode(display=False) as counter:
        model(x.bfloat16().float())
    assert counter.get_total_flops() == 2 * 2 * 6 * 8 * 32
    with torch.inference_mode():
        model(torch.ones(6, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state)
    keys = [key for entries in auto.choices().values() for key in entries]
    assert len(keys) == 3
    assert any("bfloat16" in key for key in keys)


@pytest.mark.parametrize("writable", [True, False])
def test_threads_share_one_measurement(stopwatch, table, monkeypatch, writable):
    if not writable:
        (table / "file").write_text("in the way")
        monkeypatch.setenv("FUSEDMLP_CACHE", str(table / "file"))
    threads = [threading.Thread(target=linear_gelu) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stopwatch.measured) == 1


def test_too_little_memory_means_native_and_no_second_try(stopwatch, monkeypatch, caplog):
    tries = []

    def fail(call, names):
        tries.append(call)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy, "measure", fail)
    linear_gelu()
    functional.linear_gelu(torch.randn(5, 8), w, b)
    assert (len(tries), chosen()) == (1, {"native"})
    assert "memory" in caplog.text
    assert auto.choices() == {}


@pytest.mark.parametrize(("mode", "expected"), [("known", "native"), ("manual", "manual"), ("native", "native")])
def test_fixed_choices(stopwatch, monkeypatch, mode, expected):
    monkeypatch.setenv("FUSEDMLP_AUTO", mode)
    linear_gelu()
    assert (chosen(), stopwatch.measured) == ({expected}, [])


def test_known_choices_hold_in_a_deterministic_run(stopwatch):
    linear_gelu()
    torch.use_deterministic_algorithms(True)
    try:
        auto.forget()
        linear_gelu()
        assert chosen() == {"manual"}
        linear_gelu(approximate="tanh")
        assert chosen() == {"manual", "native"}
        assert len(stopwatch.measured) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    with auto.using("native"):
        linear_gelu()
        assert chosen() == {"native"}
    linear_gelu()
    assert chosen() == {"manual"}


def test_wrong_settings_are_named(stopwatch, monkeypatch):
    with raises(ValueError, "FUSEDMLP_AUTO='fast'", "measure", "known", "native"):
        with auto.using("fast"):
            pass
    monkeypatch.setenv("FUSEDMLP_AUTO_IMPLS", "native,trition")
    with raises(ValueError, "FUSEDMLP_AUTO_IMPLS=native,trition", "'trition'", "triton"):
        linear_gelu()


def test_replayed_work_has_choices_of_its_own(stopwatch, monkeypatch):
    once = measure._measure

    def both(call, names):
        launched, _ = once(call, names)
        return launched, policy.Entry({"native": 1.0, "manual": 2.0})

    monkeypatch.setattr(measure, "_measure", both)
    linear_gelu()
    # A capture forbids measurements, and the choice is known.
    with auto.replayed():
        in_a_capture()
    assert len(stopwatch.measured) == 1
    assert {key.endswith("replayed"): name for key, name in auto.used().items()} == {False: "manual", True: "native"}


def test_what_cannot_be_captured_is_left_for_replays_only(monkeypatch):
    def replay(function, device):
        if function() == "b":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return function

    monkeypatch.setattr(measure, "_replay", replay)
    clock = measure.HostClock(torch.device("cpu"))
    entry = measure._replayed({"a": lambda: "a", "b": lambda: "b"}, {"c": "wrong"}, clock, torch.device("cpu"))
    assert list(entry.ms) == ["a"]
    assert entry.left == {"c": "wrong", "b": "RuntimeError: operation not permitted when stream is capturing"}


def turns_of(steady_ms):
    """Times and turns (name, calls) of functions that take `steady_ms`, and longer while the clock settles."""
    turns = []

    def clock(function, count):
        turns.append((function(), count))
        return [100.0 if count > 1 and i < count // 2 else steady_ms[function()] for i in range(count)]

    return measure.in_turns({name: functools.partial(str, name) for name in steady_ms}, clock), turns


def test_rivals_take_turns_and_the_first_half_of_each_does_not_count():
    times, turns = turns_of({"a": 8.0, "b": 8.5})
    assert times == {"a": 8.0, "b": 8.5}
    # One call each to learn the length of a turn; then nobody always follows the same other.
    assert [name for name, _ in turns[:2]] == ["a", "b"]
    assert "".join(name for name, _ in turns[2:]) == "abba" * (measure.ROUNDS // 2)
    counts = dict(turns[2:])
    assert counts["a"] > counts["b"] >= measure.CALLS[0]


def test_one_that_is_far_behind_is_timed_once_and_leaves_its_time_to_the_rivals():
    times, turns = turns_of({"a": 6.0, "slow": 12.0, "b": 6.1})
    assert times == {"a": 6.0, "slow": 12.0, "b": 6.1}
    assert [name for name, _ in turns[3:]] == [
        "a",
        "slow",
        "b",
        *["b", "a", "a", "b", "b", "a"][: 2 * (measure.ROUNDS - 1)],
    ]
    assert turns[-1][1] > dict(turns[3:6])[turns[-1][0]]


def test_a_winner_without_rivals_ends_the_measurement():
    assert [name for name, _ in turns_of({"a": 4.0, "b": 8.0})[1]] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("size", "bucket"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 6), (7, 8), (1024, 1024), (1025, 1536), (1536, 1536), (1537, 2048)],
)
def test_buckets(size, bucket):
    assert call.bucket(size) == bucket


@pytest.mark.parametrize("op", ["gelu", "softmax", "linear_gelu", "mlp"])
@pytest.mark.parametrize("impl_name", ["native", "manual"])
def test_the_oracle_agrees_with_what_is_right_in_every_layout(op, impl_name):
    for t in (torch.randn(50, 8), torch.randn(8, 50).t(), torch.randn(8).expand(50, 8), torch.randn(3, 5, 8)):
        rest = {"linear_gelu": (w, b), "mlp": (w, b, torch.randn(9, 12), None)}.get(op, ())
        for dim in (0, 1) if op == "softmax" else ("none",):
            needs = (True, *(p is not None for p in rest))
            case = sample.like(call.Call(op, dim, (t, *rest), needs))
            assert case.call.x.stride() == t.stride()
            oracle = sample.Oracle(case)
            assert oracle.disagreement(impl_name) is None
            right = case.run(impl_name, oracle.dy)
            for index in range(len(right)):
                wrong = [t * (1.001 if i == index else 1) for i, t in enumerate(right)]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sample.Sample, "run", lambda *_, wrong=wrong: wrong)
                    assert "is off by" in oracle.disagreement(impl_name)


def test_checked_rows_exist_whatever_the_default_dtype():
    t = torch.randn(8192, 2)
    torch.set_default_dtype(torch.bfloat16)  # as Lightning does around a step in bf16-true; 8191 is 8192 there
    try:
        oracle = sample.Oracle(sample.like(call.Call("gelu", "none", (t,), (True,))))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (oracle.rows.min(), oracle.rows.max()) == (0, 8191)
    assert len(oracle.rows.unique()) == sample.CHECKED_ROWS


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path))
    auto.forget()
    model = FusedMLP(256, device="cuda", dtype=torch.bfloat16)
    t = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        peak = torch.cuda.max_memory_allocated()
        model(t).sum().backward()
        assert torch.cuda.get_sync_debug_mode() == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # What stays are cuBLAS's workspaces, 32 MiB on Hopper for each thread and stream; a flush of the cache takes 256.
    assert torch.cuda.max_memory_allocated() < peak + 7 * 2**25, "the measurement's memory is no peak of the program's"
    (entries,) = auto.choices().values()
    assert sorted(key.endswith("replayed") for key in entries) == [False, True], "small enough for both to be measured"
    for entry in entries.values():
        assert not entry.left, entry
        assert {"native", "triton"} <= entry.ms.keys()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with auto.replayed(), torch.cuda.stream(stream), torch.no_grad():
        model(t)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = model(t)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.nn.functional.linear(
        torch.nn.functional.gelu(torch.nn.functional.linear(t, model.fc1.weight, model.fc1.bias)),
        model.fc2.weight, model.fc2.bias,
    ), rtol=2e-2, atol=2e-2)  # fmt: skip
    auto.forget()
