"""Networks of somebody else's in the training loop: how they are named, what goes in and out, what is counted."""

import sys
import types

import pytest
import torch
from conftest import raises
from torch.utils._python_dispatch import TorchDispatchMode
from training.runs import RANDOM_BYTES, TINY, config, fits, result

from fusedmlp import FusedMLP
from fusedmlp.errors import UserError
from fusedmlp.models import GPT, TorchModule
from fusedmlp.models.hugging_face import one_sequence
from fusedmlp.training.run import run

NETWORK = """
import types

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16, form="tensor", classes=256):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head, self.form = nn.Linear(width, classes), form

    def forward(self, tokens):
        logits = self.head(self.mlp(self.embed(tokens)))
        if self.form == "last":
            return logits[:, -1]
        if self.form == "late":
            self.scale = nn.Parameter(torch.ones(()))
        if self.form == "empty":
            next(iter(()))
        return {
            "tensor": logits, "mapping": {"logits": logits, "loss": None}, "tuple": (logits, None), "text": "?",
            "twice": torch.cat([logits, logits], 1), "nothing": logits[:, :0], "detached": logits.detach(),
            "integers": logits.long(), "late": logits,
        }[self.form]

class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 256)

    def forward(self, images):
        assert images.shape[1:] == (3, 4, 4) and images.dtype == self.head.weight.dtype
        assert -1 <= images.min() and images.max() <= 1
        return self.head(self.conv(images).mean((2, 3)))

class LikeHuggingFace(nn.Module):
    def __init__(self, positions=8, tokens=256):
        super().__init__()
        self.config = types.SimpleNamespace(max_position_embeddings=positions)
        self.wte, self.wpe, self.head = nn.Embedding(tokens, 4), nn.Embedding(positions, 4), nn.Linear(4, 256)

    def get_input_embeddings(self):
        return self.wte

def raises():
    raise OSError("no such thing")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module of the user's in the current directory, which is not where train.py is."""
    (tmp_path / "their_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("their_networks", None)


@pytest.mark.parametrize(("form", "positions"), [("tensor", 8), ("mapping", 8), ("tuple", 8), ("last", 1)])
def test_logits_in_any_form(package, form, positions):
    model = TorchModule("their_networks.Net", {"form": form}, context=8, impl="native")
    assert model(torch.randint(0, 256, (3, 8))).shape == (3, positions, 256)
    assert isinstance(model.net.mlp, FusedMLP)
    assert len(model.report) == 1


def test_replace_false_leaves_the_network(package):
    model = TorchModule("their_networks.Net", context=8, replace=False)
    assert model.report is None
    assert not any(isinstance(m, FusedMLP) for m in model.modules())


def test_windows_as_pictures(package):
    model = TorchModule("their_networks.Picture", context=48, inputs="image", image_shape=[3, 4, 4])
    assert model(torch.randint(0, 256, (2, 48))).shape == (2, 1, 256)
    assert model.bfloat16()(torch.randint(0, 256, (2, 48))).dtype == torch.bfloat16


def test_flops_are_those_of_the_products_whatever_the_implementation(package, impl):
    # Forward: T (2 * 16 * 64 for each layer of the MLP, 2 * 16 * 256 for the head); the backward pass is twice that.
    expected = 3 * 8 * (2 * 2 * 16 * 64 + 2 * 16 * 256)
    model = TorchModule("their_networks.Net", context=8, impl=impl)
    assert model.flops_per_sample() == expected
    assert model.net.mlp.impl == impl
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_is_counted_as_plain_products():
    gpt = GPT(32, 2, 2, 8, attention="sdpa")
    model = TorchModule("fusedmlp.models.GPT", {"dim": 32, "num_layers": 2, "num_heads": 2, "context": 8}, context=8)
    assert model.flops_per_sample() == gpt.flops_per_sample()
    model.net.flops_per_sample = None
    assert model.flops_per_sample() == gpt.flops_per_sample()


def test_what_cannot_be_counted_is_not_known(package, caplog):
    model = TorchModule("their_networks.Net", {"form": "text"}, context=8)
    assert model.flops_per_sample() is None
    assert "cannot be counted" in caplog.text


def theirs(form):
    """Runs a network that returns this."""
    TorchModule("their_networks.Net", {"form": form}, context=8)(torch.zeros(1, 8).long())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: TorchModule(), ["model.target is missing", "timm:<name>", "hf:"]),
        (
            lambda: TorchModule("their_network.Net"),
            ["their_network.Net", "nothing that can be imported", "their_network"],
        ),
        (lambda: TorchModule("their_networks.Ned"), ["their_networks.Ned", "Ned"]),
        (lambda: TorchModule("Net"), ["'Net'"]),
        (lambda: TorchModule("onnx:net"), ["onnx:net", "timm:<name>"]),
        (lambda: TorchModule("their_networks.Net", {"depth": 3}), ["cannot be built", "depth"]),
        (lambda: TorchModule("their_networks.raises"), ["cannot be built", "OSError: no such thing"]),
        (lambda: TorchModule("builtins.dict"), ["a dict", "torch.nn.Module"]),
        (lambda: TorchModule("their_networks.Net", {"form": "text"})(torch.zeros(1, 8).long()), ["returned str"]),
        (
            lambda: TorchModule("their_networks.Net", {"classes": 10})(torch.zeros(1, 8).long()),
            ["(1, 8, 10)", "at least 256 classes"],
        ),
        (lambda: theirs("twice"), ["(1, 16, 256)", "at most 8 positions"]),
        (lambda: theirs("nothing"), ["(1, 0, 256)", "at most 8 positions"]),
        (lambda: theirs("late"), ["makes parameters in its forward pass: net.scale", "the optimizer"]),
        (lambda: theirs("detached"), ["torch.float32 without a gradient", "not detached"]),
        (lambda: theirs("integers"), ["torch.int64 without a gradient", "floating-point"]),
        (
            lambda: TorchModule("their_networks.LikeHuggingFace", context=16),
            ["model.context=16", "the 8 positions of their_networks.LikeHuggingFace", "max_position_embeddings=16"],
        ),
        (
            lambda: TorchModule("their_networks.LikeHuggingFace", {"tokens": 255}, context=8),
            ["model.vocab_size=256", "the 255 tokens that their_networks.LikeHuggingFace", "vocab_size=256"],
        ),
        (lambda: TorchModule("torch.nn.LazyLinear", {"out_features": 256}), ["weight has no values", "lazy"]),
        (
            lambda: TorchModule(
                "torch.nn.Embedding", {"num_embeddings": 256, "embedding_dim": 256, "sparse": True}, replace=False
            ),
            ["torch.nn.Embedding", "sparse=True", "AdamW", "sparse=False"],
        ),
        (
            lambda: TorchModule("torch.nn.Linear", {"in_features": 8, "out_features": 256, "device": "meta"}),
            ["weight has no values", "device=meta"],
        ),
    ],
)
def test_what_is_wrong_is_said(package, build, words):
    with raises(UserError, *words):
        build()


