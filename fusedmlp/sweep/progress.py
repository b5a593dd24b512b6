"""The line between two jobs of a sweep: how many are done, failed and left, how long it takes, the best so far."""

from collections.abc import Mapping, Sequence

from fusedmlp.sweep.ledger import Job


def line(jobs: Sequence[Job], speeds: Mapping[int, float], labels: Mapping[int, str], measured: Sequence[float]) -> str:
    """One line.

    Args:
        jobs: all jobs of the sweep.
        speeds: job index -> tokens/s of the completed ones.
        measured: seconds of each job that ran in this process, from which the time left is estimated.
    """
    done = sum(job.done for job in jobs)
    failed = sum(job.ended and not job.done for job in jobs)
    left = len(jobs) - done - failed
    parts = [f"{done} done", f"{failed} failed", f"{left} left"]
    if left and measured:
        parts.append(f"about {duration(left * sum(measured) / len(measured))}")
    text = f"sweep: {', '.join(parts)}"
    if speeds:
        best = max(speeds, key=lambda index: speeds[index])
        text += f"; best so far {speeds[best]:,.0f} tokens/s ({labels[best] or f'job {best}'})"
    return text


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
