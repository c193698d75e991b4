/* Root-mean-square norms: xhat = x / sqrt(mean(x^2) + eps), y = xhat scale. x, xhat, y [rows, width], scale
 * [width], rstd [rows] = 1 / sqrt(mean(x^2) + eps). */

/* xhat and y may be null, and rstd; y needs a scale. */
void NAME(rms_norm)(
    const REAL *restrict x, const float *restrict scale, float eps, REAL *restrict xhat, REAL *restrict y,
    float *restrict rstd, int64_t rows, int64_t width)
{
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *const from = x + row * width;
        float squares = 0;
        for (int64_t i = 0; i < width; ++i)
            squares += GET(from[i]) * GET(from[i]);
        const float per_rms = 1.0f / sqrtf(squares / (float)width + eps);
        if (rstd)
            rstd[row] = per_rms;
        if (xhat)
            for (int64_t i = 0; i < width; ++i)
                xhat[row * width + i] = PUT(GET(from[i]) * per_rms);
        if (y)
            for (int64_t i = 0; i < width; ++i)
                y[row * width + i] = PUT(GET(from[i]) * per_rms * scale[i]);
    }
}

/* dx of y = xhat scale from dy, plus `more`: (dy scale - xhat mean(dy scale xhat)) rstd + more. scale and more
 * may be null. */
void NAME(rms_norm_gradient)(
    const REAL *restrict dy, const REAL *restrict xhat, const float *restrict rstd, const float *restrict scale,
    const REAL *restrict more, REAL *restrict dx, int64_t rows, int64_t width)
{
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *const d = dy + row * width, *const x = xhat + row * width;
        float sum = 0;
        if (scale)
            for (int64_t i = 0; i < width; ++i)
                sum += GET(d[i]) * scale[i] * GET(x[i]);
        else
            for (int64_t i = 0; i < width; ++i)
                sum += GET(d[i]) * GET(x[i]);
        const float mean = sum / (float)width, per_rms = rstd[row];
        for (int64_t i = 0; i < width; ++i) {
            const float dxhat = scale ? GET(d[i]) * scale[i] : GET(d[i]);
            const float own = (dxhat - GET(x[i]) * mean) * per_rms;
            dx[row * width + i] = PUT(more ? own + GET(more[row * width + i]) : own);
        }
    }
}
