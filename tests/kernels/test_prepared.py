"""Prepared launches: what reaches a compiled kernel's entry, and when Triton's own launch is taken instead."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from fusedmlp.kernels import prepared  # noqa: E402

Metadata = namedtuple("Metadata", "tensordesc_meta")


class Kernel:
    """A kernel that notes what is launched: through Triton, or at the entry of what Triton compiled."""

    def __init__(self, metas=(), scratch=0):
        self.launched, self.entered = [], []
        run = SimpleNamespace(
            launch=lambda *args: self.entered.append(args),
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=scratch,
            profile_scratch_size=0,
        )
        if metas:  # As Triton wraps the entry of a kernel with descriptors.
            launcher = run.launch

            def inner(*args):
                return launcher(*args)

            run.launch = inner
        self.compiled = SimpleNamespace(run=run, function=77, packed_metadata="packed", metadata=Metadata(metas))

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append((grid, args, options)) or self.compiled


@pytest.fixture
def direct(monkeypatch):
    """Every version of Triton counts as one whose kernels are called directly; stream 5 is current."""
    active = SimpleNamespace(get_current_stream=lambda device: 5)
    monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
    monkeypatch.setattr(prepared, "_DIRECT_TRITON", (prepared._TRITON,))
    monkeypatch.setattr(prepared, "_hooks", lambda: False)
    encoded = []
    monkeypatch.setattr(
        prepared, "_encoded", lambda like, meta: lambda address, _: encoded.append(address) or [meta, address]
    )
    return encoded


def test_pointers_go_to_the_entry_as_addresses(direct):
    kernel, x, y = Kernel(), torch.zeros(4), torch.zeros(4)
    launch = prepared.Launch(kernel, ((0, None), (1, None)), None, 3, (4,), ("tanh",), {"num_warps": 4})
    launch(x, y)
    assert kernel.launched == [((3, 1, 1), (x, y, 4, "tanh"), {"num_warps": 4})]
    assert kernel.entered == []
    launch(y, x)
    assert len(kernel.launched) == 1
    ((*head, first, second, n, kind),) = kernel.entered
    assert head == [3, 1, 1, 5, 77, False, False, None, None, "packed", None, None, None]
    assert (first, second, n, kind) == (y.data_ptr(), x.data_ptr(), 4, "tanh")


def test_descriptors_go_to_the_entry_encoded(direct):
    kernel, x = Kernel(metas=({"swizzle": 3},)), torch.zeros(4, 4)
    launch = prepared.Launch(kernel, ((0, (2, 2)), (0, None)), lambda t, block: (t, block), 1, (), (), {})
    launch(x)
    assert kernel.launched[0][1] == ((x, [2, 2]), x)
    launch(x)
    assert kernel.entered[0][13:] == ({"swizzle": 3}, x.data_ptr(), x.data_ptr())


@pytest.mark.parametrize("kernel", [Kernel(metas=(None,)), Kernel(scratch=128)])
def test_what_needs_more_than_arguments_is_launched_by_triton(direct, kernel):
    arguments = ((0, (2, 2)),) if kernel.compiled.metadata.tensordesc_meta else ((0, None),)
    launch = prepared.Launch(kernel, arguments, lambda t, block: t, 1, (), (), {})
    launch(torch.zeros(4, 4))
    launch(torch.zeros(4, 4))
    assert (len(kernel.launched), kernel.entered) == (2, [])


def test_who_listens_to_launches_hears_of_all(direct, monkeypatch):
    kernel, x = Kernel(), torch.zeros(4)
    launch = prepared.Launch(kernel, ((0, None),), None, 1, (), (), {})
    launch(x)
    monkeypatch.setattr(prepared, "_hooks", lambda: True)
    launch(x)
    assert (len(kernel.launched), kernel.entered) == (2, [])


def test_an_encoded_descriptor_is_kept_by_address(monkeypatch):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    made = []
    monkeypatch.setattr(
        driver, "make_tensordesc_arg", lambda matrix, meta: made.append(matrix) or [len(made)], raising=False
    )
    x, other = torch.zeros(3, 4), torch.zeros(3, 4)
    encode = prepared._encoded(x, {})
    results = [encode(t.data_ptr(), t) for t in (x, other, x)]
    assert results == [[1], [2], [1]]
    assert [(tuple(m.shape), m.strides) for m in made] == [((3, 4), (4, 1))] * 2
    monkeypatch.setattr(prepared, "_MAX_MAPS", 2)
    encode(1, x)
    assert encode(x.data_ptr(), x) == [4], "a full table starts anew"


@pytest.mark.gpu
def test_the_same_on_another_stream_and_with_other_tensors():
    from fusedmlp.kernels.gelu import gelu_fwd

    for _ in range(3):
        x = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            y = gelu_fwd(x, "tanh")
            torch.cuda.current_stream().synchronize()
        torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-2, atol=1e-2)
        del stream
