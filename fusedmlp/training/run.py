"""One training run from its config to its result: build, fit, and record how it ended, whatever happened."""

import dataclasses
import gc
import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fusedmlp import auto
from fusedmlp.errors import UserError
from fusedmlp.models.counting import told_flops
from fusedmlp.profiling.session import Session
from fusedmlp.training import checkpoint, environment
from fusedmlp.training.csv_sink import CsvSink
from fusedmlp.training.failures import EXIT_FAILED, Ending, ending_of, is_out_of_memory
from fusedmlp.training.finish import Finish
from fusedmlp.training.interrupt import Interrupted, StopRequests
from fusedmlp.training.log_file import log_file
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.options import LoggerOptions, ProfileOptions, SweepOptions, TrainerOptions, build, require
from fusedmlp.training.peaks import find_peak
from fusedmlp.training.peers import PeerFailed, Peers, agreed_folder
from fusedmlp.training.place import Place
from fusedmlp.training.progress import NoProgress, make_progress
from fusedmlp.training.result import Result, UnwrittenResult, claim_folder
from fusedmlp.training.task import LanguageModelTask
from fusedmlp.training.throughput import Cost
from fusedmlp.training.trainer import choose_device, choose_precision, make_trainer, model_identity, resolve_impl
from fusedmlp.training.wandb_sink import WandbSink

log = logging.getLogger(__name__)

# Of configs/train.yaml: each is looked at, and `~KEY` on the command line takes one away.
_KEYS = ("impl", "dim", "seed", "resume", "model", "data", "trainer", "profile", "logger", "sweep")

_ANOTHER_ENDED = Ending("failed", "another rank ended", None, EXIT_FAILED)