def test_sizes_that_do_not_fit_are_named():
    with raises(ValueError, "image_shape=[3, 4, 5]", "context=48"):
        TorchModule("torch.nn.Identity", context=48, inputs="image", image_shape=[3, 4, 5])
    with raises(ValueError, "inputs='sound'", "tokens, image"):
        TorchModule("torch.nn.Identity", inputs="sound")


def train_theirs(folder, *more):
    overrides = [override for override in (*TINY, *RANDOM_BYTES) if "num_layers" not in override]
    overrides += [
        f"data.cache_dir={folder.parent / 'cache'}", "model=torch_module", "model.target=their_networks.Net",
        "+model.kwargs.width=${dim}", "model.context=8", *more,
    ]  # fmt: skip
    return run(config(*overrides), folder, overrides)[1]


@fits
def test_a_network_that_stops_an_iteration_fails_and_is_not_begun_anew_for_ever(package, tmp_path):
    ending = train_theirs(tmp_path / "run", "+model.kwargs.form=empty")
    assert (ending.status, ending.bug) == ("failed", True)
    assert "StopIteration in the model" in ending.reason


@fits
def test_the_loop_trains_it_and_records_what_ran(package, tmp_path):
    ending = train_theirs(tmp_path / "run")
    assert ending.status == "completed", ending
    found = result(tmp_path / "run")
    assert (found["model"], found["impl"], found["impl_resolved"]) == ("their_networks.Net", "auto", "native")
    assert found["replaced"] == ["mlp: Sequential (0, 1, 2) -> FusedMLP(impl='auto')"]
    assert set(found["impl_choices"].values()) == {"native"}
    assert any(key.startswith("mlp float32 none M<=64 K=32 N=128") for key in found["impl_choices"])
    assert found["throughput"]["flops_per_sample"] == 3 * 8 * (2 * 2 * 32 * 128 + 2 * 32 * 256)


