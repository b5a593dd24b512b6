"""What the consumers of `gemm_hopper.py` do with a finished tile: GELU, its derivative, sums of columns.

With the instructions that Hopper has for the mathematics of `kernels/gelu.py`, accurate to 16-bit outputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _tanh(x):
    # Absolute error 5e-4: an eighth of the rounding of bf16, so for 16-bit outputs only.
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _density_and_tail(x):
    """Normal density at x and distribution function at -|x|: Abramowitz and Stegun 26.2.17, absolute error 8e-8."""
    t = _reciprocal(1.0 + 0.2316419 * gl.abs(x))
    density = _exp2(x * x * -0.7213475204444817) * 0.3989422804014327
    poly = 0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    return density, density * (t * poly)


@gluon.jit
def gelu(x, APPROXIMATE: gl.constexpr):
    """gelu(x) for fp32 x, accurate to 16-bit outputs."""
    if APPROXIMATE == "tanh":
        half = 0.5 * x
        return half + half * _tanh(x * (0.7978845608028654 + 0.035677408136300125 * (x * x)))
    else:
        _density, tail = _density_and_tail(x)
        return gl.maximum(x, 0.0) - gl.abs(x) * tail


@gluon.jit
def _gelu_and_grad(x, APPROXIMATE: gl.constexpr):
    """(gelu(x), d gelu / dx) for fp32 x, accurate to 16-bit outputs."""
    if APPROXIMATE == "tanh":
        square = x * x
        t = _tanh(x * (0.7978845608028654 + 0.035677408136300125 * square))
        gate = 0.5 + 0.5 * t
        slope = (1.0 - t * t) * (0.3989422804014327 + 0.05351611222045019 * square)
    else:
        slope, tail = _density_and_tail(x)
        gate = gl.where(x > 0, 1.0 - tail, tail)
    return x * gate, gate + x * slope


@gluon.jit
def within(offs_n, N):
    """offs_n < N, where N is a multiple of 8 and eight neighbours agree."""
    return offs_n // 8 < N // 8


@gluon.jit
def column_halves(x, layout: gl.constexpr):
    """Left and right half of the columns of x, both in `layout`: registers are renamed, nothing moves."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _row_halves(x):
    """Upper and lower half of the rows of x, in the layout of x: registers are renamed, nothing moves."""
    layout: gl.constexpr = x.type.layout
    upper, lower = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()
    return gl.convert_layout(upper, layout, assert_trivial=True), gl.convert_layout(lower, layout, assert_trivial=True)


@gluon.jit
def dgelu(product, smem, APPROXIMATE: gl.constexpr, PUT: gl.constexpr):
    """Put PUT, "dpreact", "act" or "product", where the preact was, in `smem`; returns dpreact."""
    act, grad = _gelu_and_grad(smem.load(product.type.layout).to(gl.float32), APPROXIMATE)
    dpreact = (product * grad).to(smem.dtype)
    if PUT == "act":
        smem.store(act.to(smem.dtype))
    elif PUT == "product":
        smem.store(product.to(smem.dtype))
    else:
        smem.store(dpreact)
    return dpreact


@gluon.jit
def dgelu_by_halves(product, smem, APPROXIMATE: gl.constexpr, PUT: gl.constexpr):
    """`dgelu` in two steps, which take fewer registers; returns the halves of dpreact."""
    ROWS: gl.constexpr = smem.shape[0] // 2
    upper, lower = _row_halves(product)
    upper = dgelu(upper, smem.slice(0, ROWS, dim=0), APPROXIMATE, PUT)
    return upper, dgelu(lower, smem.slice(ROWS, ROWS, dim=0), APPROXIMATE, PUT)


@gluon.jit
def store_rows(smem, upper, lower):
    ROWS: gl.constexpr = smem.shape[0] // 2
    smem.slice(0, ROWS, dim=0).store(upper)
    smem.slice(ROWS, ROWS, dim=0).store(lower)


@gluon.jit
def column_sums(smem, sums_ptr, first_m, first_n, M, N):
    """Write the sums of the columns of a tile in `smem`.

    It is read again, in a layout where a thread holds many rows of few columns: summing the products' own layout takes
    three times the instructions, for shuffles between threads.
    """
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    PASS: gl.constexpr = 4 * (256 // COLUMNS)
    STRIP: gl.constexpr = 2 * PASS
    sums = gl.zeros((PASS, COLUMNS), gl.float32, layout)
    offs_m = gl.expand_dims(first_m + gl.arange(0, STRIP, gl.SliceLayout(1, layout)), 1)
    for r in gl.static_range(0, ROWS, STRIP):
        strip = smem.slice(r, STRIP, dim=0).load(layout).to(gl.float32)
        # A row beyond M is zero times b, which is NaN where b is not finite.
        strip = gl.where(offs_m + r < M, strip, 0.0).reshape([STRIP // PASS, PASS, COLUMNS])
        sums += gl.convert_layout(gl.sum(strip, axis=0), layout, assert_trivial=True)
    offs_n = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(sums_ptr + offs_n, gl.sum(sums, axis=0), mask=within(offs_n, N))
