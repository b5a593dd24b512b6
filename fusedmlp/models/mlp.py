"""The lecture's MLP, a stack of Linear+GELU, as a byte-level language model over a window of previous bytes.

`B` batch, `T` window length in tokens (context), `D` width (dim), `V` padded vocabulary.
"""

import math

import torch
from torch import Tensor, nn

from fusedmlp.models.embedding import SmallVocabularyEmbedding
from fusedmlp.models.vocab import padded
from fusedmlp.modules import FusedLinearGeLU

# Weights of standard deviation gain / sqrt(D) multiply the activations' variance by gain^2 E[gelu(s z)^2] / s^2,
# z ~ N(0, 1), in each layer (the argument of He et al., arXiv 1502.01852). For GELU that ratio grows with s, from 1/4
# to ReLU's 1/2, so no gain keeps every variance: below s = 1.7 this one lets the signal die out over tens of layers,
# above it lets it grow by at most 5 % a layer. The embeddings start the stack at s = 2.
GELU_GAIN = 1.45
EMBEDDING_STD = 2.0


class MLPLanguageModel(nn.Module):
    """Next-token logits from a window of T tokens: embeddings concatenated to D, `num_layers` x Linear+GELU, logits.

    Args:
        dim: D, width of every layer; a multiple of `context`.
        num_layers: number of Linear+GELU layers.
        context: T, tokens in the window.
        vocab_size: number of tokens; 256 for bytes.
        pad_vocab_to: the vocabulary is padded to a multiple of this; 1 for none.
        approximate, bias, impl: of the layers, see `FusedLinearGeLU`.
    Shape: tokens (B, T) int64 -> logits (B, 1, V), for the token that follows the window.
    Raises: ValueError for a size.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int = 4,
        context: int = 16,
        vocab_size: int = 256,
        pad_vocab_to: int = 64,
        approximate: str = "none",
        bias: bool = True,
        impl: str = "auto",
    ):
        super().__init__()
        if num_layers < 1 or context < 1 or dim < 1:
            raise ValueError(f"dim={dim}, num_layers={num_layers}, context={context}: each must be at least 1")
        if dim % context:
            nearest = max(round(dim / context), 1) * context
            raise ValueError(f"dim={dim} must be a multiple of context={context}, for example {nearest}")
        vocab = padded(vocab_size, pad_vocab_to)
        self.context = context
        self.embedding = SmallVocabularyEmbedding(vocab, dim // context)
        self.layers = nn.ModuleList(
            FusedLinearGeLU(dim, dim, bias=bias, approximate=approximate, impl=impl) for _ in range(num_layers)
        )
        self.head = nn.Linear(dim, vocab)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.modules():
            if isinstance(layer, FusedLinearGeLU):
                nn.init.normal_(layer.weight, std=GELU_GAIN / math.sqrt(layer.in_features))
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        # The first loss is that of the uniform distribution, whatever the depth has done to the signal.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2 or tokens.shape[1] != self.context:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; accepted: (batch, context={self.context})")
        x = self.embedding(tokens).flatten(1)  # (B, D)
        for layer in self.layers:
            x = layer(x)
        return torch.unsqueeze(self.head(x), 1)  # (B, 1, V)

    def flops_per_sample(self) -> int:
        """FLOPs of the matrix products of one training step on one window, whatever the implementation.

        Forward: 2 D^2 for each of the L layers and 2 D V for the head. The backward pass has two products of the same
        size for each of them, for dx (the first layer's too, since the embedding is trained) and for dweight: 3 times
        the forward pass in all. Embeddings, biases, GELUs and the loss are not counted.
        """
        vocab, D = self.head.weight.shape
        forward = 2 * len(self.layers) * D**2 + 2 * D * vocab
        return 3 * forward