@pytest.mark.parametrize(
    ("target", "kwargs", "library"),
    [
        ("hf:gpt2", {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 256}, "transformers"),
        (
            "hf:vit",
            {"image_size": 32, "num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 2, "num_labels": 256},
            "transformers",
        ),
        ("timm:vit_tiny_patch16_224", {"depth": 1, "num_classes": 256, "img_size": 32}, "timm"),
    ],
)
def test_libraries_models_by_name(target, kwargs, library, tmp_path):
    pytest.importorskip(library)
    picture = {"context": 3 * 32 * 32, "inputs": "image", "image_shape": [3, 32, 32]} if "vit" in target else {}
    model = TorchModule(target, kwargs, **picture)
    tokens = torch.randint(0, 256, (2, model.context))
    assert model(tokens).shape[-1] == 256
    assert len(model.report) == 1
    assert model.flops_per_sample() > 0
    if target == "hf:gpt2":
        with raises(UserError, "model.context=2000", "the 1024 positions of hf:gpt2"):
            TorchModule(target, kwargs, context=2000)
        model.net.config.save_pretrained(tmp_path)
        again = TorchModule(f"hf:{tmp_path}")
        assert again(tokens).shape == (2, 128, 256)


def test_a_small_vocabulary_has_no_token_for_padding():
    pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model = TorchModule("hf:phi3", {**sizes, "num_key_value_heads": 2, "vocab_size": 256}, context=8)
    assert model.net.config.pad_token_id is None, "32000, as its own vocabulary has it"
    assert model(torch.zeros(1, 8).long()).shape == (1, 8, 256)


class Reads(TorchDispatchMode):
    """Counts where a value is read, for which the host would wait on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("target", "kwargs"),
    [
        ("hf:gpt2", {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 256}),
        (
            "hf:llama",
            {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
             "vocab_size": 256},
        ),
    ],
)  # fmt: skip
def test_a_hugging_face_model_reads_no_value(target, kwargs):
    pytest.importorskip("transformers")
    model = TorchModule(target, kwargs, context=16)
    tokens = torch.randint(0, 256, (2, 16))
    with Reads() as reads:
        logits = model(tokens)
        logits.sum().backward()
    assert reads.count == 0
    model.eval()
    assert torch.equal(model(tokens), model.net(tokens).logits)


def test_one_sequence_is_for_the_forward_pass_alone(monkeypatch):
    masks = types.SimpleNamespace(find_packed_sequence_indices=lambda positions: "packed")
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    with one_sequence():
        assert masks.find_packed_sequence_indices(None) is None
    assert masks.find_packed_sequence_indices(None) == "packed"
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", types.SimpleNamespace())
    with one_sequence():
        pass


def test_a_missing_library_says_what_to_install(monkeypatch):
    for target, library in (("hf:gpt2", "transformers"), ("timm:vit", "timm")):
        monkeypatch.setitem(sys.modules, library, None)
        with raises(UserError, target, f"pip install {library}"):
            TorchModule(target)
