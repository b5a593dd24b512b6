"""Padding of a vocabulary to a size that GEMMs like."""


def padded(vocab_size: int, multiple: int) -> int:
    """`vocab_size` rounded up to a multiple of `multiple`: 50257 and 64 give 50304; 1 leaves it as it is.

    Raises: ValueError for a number below 1.
    """
    if vocab_size < 1 or multiple < 1:
        raise ValueError(f"vocab_size={vocab_size} and pad_vocab_to={multiple} must be at least 1")
    return -(-vocab_size // multiple) * multiple
