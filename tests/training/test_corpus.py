"""Packing a corpus: what ends in the file, what the cache promises, and what a user is told."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from fusedmlp.errors import UserError
from fusedmlp.training import corpus as corpus_module
from fusedmlp.training.corpus import default_cache_dir, load_or_build
from fusedmlp.training.corpus_sources import SyntheticSource, TextSource, make_source


def packed(corpus) -> bytes:
    return corpus.train_tokens().tobytes() + corpus.val_tokens().tobytes()


class Documents:
    """A source of the given chunks that counts how often it is read."""

    kind = "documents"

    def __init__(self, *chunks: bytes, meet=None) -> None:
        self.content, self.reads, self.meet = chunks, 0, meet

    def identity(self):
        return {"chunks": [chunk.hex() for chunk in self.content]}

    def chunks(self):
        self.reads += 1
        for chunk in self.content:
            if self.meet:
                self.meet.wait(timeout=20)
            yield chunk

    def describe(self):
        return "no chunks"


@pytest.fixture
def text_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_bytes("zwölf\r\n".encode())
    (folder / "a.txt").write_bytes(b"first")
    (folder / "deep" / "c.txt").write_bytes(b"third\n")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def test_files_are_packed_byte_for_byte_in_order_and_split_at_the_tail(text_files, tmp_path):
    source = make_source("text", {"files": [f"{text_files}/b.txt", f"{text_files}/**/[ac].txt"]})
    corpus = load_or_build(source, 0.25, tmp_path / "cache")
    expected = b"\n".join(["zwölf\r\n".encode(), b"first", b"third\n"])
    assert packed(corpus) == expected
    assert corpus.num_val_tokens == len(expected) // 4
    assert corpus.val_tokens().tobytes() == expected[-corpus.num_val_tokens :]


def test_unigram_loss_is_the_cross_entropy_of_byte_frequencies(tmp_path):
    corpus = load_or_build(Documents(b"aaab" * 15, b"abcc" * 5), 0.25, tmp_path)
    train, val = Counter(b"aaab" * 15), Counter(b"abcc" * 5)
    expected = -sum(n * math.log((train[byte] + 1) / (60 + 256)) for byte, n in val.items()) / 20
    assert corpus.unigram_loss == pytest.approx(expected, rel=1e-12)


def test_stdlib_is_python_text_and_the_same_in_every_build(tmp_path):
    builds = [load_or_build(make_source("stdlib", {}), 0.1, tmp_path / name) for name in ("one", "two")]
    assert builds[0].fingerprint == builds[1].fingerprint
    text = packed(builds[0])
    assert 2e6 < len(text) < 20e6
    assert Path(json.__file__).read_bytes() in text
    assert Path(pytest.__file__).read_bytes() not in text


@pytest.mark.parametrize("name", ["stdlib", "text", "synthetic"])
def test_local_sources_use_no_network_no_progress_bar_and_no_second_cache(
    name, text_files, tmp_path, monkeypatch, capfd
):
    def refuse(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    options = {"stdlib": {}, "text": {"files": str(text_files / "*.txt")}, "synthetic": {"num_tokens": 1e3}}
    assert load_or_build(make_source(name, options[name]), 0.1, tmp_path / "cache").num_train_tokens > 0
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "hf").exists()


def test_a_cached_corpus_is_not_read_again_until_content_or_split_changes(text_files, tmp_path):
    first, again = Documents(b"some text " * 9), Documents(b"some text " * 9)
    assert load_or_build(first, 0.1, tmp_path) == load_or_build(again, 0.1, tmp_path)
    assert (first.reads, again.reads) == (1, 0)
    assert load_or_build(again, 0.2, tmp_path).num_val_tokens == 18

    source = TextSource(files=str(text_files / "a.txt"))
    before = load_or_build(source, 0.1, tmp_path)
    (text_files / "a.txt").write_bytes(b"tsrif")  # same name, same size
    after = load_or_build(source, 0.1, tmp_path)
    assert packed(after) == b"tsrif"
    assert before.fingerprint != after.fingerprint


def test_fingerprint_depends_on_content_not_on_place(text_files, tmp_path):
    here = load_or_build(TextSource(files=str(text_files / "a.txt")), 0.5, tmp_path)
    (tmp_path / "moved.txt").write_bytes(b"first")
    there = load_or_build(TextSource(files=str(tmp_path / "moved.txt")), 0.5, tmp_path / "other")
    assert here.fingerprint == there.fingerprint


KILLED_BUILD = """
import os, sys
from pathlib import Path
from fusedmlp.training import corpus, corpus_sources
class Killed(corpus_sources.SyntheticSource):
    def chunks(self):
        yield b"half of it"
        os._exit(9)  # as SIGKILL: nothing is cleaned up
