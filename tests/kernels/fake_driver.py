"""A driver of a GPU that is not there, for which Triton compiles and which launches nothing."""

from types import SimpleNamespace

from triton.backends.compiler import GPUTarget


def fake_driver(device: int) -> SimpleNamespace:
    """Of an H200 with a number that no other test asks Triton for."""
    return SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda source, metadata: lambda *args: None,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda *args: (1, 2, 100, 0, 1024),
            unload_module=lambda module: None,
        ),
    )
