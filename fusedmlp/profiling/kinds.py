"""What a GPU kernel does, by its name: those of ATen, cuBLAS, cuDNN, CUTLASS, Inductor and of this project."""

import functools
import re

GEMM, FUSED_GEMM = "GEMM", "GEMM+GELU"
GELU, SOFTMAX, ATTENTION, NORM = "GELU", "softmax", "attention", "normalisation"
REDUCTION, LOSS, OPTIMIZER, COPY, OTHER = "reduction", "loss", "optimizer", "copy", "other"
INDEXING = "indexing"  # embeddings and what their gradient sorts, gathers, scatters
COMMUNICATION = "communication"

KINDS = (
    GEMM, FUSED_GEMM, ATTENTION, GELU, SOFTMAX, NORM, REDUCTION, LOSS, OPTIMIZER, INDEXING, COPY, COMMUNICATION, OTHER
)  # fmt: skip
# Bound by arithmetic; all others but communication by memory traffic.
COMPUTE = frozenset((GEMM, FUSED_GEMM, ATTENTION))
# What a kernel that only moves data could be merged into another of; the optimizer is fused already or asks to be.
FUSIBLE = (GELU, SOFTMAX, NORM, REDUCTION, LOSS, INDEXING, COPY, OTHER)

# The first that is found in the name wins.
_PATTERNS = {
    COMMUNICATION: r"(?i)nccl|all_?reduce|all_?gather|reduce_?scatter",
    OPTIMIZER: r"multi_tensor_apply|lpnorm_cleanup|_square_sums_kernel|_clip_kernel|(?i:fused_?adam|adamw)",
    ATTENTION: r"(?i)flash|fmha|sdpa|attention",
    LOSS: r"(?i)log_?softmax|nll_?loss|cross_?entropy",
    # Ours: the product and the GELU, or its gradient, in one kernel.
    FUSED_GEMM: r"_linear_gelu_fwd_kernel|_dgelu_kernel|_stack_bwd_kernel"
    r"|(?i:gemm\w*gelu|triton_tem\w*(gelu|erf|tanh))",
    SOFTMAX: r"(?i)softmax",
    GEMM: r"(?i)nvjet|gemm|gemv|cutlass|xmma|splitk_?reduce|cublas|triton_tem|_mm_kernel"
    r"|scudnn|winograd|cudnn.*conv|[dw]grad|fprop",
    GELU: r"(?i)gelu",
    NORM: r"(?i)(layer|rms|batch|group)_?norm|RowwiseMoments|GammaBeta|cudnn::bn_",
    INDEXING: r"(?i)embedding|compute_grad_weight|krn_partial|partial_segment|radix_?sort|unique_?by_?key"
    r"|compact_?init|indexing_|vectorized_gather|index_?(select|put|add|func)|index_elementwise|scatter_gather|gather_kernel",
    REDUCTION: r"reduce_kernel|_column_sum|strip_sums|add_strips|DeviceReduce|SegmentedReduce|DeviceScan",
    COPY: r"(?i)copy|memcpy|memset|transpose|nchwToNhwc|nhwcToNchw",
}
_NAMES = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS.items())

# Ours with programmatic dependent launch (kernels/pdl.py): on the GPU before the kernel in front of them has ended.
_EARLY = re.compile(
    r"_(hopper_)?(linear_gelu_fwd|dgelu|stack_bwd|column_sum|dgelu_dbias|gelu_fwd|gelu_bwd|square_sums|clip|adamw)_kernel"
)

_ONLY_MOVES = {"", "to", "copy", "clone", "view", "permute", "transpose", "cat", "slice", "constant", "pad", "nd"}


@functools.cache
def kind_of(name: str) -> str:
    """The kind of a kernel, copy or memset."""
    generated = re.match(r"triton_(poi|red|per)_fused_?(.*?)_?\d*$", name)
    if generated:
        return _generated(generated.group(1), generated.group(2))
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), OTHER)


@functools.cache
def launched_early(name: str) -> bool:
    """Whether a kernel of this name may be on the GPU, waiting, while the one before it on its stream still runs."""
    return _EARLY.fullmatch(name) is not None


def _generated(sort: str, fused: str) -> str:
    """Kind of a kernel of Inductor's from the operations that its name lists: pointwise (poi) or with a reduction."""
    operations = set(fused.split("_"))
    for kind, pattern in _NAMES:
        if kind in (OPTIMIZER, LOSS, SOFTMAX, GELU, NORM, INDEXING) and pattern.search(fused):
            return kind
    # The gradient of erf is an exponential of a square.
    if operations & {"erf", "tanh"} or {"exp", "pow"} <= operations:
        return GELU
    if "exp" in operations or "amax" in operations:
        return SOFTMAX
    if sort != "poi":
        return REDUCTION
    return COPY if operations <= _ONLY_MOVES else OTHER


_NOISE = {"gpu_kernel_impl", "gpu_kernel_impl_nocast", "ReduceOp", "func_wrapper_t", "opmath_gpu_kernel_with_scalars"}
_TELLING = re.compile(r"\w*(?:[Ff]unctor|KernelImpl|kernel_impl|_kernel_cuda|_cuda_kernel|Ops)\w*")
_WRAPPERS = {"Kernel", "Kernel2", "device_kernel"}


@functools.cache
def short_name(name: str) -> str:
    """A kernel's name without namespaces, types and arguments: "vectorized_elementwise_kernel [GeluCUDAKernelImpl]"."""
    plain = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "").removeprefix("void ")
    head, _, template = plain.partition("<")
    if "(" in head:
        head, template = head.partition("(")[0], ""
    base = head.rpartition("::")[2].strip()
    if base in _WRAPPERS and template:
        return re.split(r"[<>(, ]", template, maxsplit=1)[0].rpartition("::")[2]
    if name.startswith("Memset"):
        return "Memset"  # eager says of what memory, a graph does not know it
    if name.startswith("Memcpy"):
        return plain
    telling = [word for word in dict.fromkeys(_TELLING.findall(template)) if word not in _NOISE and word != base]
    return f"{base} [{', '.join(telling[:2])}]" if telling else base or name
