"""Where the tensors of an AdamW step lie: the table from which the kernels of `kernels/adamw.py` find them.

Nothing here waits for the GPU: tables are filled in pinned memory and copied behind what was launched before.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

# Parameters, gradients, both moments and step counts, of the parameters that have a gradient.
Columns = list[list[Tensor]]


class Group(NamedTuple):
    """A group of parameters.

    Attributes:
        rate: the learning rate; a 0-dim fp32 tensor on the device is read there at each step.
        members: how many of the tensors are its.
        settings: see `kernels/adamw.py`.
    """

    rate: float | Tensor
    members: int
    settings: tuple[float, ...]


class Bucket(NamedTuple):
    """Tensors that one launch takes: of the same dtypes, and all or not all beginning at a multiple of 16 bytes."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    aligned: bool


class Plan:
    """What a step launches for tensors at certain addresses.

    Args:
        addresses: (5, tensors) int64, of `columns`.
        max_norm: what the gradients are clipped to, or None.
        previous: a plan whose chunks may serve for this one too.
        pinned: memory to fill the table in, if it fits; else some is allocated.
    Attributes:
        host: the pinned memory that the table was copied from; a recorded copy reads it at each replay.
    """

    def __init__(
        self, columns: Columns, addresses: numpy.ndarray, groups: Sequence[Group], max_norm: float | None,
        previous: "Plan | None", pinned: Tensor | None,
    ):  # fmt: skip
        from fusedmlp.kernels import adamw as kernels

        device = columns[0][0].device
        buckets, order = _by_bucket(columns, addresses)
        self.sizes = [columns[0][i].numel() for i in order]
        # The table, 8 numbers of fp32 for each group, max_norm.
        table_words, group_words = len(order) * kernels.COLUMNS, 4 * len(groups)
        self._words = torch.empty(table_words + group_words + 1, dtype=torch.int64, device=device)
        self._rates = torch.empty(len(groups), dtype=torch.float32, device=device)
        if pinned is None or pinned.shape != self._words.shape:
            pinned = host_memory(self._words, device)
        self.host = pinned
        numbers = self.host.numpy()
        numbers[:table_words].reshape(-1, kernels.COLUMNS)[:] = self._rows(addresses, groups, table_words, order)
        floats = numbers[table_words:].view(numpy.float32)
        floats[:-2].reshape(-1, 8)[:, : kernels.SETTINGS] = [group.settings for group in groups]
        floats[-2] = math.inf if max_norm is None else max_norm
        self._words.copy_(self.host, non_blocking=True)
        self.table = self._words[:table_words].view(len(order), -1)
        self._max_norm = self._words[-1:].view(torch.float32)[:1]
        # On the device, and the memory that they come from.
        self.chunks: tuple[Tensor, Tensor] = (
            previous.chunks
            if previous is not None and previous.sizes == self.sizes
            else _chunks_of(self.sizes, kernels.CHUNK, device)
        )
        self._sums = torch.empty(self.chunks[0].shape[0], dtype=torch.float32, device=device)
        self._clip = torch.empty(2, dtype=torch.float32, device=device)
        self._parts = self._divided([buckets[i] for i in order], kernels.CHUNK)
        self._values: list[float | None] = []
        self.set_rates(groups)

    def set_rates(self, groups: Sequence[Group]) -> None:
        """Learning rates of the next step, of the groups whose rate is not on the device."""
        values = [None if self._on_device(group.rate) else float(group.rate) for group in groups]
        if values == self._values:
            return
        self._values = values
        if any(value is not None for value in values):
            self._rates_host = host_memory(self._rates, self._rates.device)
            self._rates_host.numpy()[:] = [value or 0.0 for value in values]
            self._rates.copy_(self._rates_host, non_blocking=True)

    def launch(self) -> Tensor:
        """Clips, counts and updates. Returns: the norm of all gradients, 0-dim fp32."""
        from fusedmlp.kernels import adamw as kernels

        for bucket, chunks, sums in self._parts:
            kernels.square_sums(self.table, chunks, sums, bucket.grad_dtype, bucket.aligned)
        kernels.clip(self.table, self._sums, self._max_norm, self._clip)
        for bucket, chunks, _ in self._parts:
            kernels.adamw(self.table, chunks, self._clip, *bucket)
        return self._clip[0]

    def _on_device(self, rate: float | Tensor) -> bool:
        return isinstance(rate, Tensor) and rate.device == self._rates.device and rate.dtype == torch.float32

    def _rows(
        self, addresses: numpy.ndarray, groups: Sequence[Group], table_words: int, order: list[int]
    ) -> numpy.ndarray:
        from fusedmlp.kernels.adamw import COLUMNS

        rows = numpy.empty((len(order), COLUMNS), dtype=numpy.int64)
        rows[:, :5] = addresses.T
        begin, settings = 0, self._words.data_ptr() + 8 * table_words
        for number, group in enumerate(groups):
            end = begin + group.members
            rate = group.rate if self._on_device(group.rate) else self._rates[number]
            rows[begin:end, 5] = rate.data_ptr()  # type: ignore[union-attr]
            rows[begin:end, 6] = settings + 32 * number
            begin = end
        rows = rows[order]
        rows[:, 7] = self.sizes
        return rows

    def _divided(self, buckets: list[Bucket], chunk: int) -> list[tuple[Bucket, Tensor, Tensor]]:
        """For each run of equal buckets its chunks and their sums."""
        found: list[tuple[Bucket, Tensor, Tensor]] = []
        begin = end = 0
        for i, (bucket, size) in enumerate(zip(buckets, self.sizes, strict=True)):
            end += -(-size // chunk)
            if i + 1 == len(buckets) or buckets[i + 1] != bucket:
                if end > begin:
                    found.append((bucket, self.chunks[0][begin:end], self._sums[begin:end]))
                begin = end
        return found


def host_memory(like: Tensor, device: torch.device) -> Tensor:
    """Memory on the host from which the device copies without the host waiting."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda")


def check_state(columns: Columns) -> None:
    """Raises: RuntimeError for parameters whose moments lie in memory otherwise than they do."""
    for parameter, _, exp_avg, exp_avg_sq, step in zip(*columns, strict=True):
        for moment in (exp_avg, exp_avg_sq):
            if moment.dtype != parameter.dtype or moment.stride() != parameter.stride():
                raise RuntimeError(
                    f"TritonAdamW: a parameter of shape {tuple(parameter.shape)}, {parameter.dtype}, strides "
                    f"{parameter.stride()}, has a moment of {moment.dtype}, strides {moment.stride()}; parameters must "
                    "be dense, and keep dtype and layout"
                )
        if step.device != parameter.device or step.dtype != torch.float32:
            raise RuntimeError(f"TritonAdamW: a step count is {step.dtype} on {step.device}; expected fp32 on the GPU")


def _by_bucket(columns: Columns, addresses: numpy.ndarray) -> tuple[list[Bucket], list[int]]:
    """The bucket of each tensor, and the order that puts those of a bucket together."""
    aligned = ((addresses[:4] & 15) == 0).all(axis=0).tolist()
    buckets = [Bucket(p.dtype, g.dtype, a) for p, g, a in zip(columns[0], columns[1], aligned, strict=True)]
    different = list(dict.fromkeys(buckets))
    order = list(range(len(buckets)))
    return buckets, order if len(different) == 1 else sorted(order, key=lambda i: different.index(buckets[i]))


def _chunks_of(sizes: list[int], chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tensor, ordinal) of every chunk of tensors of these sizes, on the device and in the memory it comes from."""
    counts = [-(-size // chunk) for size in sizes]
    tensors = numpy.repeat(numpy.arange(len(sizes), dtype=numpy.int32), counts)
    ordinals = numpy.concatenate([numpy.arange(count, dtype=numpy.int32) for count in counts])
    pairs = torch.from_numpy(numpy.stack((tensors, ordinals), axis=1))
    if device.type == "cuda":
        pairs = pairs.pin_memory()
    return pairs.to(device, non_blocking=True), pairs
