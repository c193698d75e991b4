/* A vector of float32 numbers as wide as the registers of this CPU, for the loops that compilers do not keep
 * in registers by themselves. GCC and clang understand it on any CPU. */

#if defined(__AVX512F__)
#define AT_ONCE 16
#elif defined(__AVX__)
#define AT_ONCE 8
#else
#define AT_ONCE 4
#endif

typedef float floats __attribute__((vector_size(4 * AT_ONCE)));
typedef uint32_t bits_at_once __attribute__((vector_size(4 * AT_ONCE)));
typedef float four __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

/* Numbers that LOAD_PAIR reads, as two vectors. */
#define PAIR (2 * AT_ONCE)

INLINE floats load(const float *x)
{
    floats loaded;
    memcpy(&loaded, x, sizeof loaded);
    return loaded;
}

INLINE void load_pair_f32(const float *x, floats *first, floats *second)
{
    *first = load(x);
    *second = load(x + AT_ONCE);
}

/* The even ones and the odd ones: two instructions, where neighbours would have to be moved apart. */
INLINE void load_pair_bf16(const uint16_t *x, floats *even, floats *odd)
{
    bits_at_once bits;
    memcpy(&bits, x, sizeof bits);
    *even = (floats)(bits << 16);
    *odd = (floats)(bits & 0xffff0000u);
}

#define LOAD_PAIR(x, first, second) \
    _Generic((x), const float *: load_pair_f32, const uint16_t *: load_pair_bf16)(x, first, second)

/* Back to where they were read. */
INLINE void store_pair_f32(floats first, floats second, float *x)
{
    memcpy(x, &first, sizeof first);
    memcpy(x + AT_ONCE, &second, sizeof second);
}

INLINE void store_pair_bf16(floats even, floats odd, uint16_t *x)
{
    uint32_t both[AT_ONCE];
#pragma GCC unroll 1
    for (int i = 0; i < AT_ONCE; ++i)
        both[i] = to_bf16(even[i]) | (uint32_t)to_bf16(odd[i]) << 16;
    memcpy(x, both, sizeof both);
}

#define STORE_PAIR(first, second, x) \
    _Generic((x), float *: store_pair_f32, uint16_t *: store_pair_bf16)(first, second, x)

/* PAIR numbers to the order in which LOAD_PAIR has those that lie as `like` does. */
INLINE void order_f32(const float *restrict x, float *restrict y)
{
    memcpy(y, x, PAIR * sizeof *x);
}

INLINE void order_bf16(const float *restrict x, float *restrict y)
{
#pragma GCC unroll 1
    for (int i = 0; i < AT_ONCE; ++i) {
        y[i] = x[2 * i];
        y[i + AT_ONCE] = x[2 * i + 1];
    }
}

#define ORDER_PAIR(like, x, y) _Generic((like), const float *: order_f32, const uint16_t *: order_bf16)(x, y)

/* Four sums of a quarter of the numbers each: the whole sum takes as many steps again, and those are cheaper
 * for many at a time. */
INLINE void quarters_of(floats x, float *sums)
{
    union {
        floats all;
        four some[AT_ONCE / 4];
    } parts = {x};
    four sum = parts.some[0];
    for (int i = 1; i < AT_ONCE / 4; ++i)
        sum += parts.some[i];
    memcpy(sums, &sum, sizeof sum);
}

/* Ask for `bytes` from `start` on to be in the cache soon. Each head's keys lie apart, and so do its values:
 * what the CPU fetches ahead by itself comes too late for so short stretches. */
INLINE void fetch(const void *start, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)start + i, 0, 3);
}
