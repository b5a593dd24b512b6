"""Models of timm, Transformers and torchvision, small ones, built from their configurations with random weights."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from fusedmlp import replace_modules

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PICTURE = {"image_size": 32, "patch_size": 16}


def timm(name, size=32, **options):
    timm = pytest.importorskip("timm")
    if name == "mixer":
        return timm.models.mlp_mixer.MlpMixer(10, size, num_blocks=2, embed_dim=32), torch.randn(2, 3, size, size)
    return timm.create_model(name, num_classes=10, **options), torch.randn(2, 3, size, size)


def hugging_face(name, inputs, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, re.sub("(LMHead)?Model$|For[A-Z].*$", "", name) + "Config")
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    options |= {"vocab_size": 99} if "ids" in "".join(inputs) else {}
    values = {
        "input_ids": torch.randint(3, 90, (2, 8)),
        "decoder_input_ids": torch.randint(3, 90, (2, 5)),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "input_features": torch.randn(2, 8, 32),
    }
    return getattr(transformers, name)(config(**options, **special)), {key: values[key] for key in inputs}


def torchvision(name, *sizes, **options):
    torchvision = pytest.importorskip("torchvision")
    return getattr(torchvision.models, name)(*sizes, **options), torch.randn(2, 3, 32, 32)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16, "max_target_positions": 16,
    "num_mel_bins": 8,
}  # fmt: skip
TOKENS, PIXELS = ("input_ids",), ("pixel_values",)
# How to build it, how many FusedMLPs and FusedLinearGeLUs come of it, and why the others were left.
CASES = {
    "timm vit": (
        lambda: timm("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32), 2, 0, None,
    ),
    "timm mixer": (lambda: timm("mixer"), 4, 0, None),
    "timm convnext": (
        lambda: timm("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), conv_mlp=True),
        0, 0, "Conv2d is not a linear layer",
    ),
    "torchvision vit": (lambda: torchvision("VisionTransformer", 32, 16, 2, 2, 32, 64), 2, 0, None),
    "torchvision swin": (lambda: torchvision("SwinTransformer", [4, 4], 16, [1, 1], [2, 2], [4, 4]), 2, 0, None),
    "gpt2": (lambda: hugging_face("GPT2LMHeadModel", TOKENS, **GPT2), 2, 0, None),
    "bert": (lambda: hugging_face("BertForMaskedLM", TOKENS, **SMALL), 0, 3, None),
    "vit": (lambda: hugging_face("ViTForImageClassification", PIXELS, **SMALL, **PICTURE), 2, 0, None),
    "clip": (
        lambda: hugging_face("CLIPVisionModel", PIXELS, **SMALL, **PICTURE), 0, 0, "QuickGELUActivation is not GELU",
    ),
    "clip gelu": (lambda: hugging_face("CLIPVisionModel", PIXELS, hidden_act="gelu", **SMALL, **PICTURE), 2, 0, None),
    "whisper": (lambda: hugging_face("WhisperModel", ("input_features", "decoder_input_ids"), **WHISPER), 0, 4, None),
    "gpt_neox": (lambda: hugging_face("GPTNeoXForCausalLM", TOKENS, max_position_embeddings=16, **SMALL), 2, 0, None),
    "t5": (lambda: hugging_face("T5Model", ("input_ids", "decoder_input_ids"), **T5), 0, 0, "ReLU is not GELU"),
    "t5 gated": (
        lambda: hugging_face("T5Model", ("input_ids", "decoder_input_ids"), feed_forward_proj="gated-gelu", **T5),
        0, 4, None,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("name", CASES)
def test_a_librarys_model(name):
    build, mlps, linears, why = CASES[name]
    model, batch = build()
    model.train()
    untouched, keys, text = copy.deepcopy(model), list(model.state_dict()), repr(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    report = replace_modules(model, impl="manual", verify=True, batch=batch)
    assert report.verified, report
    words = [entry.by.partition("(")[0] for entry in report.replaced]
    assert (words.count("FusedMLP"), words.count("FusedLinearGeLU")) == (mlps, linears), report
    assert {entry.why for entry in report.left} == ({why} if why else set()), report
    assert list(model.state_dict()) == keys
    untouched.load_state_dict(model.state_dict())
    model.load_state_dict(untouched.state_dict())

    # A training step changes all parameters as it would have.
    for net, its_optimizer in ((model, optimizer), (untouched, torch.optim.SGD(untouched.parameters(), lr=0.01))):
        torch.manual_seed(1)
        loss(net, batch).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    for (parameter, mine), theirs in zip(model.named_parameters(), untouched.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=parameter)

    model.eval(), untouched.eval()
    with torch.no_grad():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(loss(twin, batch), loss(untouched, batch), rtol=1e-3, atol=1e-4)
    report.restore()
    assert repr(model) == text


def loss(model: nn.Module, batch) -> torch.Tensor:
    y = model(**batch) if isinstance(batch, dict) else model(batch)
    y = getattr(y, "logits", getattr(y, "last_hidden_state", y))
    return (y * torch.linspace(-1, 1, y.shape[-1])).mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["timm vit", "gpt2"])
def test_torch_compile_of_the_result(name):
    model, batch = CASES[name][0]()
    model.eval()
    expected = loss(model, batch)
    assert replace_modules(model, impl="native")
    torch.testing.assert_close(loss(torch.compile(model, backend="aot_eager"), batch), expected, rtol=1e-3, atol=1e-5)
