"""A GPU that is not there: tensors without data on it, and its properties, so that launchers choose as they would.

The launchers in `fusedmlp.kernels` pick kernel, block sizes and grid from the card, and remember what they picked;
inside this context they see the card that was asked for, and what they remembered before is put back afterwards.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fusedmlp.bench.cards import OCCUPANCY, Card
from fusedmlp.kernels import pdl


@contextmanager
def fake_gpu(card: Card) -> Iterator[FakeTensorMode]:
    """Tensors made on "cuda" in this context have no data, and the GPU's properties are those of `card`.

    None of them may require a gradient: autograd asks the driver for a stream, and without one ends the process.
    """
    properties = _properties(card)
    with ExitStack() as stack:

        def replace(target: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(target, name, value, create=True))

        replace(torch.cuda, "get_device_properties", lambda device=None: properties)
        replace(torch.cuda, "get_device_capability", lambda device=None: divmod(card.sm, 10))
        replace(torch.cuda, "get_device_name", lambda device=None: card.name)
        replace(torch.cuda, "current_device", lambda: 0)
        replace(pdl, "driver_version", lambda: 13000)
        replace(torch.cuda, "is_available", lambda: True)
        replace(torch.cuda, "is_current_stream_capturing", lambda: False)
        # Launchers ask it for alignment; fresh tensors are aligned.
        replace(FakeTensor, "data_ptr", lambda tensor: 0)
        environment = {k: v for k, v in os.environ.items() if k != "FUSEDMLP_TUNE"}
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(_forgetting())
        yield stack.enter_context(FakeTensorMode())


@contextmanager
def _forgetting() -> Iterator[None]:
    """What the kernels' modules have remembered about this machine's GPU is put aside."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("fusedmlp.kernels") and m is not None]

    def clear() -> None:
        for module in modules:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    with ExitStack() as stack:
        for module in modules:
            if isinstance(prepared := getattr(module, "_prepared", None), dict):
                stack.enter_context(mock.patch.dict(prepared, clear=True))
        clear()
        try:
            yield
        finally:
            clear()


def _properties(card: Card) -> SimpleNamespace:
    """The attributes of `torch.cuda.get_device_properties` that are asked for."""
    from fusedmlp.kernels.aot import SHARED_BYTES_PER_BLOCK

    limits = OCCUPANCY[card.sm]
    return SimpleNamespace(
        name=card.name,
        major=card.sm // 10,
        minor=card.sm % 10,
        multi_processor_count=card.sms,
        shared_memory_per_block_optin=SHARED_BYTES_PER_BLOCK.get(card.sm, limits.shared_bytes - 1024),
        shared_memory_per_multiprocessor=limits.shared_bytes,
        max_threads_per_multi_processor=limits.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=limits.registers,
        warp_size=32,
        L2_cache_size=card.l2_mib << 20,
        total_memory=80 << 30,
        gcnArchName="",
    )
