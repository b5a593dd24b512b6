"""Work for test_ahead_workers.py, which other processes import: each item says what becomes of it."""

import os
import time


def do(item: str) -> None:
    kind, _, text = item.partition(" ")
    if kind == "fails":
        raise ValueError(f"{text}\nand more lines")
    if kind == "dies":
        os._exit(7)
    if kind == "hangs":
        time.sleep(1000)
    if kind == "notes":
        with open(text, "a") as file:
            file.write(f"{os.getpid()} {os.environ.get('PREPARED')}\n")


def prepare(value: str) -> None:
    if value == "fails":
        raise RuntimeError("no GPU in this process")
    os.environ["PREPARED"] = value