def run(
    cfg: DictConfig, wanted_folder: Path, overrides: list[str], group: str | None = None, place: Place | None = None
) -> tuple[Result, Ending]:
    """Trains as `cfg` says and returns what came of it; what goes wrong on the way becomes the ending.

    Args:
        cfg: configs/train.yaml, composed.
        wanted_folder: the run's directory; another name is taken if a run has it already.
        overrides: what was given on the command line, for the record.
        group: the sweep that the run belongs to, or None.
        place: of this process among those of the run; None if it is the only one.
    Raises: UserError if there is no directory to record anything in.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if removed := [name for name in _KEYS if name not in config]:
        raise UserError(f"{removed[0]} is missing from the config: a run needs all of {', '.join(_KEYS)}")
    with StopRequests() as stop, Peers(place or Place(), stop) as peers, _recorded(wanted_folder):
        try:
            folder = agreed_folder(peers, lambda: claim_folder(wanted_folder))
        except PeerFailed:
            # The first rank has no directory to record anything in, and says so.
            return UnwrittenResult(wanted_folder), _ANOTHER_ENDED
        if not peers.is_first and folder != wanted_folder.absolute():
            # Hydra has made one for a process that began a second later.
            with suppress(OSError):
                wanted_folder.rmdir()
        # From here on a signal waits until it can be recorded.
        stop.deferred = True
        if peers.is_first:
            OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        with log_file(folder / "train.log" if peers.is_first else Path(os.devnull)):
            current = Run(config, folder, overrides, group, peers)
            ending = _train_and_finish(current, stop)
    result = current.result
    del current
    gc.collect()
    if torch.cuda.is_initialized() and not peers.several:
        torch.cuda.empty_cache()
    return result, ending


@contextmanager
def _recorded(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run's directory {folder} cannot be written ({error.strerror or error}); choose one with "
            "hydra.run.dir=DIR"
        ) from error


def _train_and_finish(current: "Run", stop: StopRequests) -> Ending:
    error: BaseException | None = None
    try:
        stop.deferred = False
        if stop.received is not None:
            raise Interrupted(stop.received)
        with current.peers.heeded():
            current.train()
    except BaseException as raised:
        error = raised
    ending = _ANOTHER_ENDED if isinstance(error, PeerFailed) else ending_of(error)
    if error is not None:
        ending = current.peers.ended_by(error, ending, "".join(traceback.format_exception(error)))
        log.error("%s: %s", ending.status, ending.reason, exc_info=error if ending.bug else None)
        current.log_foreign_traceback(ending)
        # Its frames hold the model and its memory, which the next job of a sweep may need.
        traceback.clear_frames(error.__traceback__)
    # A second signal must not lose what the run has come to.
    stop.received, stop.deferred = None, True
    stop.notice = stop.notice and "recording the run; once more to stop at once"
    finish = Finish(current)
    try:
        finish(ending)
    except Interrupted:
        # A third one ends what it takes to end, such as an upload.
        log.warning("finishing was interrupted", exc_info=True)
        finish.record(ending)
    return finish.unrecorded(ending) if finish.unwritten else ending


def _refuse_sweep_options(overrides: list[str]) -> None:
    """Raises: UserError for options of a sweep, which would do nothing here. The launcher keeps them from its jobs."""
    for word in overrides:
        name, _, value = word.lstrip("+").partition("=")
        require(name, value, not name.startswith("sweep."),
                "a sweep, with -m and hydra/launcher=isolated or slurm; nothing has been run")  # fmt: skip


class Run:
    """What one run holds on to, so that its ending can be written however far it came."""

    def __init__(self, config: dict[str, Any], folder: Path, overrides: list[str], group: str | None, peers: Peers):
        self.config, self.folder, self.group, self.peers = config, folder, group, peers
        self.began = time.perf_counter()
        # The first rank shows and writes; the others only train.
        self.progress = make_progress() if peers.is_first else NoProgress()
        self.csv = CsvSink(folder / "metrics.csv") if peers.is_first else None
        self.wandb: WandbSink | None = None
        self.monitor: Monitor | None = None
        self.checkpoints: checkpoint.Checkpoints | None = None
        self.profile: Session | None = None
        self.trainer: Trainer | None = None
        self.task: LanguageModelTask | None = None
        self.seconds: dict[str, float | None] = {"import": environment.import_s()}
        self.result = (Result if peers.is_first else UnwrittenResult)(
            folder,
            command=shlex.join(["python", *sys.argv]),
            overrides=overrides,
            impl=config["impl"],
            dim=config["dim"],
            seed=config["seed"],
            group=group,
        )
        peers.on_stuck = self._end_stuck
        if peers.is_first:
            self.result.write(git=environment.git_state(Path(__file__).parent))

    def train(self) -> None:
        """Builds everything and trains. Raises whatever goes wrong."""
        options = build("trainer", self.config["trainer"], TrainerOptions)
        profile = build("profile", self.config["profile"], ProfileOptions)
        build("sweep", self.config["sweep"], SweepOptions)
        _refuse_sweep_options(self.result.fields["overrides"])
        # Before anything that may fail, so that a run that does is there to be seen.
        self.wandb = self._start_wandb() if self.peers.is_first else None
        place = self.peers.place
        self.device = choose_device(options.accelerator, place)
        self.result.write(
            ranks={"strategy": options.strategy, "devices": place.world_size, "num_nodes": place.num_nodes}
        )
        if options.strategy != "single":
            self.peers.meet(self.device, options.rank_timeout)
        self.result.write(environment=environment.describe(self.device))
        auto.forget()
        self.result.write(impl_resolved=resolve_impl(self.config["impl"]))
        seed = self.config["seed"]
        require("seed", seed, type(seed) is int and 0 <= seed < 2**32, "an integer from 0 to 4294967295")
        data = self._build_data()
        model = self._build_model(data.vocab_size)
        self.task = LanguageModelTask(model, options, self.progress.say)
        resume_from, first_step = self._resume(options)
        self.progress.say(self._headline(data.num_train_tokens))

        identity = model_identity(self.config["model"])
        sinks = [sink for sink in (self.csv, self.wandb, self.progress) if sink is not None]
        self.monitor = monitor = Monitor(options, sinks, self._cost(model, options))
        self.checkpoints = checkpoint.Checkpoints(self.folder, options, self.monitor, self.peers, identity)
        steps = options.max_steps - first_step
        if steps == 1:
            self.progress.say("warning: throughput is left out, because a single step is all warm-up")
        if not self.peers.is_first:
            profile = dataclasses.replace(profile, tool=None)
        self.profile = Session(profile, self.folder, self.device, steps, lambda: monitor.clock, is_out_of_memory)
        callbacks = [monitor, *self.profile.callbacks, self.checkpoints]
        self.trainer = make_trainer(options, self.device, self.folder, callbacks, place)
        self.progress.begin(first_step, options.max_steps)
        with self.profile:
            self.trainer.fit(self.task, datamodule=data, ckpt_path=resume_from, weights_only=True)

    def _build_data(self) -> Any:
        began = time.perf_counter()
        section = self.config["data"]
        data = build("data", section)
        self.peers.first_here("data", data.prepare_data)
        data.setup("fit")
        self.seconds["data"] = time.perf_counter() - began
        record = {name: section.get(name) for name in ("source", "batch_size")}
        record |= {name: getattr(data, name) for name in ("num_train_tokens", "num_val_tokens", "unigram_loss")}
        self.result.write(data=record)
        return data

    def _build_model(self, data_vocab_size: int) -> nn.Module:
        section = self.config["model"]
        # On the CPU and in fp32 whatever the device and precision, so that a seed always means the same weights.
        seed_everything(self.config["seed"], verbose=False)
        model = build("model", section)
        size = section["vocab_size"]
        require(
            "model.vocab_size", size, size >= data_vocab_size, f"at least {data_vocab_size}, the tokens of the data"
        )
        # The FLOPs are counted for it, and so is MFU.
        seq_len, context = self.config["data"].get("seq_len"), section.get("context", None)
        require("data.seq_len", seq_len, None in (seq_len, context) or seq_len == context, f"model.context={context}")
        trained = any(parameter.requires_grad and parameter.numel() for parameter in model.parameters())
        require("model", section.get("target", section["_target_"]), trained, "a network with parameters to train")
        count = sum(parameter.numel() for parameter in model.parameters())
        name = getattr(model, "title", str(section["_target_"]).rpartition(".")[2])
        self.result.write(model=name, num_params=count)
        if (report := getattr(model, "report", None)) is not None:
            self.result.write(replaced=[str(entry) for entry in report.replaced], left=[str(e) for e in report.left])
            log.info("%s", report)
            self.progress.say(f"replaced {len(report.replaced)} modules, left {len(report.left)}: see result.json")
        return model

    def _cost(self, model: nn.Module, options: TrainerOptions) -> Cost:
        """FLOPs of a sample and the peak rate, with one warning for a GPU whose peak is not known."""
        gpu = self.result.fields["environment"]["gpu"]
        precision = choose_precision(options.precision, self.device)
        name = self.result.fields["model"]
        flops = told_flops(model, name, "TFLOP/s are left out")
        # A model of the user's own may do without.
        if flops is None and getattr(model, "flops_per_sample", None) is not None:
            self.progress.say(f"warning: the FLOPs of {name} cannot be counted, so TFLOP/s are left out: see train.log")
        shares = {name: getattr(model, f"{name}_share", 0.0) for name in ("convolution", "half", "fp8")}
        units = self.result.fields["environment"].get("gpu_multiprocessors")
        peak = find_peak(gpu, precision, options.peak_tflops, units=units, **shares)
        if gpu is not None and peak.tflops is None:
            warning = f"no peak rate is known of {gpu}, so MFU is left out; give it with trainer.peak_tflops"
            log.warning(warning)
            self.progress.say(f"warning: {warning}")
        return Cost(flops, peak, self.peers.place.world_size)

    def _resume(self, options: TrainerOptions) -> tuple[Path | None, int]:
        if self.config["resume"] is None:
            return None, 0
        path = checkpoint.find(str(self.config["resume"]))
        assert self.task is not None
        shapes = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in self.task.state_dict().items()}
        step = checkpoint.check(path, model_identity(self.config["model"]), options.max_steps, shapes)
        self.result.write(resumed_from=path, resumed_at_step=step)
        return path, step

    def _start_wandb(self) -> WandbSink:
        impl = self.config["impl"]
        options = build("logger", self.config["logger"], LoggerOptions)
        name = f"{impl}-dim{self.config['dim']}"
        return WandbSink(options, self.folder, name, impl, self.group, self.config, self.progress.say)

    def _headline(self, num_train_tokens: int) -> str:
        fields = self.result.fields
        impl, resolved = fields["impl"], fields["impl_resolved"]
        parts = (
            f"{fields['model']}, dim {fields['dim']}, {fields['num_params']:,} parameters",
            f"impl {impl if impl == resolved else f'{impl} ({resolved})'}",
            f"{num_train_tokens:,} training tokens",
            self._devices(),
        )
        return "   ".join(parts)

    def _devices(self) -> str:
        name, ranks = self.result.fields["environment"]["gpu"] or "CPU", self.result.fields["ranks"]
        if ranks["strategy"] == "single":
            return name
        hosts = f" on {ranks['num_nodes']} hosts" if ranks["num_nodes"] > 1 else ""
        return f"{ranks['strategy']}, {ranks['devices']} x {name}{hosts}"

    def log_foreign_traceback(self, ending: Ending) -> None:
        """Into train.log, if another rank had the failure that ended the run, and nobody foresaw it."""
        if self.peers.foreign_traceback is not None and ending.bug:
            log.error("%s", self.peers.foreign_traceback)

    def _end_stuck(self, ending: Ending) -> None:
        """All that can be recorded while the main thread waits for ever."""
        log.error("%s: %s", ending.status, ending.reason)
        self.log_foreign_traceback(ending)
        self.result.write(status=ending.status, reason=ending.reason, hint=ending.hint)
