/* Heads of a token, each normed (where there is a scale) and rotated by its position. x and y
 * [tokens, heads, size]; of x a token lies `stride` numbers behind the one before. cos and sin [tokens, size],
 * scale [size] or null. Dimension i turns together with i + size / 2, as in transformers. */

void NAME(rotate_heads)(
    const REAL *restrict x, int64_t stride, const float *restrict scale, float eps, const REAL *restrict cos,
    const REAL *restrict sin, REAL *restrict y, int64_t tokens, int64_t heads, int64_t size)
{
    const int64_t half = size / 2;
    for (int64_t token = 0; token < tokens; ++token) {
        const REAL *const c = cos + token * size, *const s = sin + token * size;
        for (int64_t head = 0; head < heads; ++head) {
            const REAL *const from = x + token * stride + head * size;
            REAL *const to = y + (token * heads + head) * size;
            float per_rms = 1.0f;
            if (scale) {
                float squares = 0;
                for (int64_t i = 0; i < size; ++i)
                    squares += GET(from[i]) * GET(from[i]);
                per_rms = 1.0f / sqrtf(squares / (float)size + eps);
            }
            for (int64_t i = 0; i < half; ++i) {
                const float a = GET(from[i]) * per_rms * (scale ? scale[i] : 1.0f);
                const float b = GET(from[i + half]) * per_rms * (scale ? scale[i + half] : 1.0f);
                to[i] = PUT(a * GET(c[i]) - b * GET(s[i]));
                to[i + half] = PUT(b * GET(c[i + half]) + a * GET(s[i + half]));
            }
        }
    }
}

/* dx of the above from dy; both contiguous, x as above. */
void NAME(rotate_heads_gradient)(
    const REAL *restrict dy, const REAL *restrict x, int64_t stride, const float *restrict scale, float eps,
    const REAL *restrict cos, const REAL *restrict sin, REAL *restrict dx, int64_t tokens, int64_t heads,
    int64_t size)
{
    const int64_t half = size / 2;
    for (int64_t token = 0; token < tokens; ++token) {
        const REAL *const c = cos + token * size, *const s = sin + token * size;
        for (int64_t head = 0; head < heads; ++head) {
            const REAL *const from = x + token * stride + head * size;
            const REAL *const d = dy + (token * heads + head) * size;
            REAL *const to = dx + (token * heads + head) * size;
            float squares = 0, sum = 0;
            if (scale)
                for (int64_t i = 0; i < half; ++i) {
                    const float a = GET(from[i]), b = GET(from[i + half]);
                    const float da = GET(d[i]) * GET(c[i]) + GET(d[i + half]) * GET(s[i + half]);
                    const float db = GET(d[i + half]) * GET(c[i + half]) - GET(d[i]) * GET(s[i]);
                    squares += a * a + b * b;
                    sum += a * da * scale[i] + b * db * scale[i + half];
                }
            /* With xhat = x / rms: (dxhat - xhat mean(dxhat xhat)) / rms. Without a norm both are neutral. */
            const float per_rms = scale ? 1.0f / sqrtf(squares / (float)size + eps) : 1.0f;
            const float mean = sum / (float)size * per_rms * per_rms;
            for (int64_t i = 0; i < half; ++i) {
                const float da = GET(d[i]) * GET(c[i]) + GET(d[i + half]) * GET(s[i + half]);
                const float db = GET(d[i + half]) * GET(c[i + half]) - GET(d[i]) * GET(s[i]);
                const float of_a = scale ? da * scale[i] : da, of_b = scale ? db * scale[i + half] : db;
                to[i] = PUT((of_a - GET(from[i]) * mean) * per_rms);
                to[i + half] = PUT((of_b - GET(from[i + half]) * mean) * per_rms);
            }
        }
    }
}
