"""ViT-S/16 and GPT-2 small in plain PyTorch, in the structure of timm's and Hugging Face's, for machines without those.

Same layers, sizes, names of the MLPs' children, dropouts, activations and attention (PyTorch's fused one, which both
libraries use).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention, x (B, T, D) -> (B, T, D); `linear` builds its two projections."""

    def __init__(self, dim: int, num_heads: int, causal: bool, linear=nn.Linear):
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv, self.proj = linear(dim, 3 * dim), linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    """timm's `Mlp`."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2, self.drop2 = nn.Linear(hidden, dim), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


class Conv1D(nn.Module):
    """Hugging Face's linear layer of GPT-2, whose weight is (in, out)."""

    def __init__(self, nx: int, nf: int):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class NewGELU(nn.Module):
    """GPT-2's GELU (tanh), written out in elementary operations, as Hugging Face has it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2MLP(nn.Module):
    """Hugging Face's `GPT2MLP`."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(dim, hidden), Conv1D(hidden, dim)
        self.act, self.dropout = NewGELU(), nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.c_fc(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.c_proj(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module, eps: float):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=eps), attention
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=eps), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """ViT-S/16: pictures (B, 3, 224, 224) -> logits (B, classes)."""

    def __init__(self, dim: int = 384, depth: int = 12, num_heads: int = 6, image: int = 224, num_classes: int = 1000):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 16, 16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (image // 16) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, num_heads, False), Mlp(dim, 4 * dim), 1e-6) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)  # (B, T, D)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class GPT2(nn.Module):
    """GPT-2 small: tokens (B, T) -> logits (B, T, V), tied embeddings."""

    def __init__(
        self, dim: int = 768, depth: int = 12, num_heads: int = 12, context: int = 1024, vocab_size: int = 50257
    ):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(context, dim)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, num_heads, True, Conv1D), GPT2MLP(dim, 4 * dim), 1e-5) for _ in range(depth)
        )
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))
