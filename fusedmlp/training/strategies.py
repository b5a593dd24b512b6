"""Lightning's strategies for several devices, and what this project needs of them that they do not do themselves."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedmlp.training.place import Place

_NEVER = 2**31 - 1  # the largest of C's integers


def make_strategy(name: str, device: torch.device, place: Place, timeout_s: float) -> Strategy:
    """The strategy that `trainer.strategy` names."""
    timeout = timedelta(seconds=timeout_s)
    if name == "ddp":
        # Buffers of these models are constants; a broadcast of all of them would begin every forward pass.
        return UntimedDDP(gradient_as_bucket_view=True, broadcast_buffers=False, timeout=timeout)
    if name == "fsdp":
        return FSDP2Strategy(place.world_size, timeout)
    return OneDevice(device)


class OneDevice(SingleDeviceStrategy):
    """One device, on which a step is one call."""

    # A property of Lightning's, asked for four times a step.
    handles_gradient_accumulation = False

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self._step, self._context = self.lightning_module.training_step, self.precision_plugin.train_step_context

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._step(*args, **kwargs)


class UntimedDDP(DDPStrategy):
    """DDP without its statistics, for which the host would wait for the GPU in every 100th forward pass."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model._set_ddp_runtime_logging_sample_rate(_NEVER)


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all ranks, with checkpoints that are those of one device.

    Lightning's own numbers the optimizer's state in the order of the model's parameters, and an optimizer numbers its
    groups one after another: with two groups neither could read the other's.
    """

    def __init__(self, world_size: int, timeout: timedelta):
        super().__init__(world_size, 1, save_distributed_checkpoint=False, timeout=timeout)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return _whole(self.model.state_dict(), self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # Lightning hands over its wrapper, which has the same state.
        state = optimizer.state_dict()
        return {
            "state": {number: _whole(values, self.is_global_zero) for number, values in state["state"].items()},
            "param_groups": state["param_groups"],
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Every rank reads the file, and keeps its shards."""
        checkpoint = torch.load(Path(checkpoint_path), mmap=True, map_location="cpu", weights_only=weights_only)
        assert self.model is not None
        own = self.model.state_dict()
        loaded = {name: _sharded(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.model.load_state_dict(loaded)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            sharded = {
                number: {name: _sharded(value, parameters[number]) for name, value in values.items()}
                for number, values in state["state"].items()
            }
            optimizer.load_state_dict({"state": sharded, "param_groups": state["param_groups"]})
        return checkpoint


def _whole(values: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Tensors put together from their shards, one after another, on the host of the rank that keeps them."""
    whole: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if keep:
            whole[name] = value.cpu() if isinstance(value, Tensor) else value
    return whole


def _sharded(value: Any, like: Any) -> Any:
    """This rank's shards of a whole tensor, where `like`, a parameter of the same shape, is in shards."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        # Every rank has the values: nothing is sent.
        placed = value.to(like.device)
        return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
    return value


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Puts `model` in shards (FSDP2), in place: every element of its outermost module lists is a unit, and the rest.

    Under bf16-mixed the shards stay fp32; parameters are sent and computed with in bf16, and gradients summed in fp32.
    Autocast alone would keep a whole bf16 model for the backward pass. What lies between blocks is bf16 then, too.
    """
    mixed = precision == "bf16-mixed"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32 if mixed else None
    )
    # A single rank has nothing to gain from taking its parameters apart again before the backward pass.
    reshard = None if mesh.size() > 1 else False
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _units(module: nn.Module) -> list[nn.Module]:
    units: list[nn.Module] = []
    for child in module.children():
        # A list has no forward pass before which to put its parameters together.
        if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            units += [child] if any(True for _ in child.parameters()) else []
        else:
            units += _units(child)
    return units


def synchronized(strategy: Strategy) -> DistributedDataParallel | None:
    """The wrapper that averages gradients in the backward pass, if the strategy has one."""
    return strategy.model if isinstance(strategy.model, DistributedDataParallel) else None


class Ranks(ClusterEnvironment):
    """Tells Lightning which rank this process is; that it has one device, it is told by the Trainer's arguments."""

    def __init__(self, place: Place):
        super().__init__()
        self.place = place

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.place.address

    @property
    def main_port(self) -> int:
        return self.place.port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.place.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        # Of the devices that Lightning knows of.
        return 0

    def node_rank(self) -> int:
        return self.place.node
