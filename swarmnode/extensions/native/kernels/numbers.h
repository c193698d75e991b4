/* Numbers as kernels.c computes with them. Plain C that compilers turn into vector instructions. */

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float from_bf16(uint16_t x)
{
    return from_bits((uint32_t)x << 16);
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t to_bf16(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* a b + c in one rounding, where that is an instruction. Elsewhere the products here are exact enough. */
static inline float fused(float a, float b, float c)
{
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* e^x to 2 units in the last place: 2^n e^r with |r| <= ln(2) / 2, and a polynomial for e^r (Cephes, expf).
 * Below -87 it is 2e-38 and not less, above 87 it is 6e37 and not more. */
static inline float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float n = rintf(x * 1.44269504088896341f);
    const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    return (sum * r * r + r + 1.0f) * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

/* log(1 - u) for 0 <= u < 1, to 2 units in the last place: 1 - u = 2^n m with m from sqrt(1/2) to sqrt(2),
 * and a polynomial for log(m) (Cephes, logf). Small u do not go through 1 - u: it would round them away. */
static inline float log_of_rest(float u)
{
    const uint32_t bits = bits_of(1.0f - u);
    const int32_t n = (int32_t)(bits - 0x3f3504f3u) >> 23;
    const float m = from_bits(bits - ((uint32_t)n << 23));
    const float f = n == 0 ? -u : m - 1.0f;
    float sum = 7.0376836292e-2f;
    sum = sum * f - 1.1514610310e-1f;
    sum = sum * f + 1.1676998740e-1f;
    sum = sum * f - 1.2420140846e-1f;
    sum = sum * f + 1.4249322787e-1f;
    sum = sum * f - 1.6668057665e-1f;
    sum = sum * f + 2.0000714765e-1f;
    sum = sum * f - 2.4999993993e-1f;
    sum = sum * f + 3.3333331174e-1f;
    return f + (f * f * (sum * f - 0.5f) + (float)n * 0.69314718056f);
}

/* Integers in the order of the numbers: compilers turn their maximum into vector instructions, which that of
 * numbers among which there may be a NaN is not. */
static inline int32_t rank_of(float x)
{
    const int32_t bits = (int32_t)bits_of(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline float of_rank(int32_t rank)
{
    return from_bits((uint32_t)(rank ^ ((rank >> 31) & 0x7fffffff)));
}

/* 1 / x of a positive x from 1e-37 to 1e38, to 2 units in the last place: a guess from the exponent, and Newton's steps. A
 * division takes several times as long. */
static inline float reciprocal_of(float x)
{
    float y = from_bits(0x7ef311c7u - bits_of(x));
    y *= 2.0f - x * y;
    y *= 2.0f - x * y;
    return y * (2.0f - x * y);
}

/* tanh(x) to 3 units in the last place: a polynomial near 0, where 1 - 2 / (e^2x + 1) would lose digits (Cephes,
 * tanhf). */
static inline float tanh_of(float x)
{
    const float size = x < 0.0f ? -x : x;
    const float square = x * x;
    float near = -5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    const float far = 1.0f - 2.0f * reciprocal_of(exp_of(2.0f * size) + 1.0f);
    return size < 0.625f ? near : x < 0.0f ? -far : far;
}
