"""The one exception that train.py and the scripts print as a plain message, without a traceback; and who ran out."""

import torch

# The last is for a size beyond 2^63 bytes.
_OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed",
)  # fmt: skip


class UserError(RuntimeError):
    """Something the user can put right: a wrong value, a missing file, too little memory.

    The message is complete in itself: what was wrong, and what is accepted or what to do.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory. The CPU allocator says so in the text of a RuntimeError only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
