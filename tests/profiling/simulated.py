"""Traces in the format of torch.profiler (Kineto) of a CPU that launches and a GPU that works off its queue.

python tests/profiling/simulated.py writes those of `SCENES` into tests/profiling/traces/, without their expectations.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PID, THREAD, AUTOGRAD, STREAM = 4100, 4100, 4177, 7
ARRIVAL_US = 4.0  # from the launch to the first moment at which a kernel can run
BASE_NS = 1764400000000000000

GELU = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
    "at::native::GeluType)::{lambda()#2}::operator()() const::{lambda()#4}::operator()() const::"
    "{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >(int, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
    "at::native::GeluType)::{lambda()#2}::operator()() const::{lambda()#4}::operator()() const::"
    "{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>)"
)
GELU_BACKWARD = GELU.replace("GeluCUDAKernelImpl", "GeluBackwardCUDAKernelImpl")
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT"
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>"
    "(float*, float const*, int, int, int, bool const*, int, bool)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false>, float const*, double, double>(int)"
)
NORM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, "
    "unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, unsigned "
    "int, float, 4, 4>)"
)


@dataclass(frozen=True)
class Kernel:
    """A kernel: its name, how long it runs, and how long the CPU needs from the launch before to its own."""

    name: str
    us: float
    launch_us: float = 5.0


@dataclass(frozen=True)
class Step:
    """What one step launches, in its phases; `data_us` of waiting before, `sync` a value read at its end."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...] = ()
    optimizer: tuple[Kernel, ...] = ()
    data_us: float = 10.0
    sync: bool = False
    graph: bool = False


class Machine:
    """One CPU thread, autograd's thread and one stream."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.free, self.correlation = 1000.0, 0.0, 100

    def add(self, category: str, name: str, begin: float, end: float, tid: int = THREAD, **arguments: Any) -> None:
        pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation") else PID
        times = {"ts": round(begin, 3), "dur": round(end - begin, 3)}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": arguments}
        )

    def flow(self, phase: str, pid: int, tid: int, when: float) -> None:
        ends = {"bp": "e"} if phase == "f" else {}
        event = {"ph": phase, "id": self.correlation, "pid": pid, "tid": tid, "ts": round(when, 3)}
        self.events.append({**event, "cat": "ac2g", "name": "ac2g", **ends})

    def run(self, kernel: Kernel, tid: int = THREAD, call: str = "cudaLaunchKernel") -> None:
        """A launch by the CPU, and the kernel when the GPU comes to it."""
        self.correlation += 1
        category = "cuda_driver" if call.startswith("cu") and not call.startswith("cuda") else "cuda_runtime"
        begin = self.now
        self.now += kernel.launch_us
        self.add("cpu_op", "aten::op", begin, self.now, tid, **{"External id": self.correlation})
        self.add(category, call, begin, begin + kernel.launch_us * 0.8, tid, cbid=211, correlation=self.correlation)
        self.flow("s", PID, tid, begin)
        self.start(kernel, begin + ARRIVAL_US)

    def start(self, kernel: Kernel, earliest: float) -> None:
        begin = max(self.free, earliest)
        self.free = begin + kernel.us
        category = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(kernel.name[:6], "kernel")
        arguments = {"device": 0, "context": 1, "stream": STREAM, "correlation": self.correlation}
        self.add(category, kernel.name, begin, self.free, STREAM, **{"External id": self.correlation}, **arguments)
        self.flow("f", 0, STREAM, begin)

    def phase(self, name: str, kernels: tuple[Kernel, ...], tid: int = THREAD) -> None:
        if kernels:
            begin = self.now
            for kernel in kernels:
                call = "cuLaunchKernelEx" if kernel.name.startswith(("_", "triton")) else "cudaLaunchKernel"
                self.run(kernel, tid, call)
            self.add("user_annotation", name, begin, self.now)

    def replay(self, kernels: tuple[Kernel, ...]) -> None:
        """All kernels from one launch of a graph."""
        self.correlation += 1
        begin = self.now
        self.now += 20.0
        self.add("cuda_runtime", "cudaGraphLaunch", begin, self.now, cbid=311, correlation=self.correlation)
        for kernel in kernels:
            self.start(kernel, begin + ARRIVAL_US)

    def read(self) -> None:
        """`item()`: a copy to the host, and the wait for it."""
        self.run(Kernel("Memcpy DtoH (Device -> Pageable)", 2.0), call="cudaMemcpyAsync")
        begin, self.now = self.now, max(self.now, self.free) + 3.0
        self.correlation += 1
        self.add("cuda_runtime", "cudaStreamSynchronize", begin, self.now, cbid=131, correlation=self.correlation)

    def step(self, number: int, step: Step) -> None:
        begin = self.now
        self.now += step.data_us
        self.add("user_annotation", "data", begin, self.now)
        if step.graph:
            self.replay(step.forward + step.backward + step.optimizer)
        else:
            self.phase("forward", step.forward)
            self.phase("backward", step.backward, AUTOGRAD)
            self.phase("optimizer", step.optimizer)
        if step.sync:
            self.read()
        self.add("user_annotation", "step", begin, self.now)
        self.add("user_annotation", f"ProfilerStep#{number}", begin - 1.0, self.now + 1.0)
        self.now += 2.0


def content(*steps: Step) -> dict[str, Any]:
    """The trace of these steps, one after another."""
    machine = Machine()
    for number, step in enumerate(steps):
        machine.step(number, step)
    span = {"pid": "Spans", "tid": "PyTorch Profiler", "ts": 1000.0, "dur": round(machine.now - 1000.0, 3)}
    machine.events.append({"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", **span, "args": {"Op count": 0}})
    names = [(PID, "python"), (0, "python")]
    metadata = [
        {"ph": "M", "name": "process_name", "ts": 1000.0, "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in names
    ]
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": round(machine.now, 3)}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [*metadata, *machine.events, end],
        "traceName": "trace.json.gz",
    }


def write(folder: Path, *steps: Step, name: str = "trace.json.gz") -> Path:
    file = folder / name
    file.write_bytes(gzip.compress(json.dumps(content(*steps)).encode(), mtime=0))
    return file


def layers(gemm_us: float, gelu_us: float, launch_us: float, count: int = 6, **options: Any) -> Step:
    """Linear + GELU, `count` times, forward and backward, and AdamW."""
    forward = (Kernel(GEMM, gemm_us, launch_us), Kernel(GELU, gelu_us, launch_us)) * count
    backward = (Kernel(GELU_BACKWARD, gelu_us, launch_us), *(Kernel(GEMM, gemm_us, launch_us),) * 2) * count
    optimizer = (Kernel(NORM, 5.0, launch_us), Kernel(ADAM, 20.0, launch_us))
    return Step(forward, backward, optimizer, **options)


SCENES = {
    "launch": [layers(10.0, 4.0, 40.0)] * 4,
    "sync": [Step((Kernel(GELU, 5.0, 60.0),) * 12, (Kernel(GEMM, 100.0),) * 6, data_us=100.0, sync=True)] * 4,
    "data": [layers(20.0, 6.0, 5.0, data_us=3000.0)] * 4,
    "memory": [layers(100.0, 60.0, 5.0)] * 4,
    "gemm": [layers(500.0, 30.0, 5.0)] * 4,
    "graph": [layers(30.0, 1.0, 5.0, graph=True)] * 4,
}


if __name__ == "__main__":
    target = Path(__file__).with_name("traces")
    for scene, steps in SCENES.items():
        print(write(target, *steps, name=f"{scene}.json.gz"))
