"""A GPT-2-like transformer: pre-norm blocks with `FusedMLP`, tied embeddings, attention through the softmax op or SDPA.

`B` batch, `T` sequence length, `D` width (dim), `H` heads, `V` padded vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmlp import functional
from fusedmlp.models.vocab import padded
from fusedmlp.modules import FusedMLP

ATTENTION = ("softmax", "sdpa")


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what precedes it.

    Args:
        dim, num_heads: D and H.
        attention: "softmax" materialises the (T, T) scores and calls the softmax op, so that `impl` decides; "sdpa" is
            PyTorch's fused `scaled_dot_product_attention`.
        bias: of both projections.
        impl: of the softmax op.
    Shape: x (B, T, D) -> (B, T, D).
    """

    def __init__(self, dim: int, num_heads: int, attention: str, bias: bool, impl: str):
        super().__init__()
        self.num_heads, self.attention, self.impl = num_heads, attention, impl
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            self.qkv(x).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        )  # (B, H, T, D/H)
        if self.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q, k, v = (part.reshape(-1, T, part.shape[-1]) for part in (q, k, v))  # (B H, T, D/H)
            # The product adds to the mask: filling the scores would take a pass over them, and another one backward,
            # though the gradient of what the softmax has made 0 is 0.
            mask = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
            scores = torch.baddbmm(mask.expand(len(q), T, T), q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
            y = (functional.softmax(scores, -1, impl=self.impl) @ v).view(B, self.num_heads, T, -1)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, num_heads: int, attention: str, approximate: str, bias: bool, impl: str):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attention = CausalSelfAttention(dim, num_heads, attention, bias, impl)
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        self.mlp = FusedMLP(dim, bias=bias, approximate=approximate, impl=impl)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only transformer (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    Args:
        dim: D, width; a multiple of `num_heads`.
        num_layers, num_heads: blocks, and attention heads H in each.
        context: T, longest sequence in tokens.
        vocab_size: number of tokens; 256 for bytes.
        pad_vocab_to: the vocabulary is padded to a multiple of this; 1 for none.
        attention: "softmax" (the softmax op, so that `impl` decides) or "sdpa".
        approximate, bias, impl: see `FusedMLP`; `impl` also names the softmax op's implementation.
    Shape: tokens (B, T) int64 -> logits (B, T, V), at each position for the token that follows.
    Raises: ValueError for a size or an unknown `attention`.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int = 4,
        num_heads: int = 4,
        context: int = 128,
        vocab_size: int = 256,
        pad_vocab_to: int = 64,
        attention: str = "softmax",
        approximate: str = "tanh",
        bias: bool = True,
        impl: str = "auto",
    ):
        super().__init__()
        if min(dim, num_layers, num_heads, context) < 1:
            raise ValueError(
                f"dim={dim}, num_layers={num_layers}, num_heads={num_heads}, context={context}: each must be at least 1"
            )
        if dim % num_heads:
            nearest = max(round(dim / num_heads), 1) * num_heads
            raise ValueError(f"dim={dim} must be a multiple of num_heads={num_heads}, for example {nearest}")
        if attention not in ATTENTION:
            raise ValueError(f"attention={attention!r} is unknown; accepted: {', '.join(ATTENTION)}")
        vocab = padded(vocab_size, pad_vocab_to)
        self.context = context
        self.token_embedding = nn.Embedding(vocab, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, attention, approximate, bias, impl) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim, bias=bias)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's: normal with standard deviation 0.02, and 1/sqrt(2 * num_layers) of that into the residual stream."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Block):
                for projection in (module.attention.proj, module.mlp.fc2):
                    nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * len(self.blocks)))

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.context:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; accepted: (batch, at most {self.context})")
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, V)

    def flops_per_sample(self) -> int:
        """FLOPs of the matrix products of one training step on one sequence of T = `context` tokens.

        Forward: in each of the L blocks 24 T D^2 (qkv 6, proj 2, MLP 16) and 4 T^2 D (scores 2, weighted sum 2), and
        2 T D V for the head. The backward pass has two products of the same size for each of them, for both factors:
        3 times the forward pass in all.

        The number is the same for both kinds of attention and every implementation: scores count in full though the
        mask hides half of them and a fused kernel may leave that half out, and the scores that a fused kernel computes
        once more in its backward pass (2 T^2 D) do not count. Nor do embeddings, norms, biases, GELUs, the softmax and
        the loss.
        """
        T, (vocab, D) = self.context, self.head.weight.shape
        forward = len(self.blocks) * (24 * T * D**2 + 4 * T**2 * D) + 2 * T * D * vocab
        return 3 * forward
