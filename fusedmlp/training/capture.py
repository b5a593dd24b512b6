"""Step capture: whether the optimizer step is replayed from CUDA graphs, from when on, and why not.

A small kernel takes the GPU less time than the host needs to launch it, so a step of many small kernels runs at the
host's pace. A CUDA graph holds all launches of a step and takes one to replay.

The first steps run as always, because compiling, autotuning and building happen in them; they are steps of the run like
the others, on the stream that is recorded afterwards. With accumulation there is a graph for each kind of micro-step:
the first, which sets the gradients, those between, which add to them, and the last, which also updates the parameters.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fusedmlp import auto
from fusedmlp.errors import UserError
from fusedmlp.training.capture_choice import Probe, in_words, worthwhile
from fusedmlp.training.capture_watch import nothing_left, watch_host
from fusedmlp.training.cuda_graph import CudaGraphs, Replayable, Staging
from fusedmlp.training.step import Batch, TrainStep, to_device

log = logging.getLogger(__name__)

WARMUP_STEPS = 3


class StepCapture:
    """Runs micro-steps, replayed from graphs where that was asked for and is possible.

    Args:
        step: what is run.
        requested: trainer.cuda_graph: True, False or "auto".
        graphs: records and replays; not used where `reason_against` is given.
        reason_against: see `capture_choice.obstacle`.
        say: told once what was decided and why.
    Attributes:
        on_captured: called when capture has ended, so that its time counts for no step.
        replayed, eager: optimizer steps begun each way.
        warming: whether steps of the warm-up are still to come, or the decision that follows it.
    Raises: UserError if capture was asked for with True and cannot be.
    """

    def __init__(
        self,
        step: TrainStep,
        requested: bool | str,
        graphs: CudaGraphs | None,
        reason_against: str | None,
        say: Callable[[str], None],
    ):
        self.step, self.requested, self.say = step, requested, say
        self.on_captured: Callable[[], None] = lambda: None
        self.captured = False
        self.replayed = self.eager = self._warmed = 0
        self.launch_ms: float | None = None
        self.gpu_ms: float | None = None
        self.capture_s: float | None = None
        self.reason: str | None = f"the run ended within the {WARMUP_STEPS} steps before capture"
        self._graphs = graphs
        self.warming = requested is not False
        self._waits: list[str] = []
        self._host_work: list[str] = []
        self._probe: Probe | None = None
        self._probes: list[Probe] = []
        self._recorded: dict[tuple[bool, bool], Replayable] = {}
        self._gradients: list[Tensor | None] = []
        self._sizes = (0, 0)
        if requested is False:
            self.reason = "trainer.cuda_graph=false"
        elif reason_against is not None:
            self._refuse(reason_against)

    def transfer(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on the device; for a captured step copied while earlier steps run."""
        if self.captured and self._fits(batch):
            return self._staging.stage(batch)  # type: ignore[return-value]
        return to_device(batch, device)

    def run(self, batch: Batch, micro: int) -> tuple[int, int]:
        """Micro-step `micro` (from 0) of an optimizer step; returns B and P, see `TrainStep.micro_step`."""
        first, last = micro == 0, micro == self.step.accumulate - 1
        if first and self.warming:
            self._begin_step(batch)
        if self.captured and not self._fits(batch):
            self._leave(batch, first)
        if self.captured:
            self.replayed += last
            return self._replay(batch, first, last)
        self.eager += last
        if self.warming:
            return self._warm_up(batch, last)
        return self.step.micro_step(*batch, last=last)

    @property
    def first_steps(self) -> int:
        """Steps before the decision, which say nothing about the speed of the others, and the one that begins with it
        unless that is a replay; 0 where nothing is to be decided."""
        return 0 if self.warming or not self._warmed else self._warmed + (not self.replayed)

    def facts(self) -> dict[str, Any]:
        """For result.json."""
        return {
            "requested": self.requested,
            "captured": self.replayed > 0,
            "reason": self.reason,
            "steps_replayed": self.replayed,
            "steps_not_replayed": self.eager,
            "launch_ms": self.launch_ms,
            "gpu_ms": self.gpu_ms,
            "capture_s": self.capture_s,
        }

    def _begin_step(self, batch: Batch) -> None:
        """Decides what to do with the next step of the warm-up, or with what was learned in it."""
        assert self._graphs is not None
        if self.eager == WARMUP_STEPS:
            self._graphs.drain()
            self.warming = False
            self._decide(batch)
        elif self.requested == "auto" and self.eager > 0:
            # Only a launch into an empty queue shows what launching takes.
            self._graphs.drain()
            self._probe = Probe()
            self._probes.append(self._probe)

    def _warm_up(self, batch: Batch, last: bool) -> tuple[int, int]:
        assert self._graphs is not None
        graphs, probe = self._graphs, self._probe
        self._warmed += last
        done = self.eager - last
        # What impl=auto has chosen for replays must be compiled, built and tuned before it is recorded, too. The first
        # step does that only in the process that measures it.
        with graphs.aside(), auto.replayed() if done else nullcontext():
            begin = graphs.mark()
            began = perf_counter()
            # The last warm-up step: what the first ones compile and tune they may wait for.
            if done == WARMUP_STEPS - 1:
                with graphs.watch(self._waits), watch_host(self.step.model, self._host_work):
                    sizes = self.step.micro_step(*batch, last=last)
            else:
                sizes = self.step.micro_step(*batch, last=last)
            if probe is not None:
                probe.launch_ms += (perf_counter() - began) * 1e3
                probe.spans.append((begin, graphs.mark()))
        return sizes

    def _decide(self, batch: Batch) -> None:
        if self._probes:
            fastest = min(self._probes, key=lambda probe: probe.launch_ms)
            self.launch_ms, self.gpu_ms = fastest.launch_ms, fastest.gpu_ms
        if self._waits:
            return self._refuse(f"in every step the host waits for the GPU, at {self._waits[0]}")
        if self._host_work:
            return self._refuse(f"every step {self._host_work[0]}")
        reason = None
        if self.launch_ms is not None and self.gpu_ms is not None:
            reason = (
                f"the host took {self.launch_ms:.2f} ms to launch a step and the GPU {self.gpu_ms:.2f} ms to run it"
            )
            if not worthwhile(self.launch_ms, self.gpu_ms):
                return self._stay_eager(reason)
        self._capture(batch)
        if self.captured:
            self.reason = reason
            self._tell(f"step captured in a CUDA graph{f': {reason}' if reason else ''}")
        return None

    def _capture(self, batch: Batch) -> None:
        assert self._graphs is not None
        began = perf_counter()
        self._staging = Staging(self._graphs, batch)
        self.step.make_capturable()
        calls = self.step.backward, self.step.apply, self.step.plain
        self.step.use_plain_calls()
        reason = None
        try:
            for first, last in _kinds(self.step.accumulate):
                self._recorded[first, last] = self._graphs.record(functools.partial(self._record, last))
                if first:
                    self._gradients = [parameter.grad for parameter in self.step.parameters]
            self.captured = True
        except Exception as error:
            self.step.backward, self.step.apply, self.step.plain = calls
            reason = in_words(error)
            if self.requested is True:
                self._refuse(reason, error)
        finally:
            # The memory of the gradients belongs to the graphs.
            self.step.free_gradients()
        if reason is not None:
            # Not before the error has gone: its frames hold what was being recorded.
            self._refuse(reason)
        self.capture_s = perf_counter() - began
        self.on_captured()

    def _record(self, last: bool) -> None:
        with auto.replayed(), self.step.metrics.not_counted(), nothing_left(self.step.model):
            self._sizes = self.step.micro_step(*self._staging.batch, last=last)

    def _replay(self, batch: Batch, first: bool, last: bool) -> tuple[int, int]:
        self._staging.load(batch)
        with self.step.range("replay"):
            self._recorded[first, last].replay()
        self.step.metrics.count("train/loss")
        if last:
            self.step.metrics.count("train/grad_norm")
        return self._sizes

    def _fits(self, batch: Batch) -> bool:
        return _signature(batch) == _signature(self._staging.batch)

    def _leave(self, batch: Batch, first: bool) -> None:
        """Goes on without graphs, because a batch has another shape."""
        theirs, ours = (" and ".join(map(_described, tensors)) for tensors in (batch, self._staging.batch))
        reason = f"a batch of {theirs} came, and the captured step takes {ours}"
        if not first:
            # What the replayed micro-steps have accumulated.
            for parameter, gradient in zip(self.step.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        self._refuse(reason)

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        """Raises: UserError unless it is "auto" that captured."""
        self.reason = reason
        if self.requested is True:
            raise UserError(
                f"trainer.cuda_graph=true: the step cannot be captured: {reason}; with auto or false the run goes on "
                "without"
            ) from cause
        self._stay_eager(reason)

    def _stay_eager(self, reason: str) -> None:
        self.captured = self.warming = False
        self.step.make_uncapturable()
        self.reason = reason
        if not self.replayed:
            auto.forget_replayed()
        self._recorded.clear()
        self._gradients = []
        if self._graphs is not None:
            self._graphs.give_up()
        self._tell(f"step not captured: {reason}")

    def _tell(self, message: str) -> None:
        log.info(message)
        # Where there is no GPU nobody expects a graph of its launches.
        if self._graphs is not None:
            self.say(message)


def _kinds(accumulate: int) -> list[tuple[bool, bool]]:
    """The kinds of micro-step, (first, last), in the order in which they are replayed."""
    if accumulate == 1:
        return [(True, True)]
    return [(True, False)] + [(False, False)] * (accumulate > 2) + [(False, True)]


def _signature(batch: tuple[Tensor, ...]) -> list[tuple[Any, Any]]:
    return [(tensor.shape, tensor.dtype) for tensor in batch]


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
