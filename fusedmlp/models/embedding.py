"""The embedding of a small vocabulary, whose gradient is a matrix product.

`n` tokens, `V` vocabulary, `E` width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Elements of the one-hot rows, which the backward pass holds for a moment: 64 MiB in 16 bits.
_MOST_ELEMENTS = 2**25


class SmallVocabularyEmbedding(nn.Embedding):
    """`nn.Embedding` whose weight gradient, on a GPU, is one product with the tokens' one-hot rows.

    PyTorch's own sorts the tokens first, in some 25 kernels: 113 us for 16,384 of them on an H200, where this one takes
    30 (profiles/records/LOG.md). Where n x V has more than 2^25 elements it is PyTorch's own.

    Args:
        num_embeddings: V.  embedding_dim: E.
    Shape: tokens (...) int64 -> (..., E).
    """

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__(num_embeddings, embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.weight.is_cuda and tokens.numel() * self.num_embeddings <= _MOST_ELEMENTS:
            return _Lookup.apply(self.weight, tokens)
        return super().forward(tokens)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocabulary = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        one_hot = dy.new_zeros((tokens.numel(), ctx.vocabulary)).scatter_(1, tokens.reshape(-1, 1), 1)
        return one_hot.t() @ dy.reshape(-1, dy.shape[-1]), None
