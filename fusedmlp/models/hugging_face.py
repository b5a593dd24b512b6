"""What a Hugging Face model need not find out, because a window of tokens is one sequence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_sequence() -> Iterator[None]:
    """Within this context transformers takes every row of tokens for one sequence.

    It would look at the positions in every forward pass, whether several are packed into a row: the host waits for the
    GPU there, and the step cannot be captured.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    masks.find_packed_sequence_indices = _none_packed
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = look


def _none_packed(position_ids: Any) -> None:
    return None
