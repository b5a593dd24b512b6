"""The ops of the models that train.py trains, with their sizes, for advice without building the model."""

from collections.abc import Callable
from dataclasses import dataclass

from fusedmlp.bench.cases import Case
from fusedmlp.errors import UserError


@dataclass(frozen=True)
class ModelOp:
    """One op of a model: an op with implementations (`case`), or a linear layer by itself (`product`: M, K, N)."""

    name: str
    count: int
    case: Case | None = None
    product: tuple[int, int, int] | None = None

    def sizes(self) -> str:
        if self.case is not None:
            return str(self.case)
        return "linear " + "x".join(map(str, self.product or ()))

    def dims(self) -> dict[str, int]:
        """What can be padded: features and widths, by name; rows are the data's."""
        if self.product is not None:
            _, K, N = self.product
            return {"in_features": K, "vocabulary" if self.name == "head" else "out_features": N}
        assert self.case is not None
        _, K, N, N2 = self.case.sizes()
        named = {"in_features": K, "hidden features": N, "out_features": N2} if K else {"width": N}
        return {name: size for name, size in named.items() if size}


Sizes = dict[str, int]


@dataclass(frozen=True)
class Model:
    """A model's sizes with their defaults, and its ops for given ones."""

    defaults: Sizes
    ops: Callable[[Sizes, str, str], list[ModelOp]]


def _gpt(sizes: Sizes, dtype: str, approximate: str) -> list[ModelOp]:
    D, T, H, L = sizes["dim"], sizes["context"], sizes["heads"], sizes["layers"]
    tokens = sizes["batch"] * T
    return [
        ModelOp("qkv", L, product=(tokens, D, 3 * D)),
        ModelOp("attention softmax", L, case=Case("softmax", (sizes["batch"] * H * T, T), dtype)),
        ModelOp("attention projection", L, product=(tokens, D, D)),
        ModelOp("mlp", L, case=Case("mlp", (tokens, D, 4 * D, D), dtype, approximate)),
        ModelOp("head", 1, product=(tokens, D, sizes["vocab"])),
    ]


def _mlp(sizes: Sizes, dtype: str, approximate: str) -> list[ModelOp]:
    rows, D = sizes["batch"], sizes["dim"]
    return [
        ModelOp("linear_gelu", sizes["layers"], case=Case("linear_gelu", (rows, D, D), dtype, approximate)),
        ModelOp("head", 1, product=(rows, D, sizes["vocab"])),
    ]


MODELS = {
    "gpt": Model({"dim": 768, "batch": 16, "layers": 12, "context": 1024, "heads": 12, "vocab": 50304}, _gpt),
    "mlp": Model({"dim": 2048, "batch": 1024, "layers": 64, "vocab": 256}, _mlp),
}


def check_sizes(model: str, sizes: Sizes) -> Sizes:
    """The model's sizes, `sizes` over its defaults. Raises: UserError for a size that it has not, or below 1.

    Heads that are not given are 64 wide where that fits, as GPT-2's are.
    """
    defaults = MODELS[model].defaults
    for name, value in sizes.items():
        if name not in defaults:
            raise UserError(f"model {model} has no size {name!r}; accepted: {', '.join(defaults)}")
        if not 1 <= value < 2**31:
            raise UserError(f"{name}={value}: expected an integer from 1 to {2**31 - 1}")
    given = defaults | sizes
    if "heads" in given and "heads" not in sizes and given["dim"] % 64 == 0:
        given["heads"] = given["dim"] // 64
    if "heads" in given and given["dim"] % given["heads"]:
        raise UserError(f"dim={given['dim']} must be a multiple of heads={given['heads']}")
    return given
