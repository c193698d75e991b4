/* The gated activation of an MLP: active = silu(gate) up, silu(g) = g / (1 + e^-g), or the same with GELU. */

/* gate and up have rows of `width` numbers that lie `stride` apart; active is contiguous. */
void NAME(silu_mul)(
    const REAL *restrict gate, const REAL *restrict up, int64_t stride, REAL *restrict active, int64_t rows,
    int64_t width)
{
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *const g = gate + row * stride, *const u = up + row * stride;
        for (int64_t i = 0; i < width; ++i) {
            const float x = GET(g[i]);
            active[row * width + i] = PUT(x * reciprocal_of(1.0f + exp_of(-x)) * GET(u[i]));
        }
    }
}

/* gelu(g) = g / 2 (1 + tanh(t)) = g / (1 + e^-2t), t = sqrt(2 / pi) (g + 0.044715 g^3). */
void NAME(gelu_tanh_mul)(
    const REAL *restrict gate, const REAL *restrict up, int64_t stride, REAL *restrict active, int64_t rows,
    int64_t width)
{
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *const g = gate + row * stride, *const u = up + row * stride;
        for (int64_t i = 0; i < width; ++i) {
            const float x = GET(g[i]), twice = 1.59576912160573f * x * (1.0f + 0.044715f * x * x);
            active[row * width + i] = PUT(x * reciprocal_of(1.0f + exp_of(-twice)) * GET(u[i]));
        }
    }
}

/* The gradients of gate and up from that of active, and active once more; `count` numbers each. dup may be the
 * memory of dactive. */
void NAME(silu_mul_gradient)(
    const REAL *restrict gate, const REAL *restrict up, const REAL *dactive, REAL *restrict active,
    REAL *restrict dgate, REAL *dup, int64_t count)
{
    /* Nothing is read after it was written, as far as vectors go. */
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
        const float x = GET(gate[i]), e = exp_of(-x), share = reciprocal_of(1.0f + e), silu = x * share;
        const float u = GET(up[i]), d = GET(dactive[i]);
        active[i] = PUT(silu * u);
        /* e share is 1 - share, which would be rounded. */
        dgate[i] = PUT(d * u * (share + silu * (e * share)));
        dup[i] = PUT(d * silu);
    }
}
