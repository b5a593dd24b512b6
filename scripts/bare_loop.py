"""The training loop that one would write by hand, without Lightning: what `bench_loop.py` compares ours with.

Same model, seed, data, clipping and schedule, PyTorch's AdamW; no metrics, no checkpoints, no clock but the events that
time it. Captured, it is the usual recipe: one graph of the whole step, the batch copied in before each replay.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from fusedmlp.training.adamw import TritonAdamW
from fusedmlp.training.cuda_graph import own_workspaces
from fusedmlp.training.optim import build_optimizer, learning_rate
from fusedmlp.training.options import TrainerOptions, build
from fusedmlp.training.step import next_token_loss
from fusedmlp.training.throughput import StepClock

WARMUP_STEPS = 3


class BareLoop:
    """Trains in bf16 (all of it, as precision bf16-true does), eagerly or from one graph.

    Args:
        config: configs/train.yaml, composed and resolved.
        captured: whether to replay steps from a graph.
    """

    def __init__(self, config: dict[str, Any], captured: bool, device: torch.device):
        self.device = device
        self.options: TrainerOptions = build("trainer", config["trainer"], TrainerOptions)
        data = build("data", config["data"])
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        loader.pin_memory = device.type == "cuda"
        self.batches = iter(loader)
        seed_everything(config["seed"], verbose=False)
        self.model: nn.Module = build("model", config["model"]).to(device, torch.bfloat16)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, replace(self.options, adamw="native"))
        self.step_number = 0
        self._clock = StepClock(self.device)
        self.cpu_ms = 0.0
        self.loss: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured:
            self._capture()

    def run(self, steps: int, losses: list[Tensor] | None = None) -> list[float]:
        """Milliseconds of each step; `losses` receives theirs, `cpu_ms` the CPU time of all but the wait at the end."""
        clock = self._clock
        began = time.process_time()
        clock.resume()
        for _ in range(steps):
            self._replay() if self.graph else self._eager()
            if losses is not None:
                assert self.loss is not None
                losses.append(self.loss.detach().clone())
            clock.tick()
        self.cpu_ms = 1e3 * (time.process_time() - began)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        clock.pause()
        return clock.durations(clock.take()).step_ms

    def _rate(self) -> float:
        rate = learning_rate(self.step_number, self.options)
        self.step_number += 1
        return rate

    def _eager(self) -> tuple[Tensor, Tensor]:
        inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in next(self.batches))
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._step(inputs, targets)
        return inputs, targets

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        self.loss = next_token_loss(self.model(inputs), targets)
        self.loss.backward()
        if self.options.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _capture(self) -> None:
        """Warms up with real steps on a side stream, then records one."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                batch = self._eager()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.static = batch
        self.rate = torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self.rate, True
        self.graph = torch.cuda.CUDAGraph()
        with own_workspaces(), torch.cuda.graph(self.graph, stream=side):
            self._step(*self.static)

    def _replay(self) -> None:
        assert self.graph is not None
        for target, source in zip(self.static, next(self.batches), strict=True):
            target.copy_(source, non_blocking=True)
        self.rate.fill_(self._rate())
        self.graph.replay()


def gemms_alone(dim: int, layers: int, rows: int, device: torch.device, repeats: int = 30) -> float:
    """Milliseconds that the three products of every layer take in one graph, forward and backward: a limit."""
    x, dy = (torch.randn(rows, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    weights = [torch.randn(dim, dim, device=device, dtype=torch.bfloat16) for _ in range(layers)]
    out, dweight = torch.empty_like(x), torch.empty_like(weights[0])

    def products() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)
            torch.mm(dy, weight, out=out)
            torch.mm(dy.t(), x, out=dweight)

    return time_in_graph(products, device, repeats)


def optimizer_alone(loop: BareLoop, adamw: str, repeats: int = 30) -> float:
    """Milliseconds of clipping and AdamW, PyTorch's ("native") or ours ("triton"), in one graph: a limit.

    On parameters like those of a captured loop.
    """
    parameters = [torch.randn_like(parameter) for parameter in loop.parameters]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    rate = torch.tensor(1e-4, device=loop.device)
    if adamw == "triton":
        return time_in_graph(TritonAdamW(parameters, lr=rate, max_grad_norm=1.0).step, loop.device, repeats)
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True, capturable=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return time_in_graph(update, loop.device, repeats)


def time_in_graph(function: Any, device: torch.device, repeats: int) -> float:
    """Median milliseconds of a replay of `function`."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(WARMUP_STEPS):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        function()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]
