"""The two networks: shapes, causality, sizes that are refused, and that implementations agree on them."""

import pytest
import torch
import torch.nn.functional as F
from conftest import raises

from fusedmlp.models import GPT, MLPLanguageModel
from fusedmlp.models.embedding import SmallVocabularyEmbedding, _Lookup
from fusedmlp.models.vocab import padded

BUILD = {
    "mlp": lambda **options: MLPLanguageModel(64, num_layers=2, context=8, **options),
    "gpt": lambda **options: GPT(32, num_layers=2, num_heads=2, context=8, **options),
}


def losses(model, steps=5):
    """A few steps of AdamW on one random batch."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (4, 9), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:][:, -logits.shape[1] :]
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


@pytest.mark.parametrize("name", BUILD)
def test_implementations_train_alike(impl, name, device):
    if device == "cuda":
        pytest.skip("losses of a GPU run are compared by the training tests")
    torch.manual_seed(0)
    expected = losses(BUILD[name](impl="native"))
    torch.manual_seed(0)
    assert losses(BUILD[name](impl=impl)) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_shapes():
    tokens = torch.randint(0, 256, (3, 8))
    assert BUILD["mlp"]()(tokens).shape == (3, 1, 256)
    assert BUILD["gpt"]()(tokens).shape == (3, 8, 256)
    assert BUILD["gpt"]()(tokens[:, :5]).shape == (3, 5, 256)
    assert BUILD["gpt"](vocab_size=100, pad_vocab_to=64)(tokens % 100).shape == (3, 8, 128)
    assert BUILD["mlp"](vocab_size=100, pad_vocab_to=1)(tokens % 100).shape == (3, 1, 100)


def test_padded_vocabulary():
    assert [padded(50257, 64), padded(50304, 64), padded(50257, 1), padded(1, 64)] == [50304, 50304, 50257, 64]
    with raises(ValueError, "vocab_size=0", "pad_vocab_to=64"):
        padded(0, 64)


@pytest.mark.parametrize("attention", ["softmax", "sdpa"])
def test_gpt_sees_no_later_token(attention):
    model = BUILD["gpt"](attention=attention)
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_both_kinds_of_attention_agree():
    models = [BUILD["gpt"](attention=attention) for attention in ("softmax", "sdpa")]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(0, 256, (2, 8))
    torch.testing.assert_close(models[0](tokens), models[1](tokens))


def test_gpt_ties_its_embeddings():
    model = BUILD["gpt"]()
    assert model.head.weight is model.token_embedding.weight


def test_the_deep_stack_keeps_its_signal():
    """With nn.Linear's own initialisation 64 plain layers of GELU shrink every input to the same constant."""
    model = MLPLanguageModel(128, num_layers=64, context=8)
    x = model.embedding(torch.randint(0, 256, (64, 8))).flatten(1)
    for layer in model.layers:
        x = layer(x)
    assert 1.0 < x.square().mean().sqrt() < 10.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MLPLanguageModel(100, context=16), ["dim=100", "multiple of context=16", "96"]),
        (lambda: MLPLanguageModel(64, num_layers=0), ["num_layers=0", "at least 1"]),
        (lambda: GPT(100, num_heads=3), ["dim=100", "multiple of num_heads=3", "99"]),
        (lambda: GPT(64, num_layers=-1), ["num_layers=-1"]),
        (lambda: GPT(64, attention="flash"), ["attention='flash'", "softmax, sdpa"]),
        (lambda: GPT(64, context=8)(torch.zeros(2, 9, dtype=torch.long)), ["(2, 9)", "at most 8"]),
        (lambda: MLPLanguageModel(64, context=8)(torch.zeros(2, 9, dtype=torch.long)), ["(2, 9)", "context=8"]),
    ],
)
def test_sizes_that_cannot_work_are_named(build, words):
    with raises(ValueError, *words):
        build()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_of_a_small_vocabulary(dtype, monkeypatch):
    """What a GPU runs, on a CPU: the gradient as a product, against the sums in float64."""
    embedding = SmallVocabularyEmbedding(20, 6).to(dtype)
    tokens = torch.randint(0, 20, (5, 40))
    dy = torch.randn(5, 40, 6).to(dtype)
    y = _Lookup.apply(embedding.weight, tokens)
    assert torch.equal(y, embedding(tokens))
    (gradient,) = torch.autograd.grad(y, embedding.weight, dy)
    expected = torch.zeros(20, 6, dtype=torch.double).index_add_(0, tokens.flatten(), dy.flatten(0, 1).double())
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
