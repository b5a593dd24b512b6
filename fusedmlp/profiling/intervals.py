"""Sets of time as sorted, disjoint intervals: (n,) starts and (n,) ends."""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Intervals = tuple[Times, Times]


def union(start: Times, end: Times) -> Intervals:
    """What is covered by any of the intervals, which may overlap and come in any order."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    return start[first], reach[np.concatenate((np.flatnonzero(first)[1:] - 1, [len(reach) - 1]))]


def clipped(intervals: Intervals, low: float, high: float) -> Intervals:
    """The part between two times."""
    start, end = np.clip(intervals[0], low, high), np.clip(intervals[1], low, high)
    kept = end > start
    return start[kept], end[kept]


def gaps(intervals: Intervals, low: float, high: float) -> Intervals:
    """What is not covered between two times."""
    start, end = clipped(intervals, low, high)
    begins, ends = np.concatenate(([low], end)), np.concatenate((start, [high]))
    kept = ends > begins
    return begins[kept], ends[kept]


def total(intervals: Intervals) -> float:
    return float(np.sum(intervals[1] - intervals[0]))


def covered_until(intervals: Intervals, times: Times) -> Times:
    """How much of the intervals lies before each time."""
    start, end = intervals
    if not len(start):
        return np.zeros_like(times)
    before = np.concatenate(([0.0], np.cumsum(end - start)))
    i = np.searchsorted(start, times, side="right") - 1
    inside = np.where(i >= 0, np.minimum(times, end[i]) - start[i], 0.0)
    return np.where(i >= 0, before[np.maximum(i, 0)] + inside, 0.0)


def overlap(intervals: Intervals, others: Intervals) -> Times:
    """How much of each of `others` the intervals cover."""
    return covered_until(intervals, others[1]) - covered_until(intervals, others[0])


def holder(intervals: Intervals, times: Times) -> NDArray[np.int64]:
    """Which of the intervals, disjoint and sorted, each time lies in; -1 for none."""
    start, end = intervals
    if not len(start):
        return np.full(len(times), -1)
    i = np.searchsorted(start, times, side="right") - 1
    return np.where((i >= 0) & (times < end[np.maximum(i, 0)]), i, -1)
