"""Training steps of ViT-S and GPT-2 small before and after `fusedmlp.replace_modules`: eager, compiled, captured.

    python scripts/bench_replace.py --out profiles/records/2026-01-01-replace

The models are timm's and Hugging Face's, from their configurations with random weights, where those libraries are
installed; else plain PyTorch models of the same structure (reference_models.py). First outputs and gradients are held
against float64 on a small batch (`verify=True`). Then the model and its replaced twin take turns, in one process:

    eager      as it is
    compiled   every transformer block with torch.compile
    captured   the whole step, forward, backward and AdamW, replayed from a CUDA graph
    compiled+captured   both: compiled blocks, launched without the host

bf16 autocast, AdamW (fused). Memory is what a step allocates at most on top of parameters, gradients and optimizer.
Writes replace.json and replace.md to --out and prints the table. Choices of impl=auto are made in a fresh table.
"""

import argparse
import copy
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reference_models
import torch
import torch.nn.functional as F
from arguments import at_least, needs_gpu
from torch import Tensor, nn

import fusedmlp
from fusedmlp import auto, build, impls
from fusedmlp.profiling import timing

MODES = ("eager", "compiled", "captured", "compiled+captured")


class Classifier(nn.Module):
    """A model whose result is logits, whatever the library returns."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return getattr(y, "logits", y)


def vit_s(args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor, str]:
    """Model, inputs, targets, and where the model comes from."""
    images = torch.randn(args.images, 3, 224, 224, device=args.device)
    targets = torch.randint(0, 1000, (args.images,), device=args.device)
    try:
        import timm
    except ImportError:
        depth = args.depth or 12
        return reference_models.VisionTransformer(depth=depth), images, targets, "same structure as timm's"
    depths = {"depth": args.depth} if args.depth else {}
    return timm.create_model("vit_small_patch16_224", **depths), images, targets, f"timm {timm.__version__}"


def gpt2(args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor, str]:
    tokens = torch.randint(0, 50257, (args.sequences, args.context + 1), device=args.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    depth = args.depth or 12
    try:
        import transformers
    except ImportError:
        model = reference_models.GPT2(depth=depth, context=args.context)
        return model, inputs, targets, "same structure as Hugging Face's"
    config = transformers.GPT2Config(
        n_layer=depth, n_positions=args.context, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config), inputs, targets, f"transformers {transformers.__version__}"


MODELS = {"ViT-S": vit_s, "GPT-2 small": gpt2}


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: the longest list of modules in the model."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len)


def make_step(model: nn.Module, x: Tensor, targets: Tensor, captured: bool) -> Callable[[], Tensor]:
    """One optimizer step on the batch; returns the loss, which stays on the device."""
    fused = x.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused, capturable=captured and fused)

    def step() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return capture(step) if captured else step


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step, replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with auto.replayed():
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = step()

    def replay(recorded: Callable[[], Tensor] = step) -> Tensor:
        # The graph writes to the optimizer's state, which `recorded` keeps.
        graph.replay()
        return loss

    return replay


def step_ms(step: Callable[[], Tensor], count: int, cuda: bool) -> list[float]:
    """Times of `count` steps in a row, in ms."""
    if not cuda:
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def peak_mib(model: nn.Module, x: Tensor, targets: Tensor) -> float | None:
    """What forward and backward of one batch allocate at most on top of what is there."""
    if not x.is_cuda:
        return None

    def forward_and_backward() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(x)
        F.cross_entropy(logits.float().flatten(0, -2), targets.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return timing.peak_bytes(forward_and_backward) / 2**20


def measure(name: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: the model and its replaced twin in turns."""
    torch.manual_seed(0)
    net, x, targets, source = MODELS[name](args)
    before = Classifier(net).to(args.device)
    after = copy.deepcopy(before)
    small = x[:2]
    report = fusedmlp.replace_modules(after, args.impl, verify=mode == "eager", batch=small)
    if mode == "eager":
        print(f"{name} ({source})\n{report}", flush=True)
        if not report.verified:
            raise SystemExit(f"{name}: {report.difference}")
    began = time.perf_counter()
    steps = {}
    memory: dict[str, float | None] = {}
    # Which implementation runs is measured in eager calls; a compiled block takes what they have found.
    for label, model in (("before", before), ("after", after)):
        # In a copy: what accumulates a gradient stays on the stream of its first backward pass; a capture forbids it.
        memory[label] = peak_mib(copy.deepcopy(model), x, targets)
        if "compiled" in mode:
            for block in blocks(model):
                block.compile()
            # A backward pass before the capture would be on another stream.
            memory[label] = peak_mib(model, x, targets) if mode == "compiled" else None
        steps[label] = make_step(model, x, targets, "captured" in mode)
        step_ms(steps[label], 3, x.is_cuda)
    ready_s = time.perf_counter() - began
    times: dict[str, list[float]] = {label: [] for label in steps}
    losses = {label: step().item() for label, step in steps.items()}
    for _ in range(args.rounds):
        for label, step in steps.items():
            times[label] += step_ms(step, args.steps, x.is_cuda)[args.steps // 4 :]
    found = {label: timing.Timing.of(values) for label, values in times.items()}
    row: dict[str, Any] = {
        "model": name, "mode": mode, "replaced": len(report), "before ms": found["before"].p50,
        "after ms": found["after"].p50, "speed-up": found["before"].p50 / found["after"].p50,
        "before p20 / p80": f"{found['before'].p20:.2f} / {found['before'].p80:.2f}",
        "after p20 / p80": f"{found['after'].p20:.2f} / {found['after'].p80:.2f}",
        "before MiB": memory["before"], "after MiB": memory["after"], "loss before": losses["before"],
        "loss after": losses["after"], "ready s": ready_s, "source": source,
    }  # fmt: skip
    print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profiles/runs/replace"))
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--images", type=at_least(1), default=128, help="batch of ViT-S")
    parser.add_argument("--sequences", type=at_least(1), default=16, help="batch of GPT-2")
    parser.add_argument("--context", type=at_least(1), default=1024, help="tokens per sequence of GPT-2")
    parser.add_argument("--depth", type=at_least(1), help="blocks; 12 by default")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(1), default=12, help="per round")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    if args.device == "cuda":
        needs_gpu(parser)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        # Built, and loaded, from the usual cache.
        if impls.unavailable("cuda") is None:
            build.load()
        os.environ["FUSEDMLP_CACHE"] = folder
        rows = []
        for name in args.models:
            for mode in args.modes:
                rows.append(measure(name, mode, args))
                torch._dynamo.reset()
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                    # After every row, so that whatever stops the run costs that row alone.
                    choices = {"impl": args.impl, "choices": auto.used()}
                    timing.write_record(args.out, "replace", {"training step": rows}, choices)
        print(timing.markdown_table(rows))
        print(auto.show())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
