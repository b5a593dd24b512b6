"""Kernels that are launched while the one before still runs: none may touch memory before that one has ended."""

import re

import pytest
import torch
from conftest import INTERPRETER

triton = pytest.importorskip("triton")
if INTERPRETER:
    pytest.skip("kernels are plain Python under TRITON_INTERPRET=1", allow_module_level=True)

from kernels.fake_driver import fake_driver  # noqa: E402

from fusedmlp.bench.cards import find_card  # noqa: E402
from fusedmlp.bench.inspection.fake_gpu import fake_gpu  # noqa: E402
from fusedmlp.kernels import configs, pdl  # noqa: E402
from fusedmlp.kernels.ahead import calls  # noqa: E402
from fusedmlp.kernels.ahead.specialisation import recorded  # noqa: E402
from fusedmlp.kernels.gelu import gelu_fwd  # noqa: E402
from fusedmlp.profiling.kinds import launched_early  # noqa: E402

# Through which a kernel reads or writes what others can see.
ACCESS = re.compile(r"\b(ld|st|atom|red)\.(\w+\.)*global|cp\.async|cp\.reduce")
# Softmax kernels are long, and begin on their own.
ORDINARY = {"_softmax_fwd_kernel", "_softmax_bwd_kernel", "_softmax_fwd_team_kernel", "_softmax_bwd_team_kernel"}


def plan(card, monkeypatch):
    if configs.TRITON in ("3.6", "3.8"):
        monkeypatch.setattr(configs, "HOPPER_TRITON", (configs.TRITON,))
    with fake_gpu(find_card(card)):
        return calls.specialisations(0, ["bf16"])


def early(item) -> bool:
    return dict(item.options).get("launch_pdl", False)


def test_each_waits_before_it_touches_memory(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", fake_driver(4321), raising=False)
    kernels = {item.name: item for item in plan("h200", monkeypatch) if early(item)}
    assert len(kernels) >= 10
    for name, item in kernels.items():
        ptx = item.kernel().warmup(*item.stand_ins(), grid=(1,), **dict(item.options)).asm["ptx"]
        waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", ptx)]
        begins = [found.start() for found in re.finditer(r"griddepcontrol\.launch_dependents", ptx)]
        first = ACCESS.search(ptx)
        assert len(waits) == len(begins) == 1, name
        assert first is not None, name
        assert waits[0] < begins[0] < first.start(), name


def test_which_kernels_and_cards(monkeypatch):
    for item in plan("h200", monkeypatch):
        assert early(item) == ("PDL" in item.kernel().arg_names), item
        # Traces take what such a kernel waits for none of its own.
        assert early(item) == launched_early(item.name), item
    assert {item.name for item in plan("h200", monkeypatch) if not early(item)} <= ORDINARY
    for item in plan("a100", monkeypatch):
        assert not early(item)
        assert "PDL" not in item.kernel().arg_names or item.arguments[-1] is False


@pytest.mark.parametrize(
    ("card", "driver", "switch", "wanted"),
    [
        ("h200", 13000, None, True),
        ("h200", 12020, None, False),
        ("h200", 13000, "0", False),
        ("a100", 13000, None, False),
        ("b200", 13000, "1", True),
    ],
)
def test_where_it_is_used(monkeypatch, card, driver, switch, wanted):
    monkeypatch.delenv("FUSEDMLP_PDL", raising=False)
    if switch is not None:
        monkeypatch.setenv("FUSEDMLP_PDL", switch)
    with fake_gpu(find_card(card)):
        monkeypatch.setattr(pdl, "driver_version", lambda: driver)
        with recorded() as found:
            gelu_fwd(torch.empty(64, dtype=torch.bfloat16, device="cuda:0"), "none")
    (item,) = found
    assert (early(item), item.arguments[-1]) == (wanted, wanted)


def test_no_driver_here_is_no_error():
    if not torch.cuda.is_available():
        assert pdl.driver_version() in range(0, 10**5)
        assert not pdl.available(torch.device("cpu"))
