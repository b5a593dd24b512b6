"""Small models in the ways in which people write MLPs, without any library but PyTorch."""

import inspect

import torch
import torch.nn.functional as F
from torch import nn

D, H = 16, 32


class Adapter(nn.Module):
    """As LoRA's: it wraps a linear layer and has its weight and bias."""

    def __init__(self, base):
        super().__init__()
        self.base, self.extra = base, nn.Linear(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base(x) + self.extra(x)


class Mlp(nn.Module):
    """timm's."""

    def __init__(self, act=nn.GELU, drop=0.0, norm=None, linear=nn.Linear):
        super().__init__()
        self.fc1, self.act, self.drop1 = linear(D, H), act(), nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2, self.drop2 = linear(H, D), nn.Dropout(drop)

    def forward(self, x):
        """Docstrings are no statements."""
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


class Conv1D(nn.Module):
    """Hugging Face's linear layer of GPT-2, whose weight is (in, out)."""

    def __init__(self, nx, nf):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * nx**-0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Inline(nn.Module):
    """In the middle of a layer, with functional dropout between, as Whisper has it."""

    def __init__(self):
        super().__init__()
        self.norm, self.activation_fn = nn.LayerNorm(D), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, hidden, scale=1.0, **kwargs):
        residual = hidden
        hidden = self.norm(hidden)
        hidden = self.activation_fn(self.fc1(hidden))
        hidden = F.dropout(hidden, p=0.1, training=self.training)
        hidden = self.fc2(hidden) * scale
        if hidden.dtype == torch.float16:
            hidden = hidden.clamp(-1e4, 1e4)
        return residual + hidden


class OverVariables(nn.Module):
    """Two linear layers with one activation, and a head with an activation of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(D, H), nn.Linear(H, D), nn.GELU("tanh")
        self.dense, self.act2, self.norm = nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D)

    def forward(self, x):
        h = self.a(x)
        h = self.act(h)
        h = h + 1
        y = self.act(self.b(h))
        z = self.dense(y)
        return self.norm(self.act2(z))


class Gated(nn.Module):
    """As T5 v1.1: the result of one linear layer goes into the GELU, that of the other does not."""

    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False), nn.Linear(H, D)
        self.act, self.dropout = NewGELU(), nn.Dropout(0.1)

    def forward(self, x):
        gate = self.act(self.wi_0(x))
        return self.wo(self.dropout(gate * self.wi_1(x)))


class Method(nn.Module):
    """The MLP is a method, whose signature is asked for, and its activation a function in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear1, self.linear2, self.activation = nn.Linear(D, H), nn.Linear(H, D), F.gelu
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        assert list(inspect.signature(self.feed_forward).parameters) == ["x"]
        return self.softmax(x) + self.feed_forward(x)

    def feed_forward(self, x):
        return self.linear2(self.activation(self.linear1(x)))


class FunctionAttribute(nn.Module):
    """BERT's intermediate layer when its activation is given as a function."""

    def __init__(self):
        super().__init__()
        self.dense, self.act_fn = nn.Linear(D, D), F.gelu

    def forward(self, hidden):
        hidden = self.dense(hidden)
        hidden = self.act_fn(hidden)
        return hidden * 2


class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(D, D), nn.GELU()

    def forward(self, x):
        x = self.fc(x)
        return self.act(x)


class Residual(nn.Module):
    """The input's variable stays in use beside those of the MLP."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)

    def forward(self, x):
        h = self.fc1(x)
        a = self.act(h)
        return x + self.fc2(a)


class Repeated(nn.Module):
    """One layer several times."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(D, D), nn.GELU()

    def forward(self, x):
        for _ in range(3):
            x = x + self.act(self.fc(x))
        return x


def sequential(drop=0.1):
    return nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, H), nn.GELU(), nn.Dropout(drop), nn.Linear(H, D), nn.Dropout(drop)
    )


def deep():
    return nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, H), nn.GELU("tanh"), nn.Linear(H, D))


# Name -> how to build it, and what comes of it: FusedMLPs, FusedLinearGeLUs, softmaxes.
REPLACED = {
    "mlp": (Mlp, (1, 0, 0)),
    "dropouts": (lambda: Mlp(drop=0.2), (1, 0, 0)),
    "transposed": (lambda: Mlp(linear=Conv1D, act=NewGELU), (1, 0, 0)),
    "norm between": (lambda: Mlp(norm=nn.LayerNorm(H)), (0, 1, 0)),
    "transposed, norm between": (lambda: Mlp(linear=Conv1D, norm=nn.LayerNorm(H)), (0, 1, 0)),
    "sequential": (sequential, (1, 0, 0)),
    "deep sequential": (deep, (0, 2, 0)),
    "inline": (Inline, (0, 1, 0)),
    "variables": (OverVariables, (0, 3, 0)),
    "gated": (Gated, (0, 1, 0)),
    "returned": (Returned, (0, 1, 0)),
    "residual": (Residual, (0, 1, 0)),
    "repeated": (Repeated, (0, 1, 0)),
    "method": (Method, (1, 0, 1)),
    "function": (FunctionAttribute, (0, 1, 0)),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, H, activation="gelu", batch_first=True), 2, enable_nested_tensor=False
        ),
        (2, 0, 0),
    ),
    "stack": (lambda: nn.Sequential(*[Mlp() for _ in range(3)], nn.Softmax(-1)), (3, 0, 1)),
}