corpus.load_or_build(Killed(num_tokens=5000), 0.1, Path(sys.argv[1]))
"""


def test_a_killed_build_leaves_no_corpus_and_the_next_one_is_whole(tmp_path):
    cache = tmp_path / "cache"
    assert subprocess.run([sys.executable, "-c", KILLED_BUILD, str(cache)], timeout=120).returncode == 9
    (leftover,) = cache.iterdir()
    os.utime(leftover, (0, 0))
    foreign = cache / ".mine.tmp"
    foreign.touch()
    os.utime(foreign, (0, 0))
    corpus = load_or_build(SyntheticSource(num_tokens=5000), 0.1, cache)
    assert packed(corpus) == np.random.default_rng(0).bytes(5000)
    assert not leftover.exists(), "the remains of an old killed build stay for ever"
    assert foreign.exists()


def test_a_damaged_corpus_is_built_again(tmp_path):
    corpus = load_or_build(Documents(b"0123456789"), 0.2, tmp_path)
    corpus.path.write_bytes(b"01234")
    assert packed(load_or_build(Documents(b"0123456789"), 0.2, tmp_path)) == b"0123456789"
    corpus.path.with_suffix(".json").write_text("{")
    assert packed(load_or_build(Documents(b"0123456789"), 0.2, tmp_path)) == b"0123456789"


def test_two_builds_at_once_both_get_the_whole_corpus(tmp_path):
    # The barrier holds both inside their builds until both have written each chunk.
    barrier = threading.Barrier(2)
    sources = [Documents(b"x" * 5000, b"y" * 5000, meet=barrier) for _ in range(2)]
    results = []
    threads = [
        threading.Thread(target=lambda s=source: results.append(load_or_build(s, 0.1, tmp_path))) for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [source.reads for source in sources] == [1, 1]
    assert [packed(corpus) for corpus in results] == [b"x" * 5000 + b"y" * 5000] * 2
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".json"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    class Failing(Documents):
        def chunks(self):
            yield b"begun"
            raise UserError("the source broke")

    with pytest.raises(UserError, match="the source broke"):
        load_or_build(Failing(), 0.1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_is_named_with_the_key_to_change(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file.cache.*data\.cache_dir=DIR"):
        load_or_build(Documents(b"text"), 0.1, tmp_path / "file" / "cache")


def test_the_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("FUSEDMLP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == Path("/home/me/.cache/fusedmlp/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/fusedmlp/data")
    monkeypatch.setenv("FUSEDMLP_CACHE", "/mine")
    assert default_cache_dir() == Path("/mine/data")


def test_paths_are_relative_to_where_the_user_started(text_files, tmp_path, monkeypatch):
    job_config = OmegaConf.create({"hydra": {"runtime": {"cwd": str(text_files)}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", job_config)
    monkeypatch.chdir(tmp_path)
    assert packed(load_or_build(TextSource(files="a.txt"), 0.1, tmp_path)) == b"first"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", {}, "needs data.files"),
        ("text", {"files": []}, "needs data.files"),
        ("text", {"files": "nothing-*.txt"}, r"nothing-\*\.txt matches no file"),
        ("text", {"files": "texts"}, r"is a directory.*texts/\*\*/\*\.txt"),
        ("text", {"files": "latin1.txt"}, "latin1.txt is not UTF-8"),
        ("text", {"files": "cut.txt"}, "cut.txt is not UTF-8"),
        ("text", {"files": "nul.bin"}, "nul.bin is not text"),
        ("text", {"files": "texts/empty.txt"}, "corpus is empty"),
        ("text", {"file": "a.txt"}, "data.file means nothing.*data.files"),
        ("synthetic", {"num_tokens": 0}, "num_tokens=0"),
        ("synthetic", {"num_tokens": 1.5}, "data.num_tokens=1.5: expected an integer"),
        ("synthetic", {"content_seed": None}, "data.content_seed=null: expected an integer"),
        ("synthetic", {"num_tokens": 10**18}, "num_tokens=1000000000000000000: .* do not fit into .* are free"),
        ("novels", {}, "stdlib, text, hf, synthetic"),
    ],
)
def test_user_errors(name, options, message, text_files, tmp_path, monkeypatch):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 \xe9")
    (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
    (tmp_path / "nul.bin").write_bytes(b"a\0b\0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        load_or_build(make_source(name, options), 0.1, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*.bin"))


@pytest.fixture
def json_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = [{"body": f"line {i} é", "number": i} for i in range(30)]
    path = tmp_path / "rows.json"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return {"name": "json", "data_files": str(path)}


def test_hf_packs_the_rows_of_a_split(json_rows, tmp_path, capfd):
    source = make_source("hf", {**json_rows, "split": "train[:10]"})
    expected = "".join(f"line {i} é\n" for i in range(10)).encode()
    assert packed(load_or_build(source, 0.1, tmp_path / "cache")) == expected
    assert capfd.readouterr().err == "", "progress bars outside a terminal"
    whole = load_or_build(replace(source, split="train", column="body"), 0.1, tmp_path / "cache")
    assert packed(whole).startswith(expected)
    assert packed(whole).count(b"\n") == 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "needs data.name"),
        ({"data_files": None}, "needs data.data_files"),
        ({"data_files": "missing.json"}, "missing.json"),
        ({"split": "test"}, r"data.split=test.*'train'"),
        ({"split": None}, "needs data.split"),
        ({"column": "text"}, r"data.column=text.*body \(string\), number \(int64\)"),
        ({"column": "number"}, r"data.column=number is no text column"),
        ({"name": "folder", "data_files": None, "config": "other"}, r"'other' not found. Available: \['default'\]"),
        ({"name": "owner/of-nothing", "data_files": None}, "owner/of-nothing.*need no network"),
    ],
)
def test_hf_says_what_is_there(changes, message, json_rows, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows.json").write_text('{"body": "text"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        load_or_build(make_source("hf", {**json_rows, **changes}), 0.1, tmp_path / "cache")


def test_hf_leaves_the_library_s_settings_alone(json_rows, tmp_path):
    before = datasets.utils.are_progress_bars_disabled(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    load_or_build(make_source("hf", json_rows), 0.1, tmp_path / "cache")
    assert (datasets.utils.are_progress_bars_disabled(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS) == before


def test_byte_counts_of_a_long_text_are_exact(monkeypatch):
    monkeypatch.setattr(corpus_module, "_COUNT_BLOCK", 7)
    tokens = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    assert (corpus_module._byte_counts(tokens) == np.bincount(tokens, minlength=256)).all()
