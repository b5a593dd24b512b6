"""What the command lines of these scripts accept."""

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from `least` on."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: accepted: whole numbers, {least} and more")
        return value

    return whole_number


def needs_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the program with one line where there is no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        parser.error("this runs on a CUDA GPU, and PyTorch finds none here")
