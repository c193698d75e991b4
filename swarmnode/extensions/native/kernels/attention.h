/* Attention of new tokens, from the product with the fused matrix of queries, keys and values (weights.py of
 * rollout/decode): fused [tokens, kv_heads, group + 2, size], per key head its queries, its key, its value.
 *
 * Queries and keys are normed where there is a scale [group + 1, size], and rotated: rotation [.., size] has
 * the cosine and sine for each pair of neighbours. All arithmetic is in float32; keys and values have been
 * rounded to the type they are stored in, queries and shares have not. */

/* Pairs of vectors that the values of one query are summed up in at a time. */
#define BLOCK 2
/* Queries that share each key and value that is read. */
#define TOGETHER 2
/* Scores that are finished together. */
#define COLUMNS 16

/* y = factor rotated(x / rms scale) */
INLINE void NAME(turn)(
    const REAL *restrict x, const float *restrict scale, float eps, const float *restrict rotation,
    float factor, float *restrict y, int64_t size)
{
    if (scale) {
        float squares = 0;
        for (int64_t i = 0; i < size; ++i)
            squares += GET(x[i]) * GET(x[i]);
        factor /= sqrtf(squares / (float)size + eps);
        for (int64_t i = 0; i < size; ++i)
            y[i] = GET(x[i]) * scale[i] * factor;
    } else
        for (int64_t i = 0; i < size; ++i)
            y[i] = GET(x[i]) * factor;
    for (int64_t i = 0; i < size; i += 2) {
        const float a = y[i], b = y[i + 1];
        y[i] = a * rotation[i] - b * rotation[i + 1];
        y[i + 1] = a * rotation[i + 1] + b * rotation[i];
    }
}

/* The same in the order of LOAD_PAIR. */
INLINE void NAME(turn_query)(
    const REAL *restrict x, const float *restrict scale, float eps, const float *restrict rotation,
    float factor, float *restrict y, float *restrict space, int64_t size)
{
    NAME(turn)(x, scale, eps, rotation, factor, space, size);
    int64_t start = 0;
    for (; start + PAIR <= size; start += PAIR)
        ORDER_PAIR(x, space + start, y + start);
    for (; start < size; ++start)
        y[start] = space[start];
}

/* A key as `turn` makes it and a value, to where they are kept. `space` has `size` numbers. */
INLINE void NAME(keep)(
    const REAL *restrict key, const float *restrict scale, float eps, const float *restrict rotation,
    REAL *restrict kept_key, REAL *restrict kept_value, float *restrict space, int64_t size)
{
    NAME(turn)(key, scale, eps, rotation, 1.0f, space, size);
    for (int64_t i = 0; i < size; ++i)
        kept_key[i] = PUT(space[i]);
    memcpy(kept_value, key + size, (size_t)size * sizeof(REAL));
}

/* scores[j, c] = queries[j] . keys[c] for `count` queries, and -infinity for the columns that fill up to a
 * multiple of COLUMNS. `ahead` is what will be read next, in as many columns. */
INLINE void NAME(score)(
    const float *restrict queries, const REAL *restrict keys, float *restrict scores, const REAL *ahead,
    int64_t columns, int64_t filled, int64_t size, int count)
{
    float parts[TOGETHER][4 * COLUMNS] = {{0}};
    for (int64_t start = 0; start < columns; start += COLUMNS) {
        const int64_t some = columns - start < COLUMNS ? columns - start : COLUMNS;
        for (int64_t c = 0; c < some; ++c) {
            const REAL *const key = keys + (start + c) * size;
            fetch(ahead + (start + c) * size, (size_t)size * sizeof(REAL));
            floats sums[TOGETHER] = {0};
            int64_t i = 0;
#pragma GCC unroll 8
            for (; i + PAIR <= size; i += PAIR) {
                floats first, second;
                LOAD_PAIR(key + i, &first, &second);
#pragma GCC unroll 4
                for (int j = 0; j < count; ++j) {
                    sums[j] += first * load(queries + j * size + i);
                    sums[j] += second * load(queries + j * size + i + AT_ONCE);
                }
            }
#pragma GCC unroll 4
            for (int j = 0; j < count; ++j) {
                quarters_of(sums[j], parts[j] + 4 * c);
                for (int64_t rest = i; rest < size; ++rest)
                    parts[j][4 * c] += GET(key[rest]) * queries[j * size + rest];
            }
        }
        for (int j = 0; j < count; ++j) {
            const float *const part = parts[j];
            float *const own = scores + j * filled + start;
#pragma GCC unroll 1
            for (int c = 0; c < COLUMNS; ++c)
                own[c] = part[4 * c] + part[4 * c + 1] + part[4 * c + 2] + part[4 * c + 3];
        }
    }
    for (int j = 0; j < count; ++j)
        for (int64_t c = columns; c < filled; ++c)
            scores[j * filled + c] = -INFINITY;
}

/* cap tanh(score / cap) in place of the scores. */
INLINE void NAME(cap_scores)(float *restrict scores, float cap, int64_t columns)
{
    const float share = 1.0f / cap;
    for (int64_t c = 0; c < columns; ++c)
        scores[c] = cap * tanh_of(scores[c] * share);
}

/* e^(score - highest) in place of the scores, a multiple of COLUMNS; returns their sum. */
INLINE float NAME(to_shares)(float *restrict scores, int64_t filled)
{
    int32_t highest = INT32_MIN;
    for (int64_t c = 0; c < filled; ++c) {
        const int32_t rank = rank_of(scores[c]);
        highest = rank > highest ? rank : highest;
    }
    const float most = of_rank(highest);
    float sum = 0;
    for (int64_t c = 0; c < filled; ++c) {
        scores[c] = exp_of(scores[c] - most);
        sum += scores[c];
    }
    return sum;
}

/* attended[j] = sum over c of shares[j, c] values[c], over sums[j], for `pairs` pairs of vectors. `ahead`
 * as above. */
INLINE void NAME(mix)(
    const float *restrict shares, const float *restrict sums, const REAL *restrict values,
    REAL *restrict attended, const REAL *ahead, int64_t columns, int64_t filled, int64_t size, int count,
    int pairs)
{
    floats mixed[TOGETHER][2 * BLOCK] = {{{0}}};
    for (int64_t c = 0; c < columns; ++c) {
        fetch(ahead + c * size, (size_t)(pairs * PAIR) * sizeof(REAL));
#pragma GCC unroll 4
        for (int b = 0; b < pairs; ++b) {
            floats first, second;
            LOAD_PAIR(values + c * size + b * PAIR, &first, &second);
#pragma GCC unroll 4
            for (int j = 0; j < count; ++j) {
                mixed[j][2 * b] += shares[j * filled + c] * first;
                mixed[j][2 * b + 1] += shares[j * filled + c] * second;
            }
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
        const float part = 1.0f / sums[j];
#pragma GCC unroll 4
        for (int b = 0; b < pairs; ++b)
            STORE_PAIR(mixed[j][2 * b] * part, mixed[j][2 * b + 1] * part, attended + j * size + b * PAIR);
    }
}

INLINE void NAME(attend_together)(
    const float *restrict queries, const REAL *restrict keys, const REAL *restrict values,
    REAL *restrict attended, float *restrict scores, const REAL *next_keys, float cap, int64_t columns,
    int64_t size, int count)
{
    const int64_t filled = (columns + COLUMNS - 1) & -COLUMNS;
    float sums[TOGETHER];
    NAME(score)(queries, keys, scores, values, columns, filled, size, count);
    if (cap > 0.0f)
        for (int j = 0; j < count; ++j)
            NAME(cap_scores)(scores + j * filled, cap, columns);
    for (int j = 0; j < count; ++j)
        sums[j] = NAME(to_shares)(scores + j * filled, filled);
    int64_t i = 0;
    for (; i + BLOCK * PAIR <= size; i += BLOCK * PAIR)
        NAME(mix)(scores, sums, values + i, attended + i, next_keys + i, columns, filled, size, count, BLOCK);
    for (; i + PAIR <= size; i += PAIR)
        NAME(mix)(scores, sums, values + i, attended + i, next_keys + i, columns, filled, size, count, 1);
    for (; i < size; ++i)
        for (int j = 0; j < count; ++j) {
            float mixed = 0;
            for (int64_t c = 0; c < columns; ++c)
                mixed += scores[j * filled + c] * GET(values[c * size + i]);
            attended[j * size + i] = PUT(mixed / sums[j]);
        }
}

INLINE void NAME(attend_sized)(
    const REAL *restrict fused, const float *restrict scale, float eps, const float *restrict rotation,
    const int64_t *restrict positions, REAL *restrict keys, REAL *restrict values, REAL *restrict attended,
    float *restrict space, int64_t rows, int64_t kv_heads, int64_t group, int64_t width, int64_t size,
    float factor, float cap, int64_t window)
{
    float *const scores = space + group * size;
    for (int64_t head = 0; head < rows * kv_heads; ++head) {
        const int64_t row = head / kv_heads, position = positions[row];
        const REAL *const from = fused + head * (group + 2) * size;
        REAL *const own_keys = keys + head * width * size, *const own_values = values + head * width * size;
        const float *const turned = rotation + row * size;
        const int64_t first = window && position >= window ? position + 1 - window : 0;
        NAME(keep)(
            from + group * size, scale ? scale + group * size : NULL, eps, turned, own_keys + position * size,
            own_values + position * size, space, size);
        for (int64_t j = 0; j < group; ++j)
            NAME(turn_query)(
                from + j * size, scale ? scale + j * size : NULL, eps, turned, factor, space + j * size,
                scores, size);
        REAL *const to = attended + head * group * size;
        const REAL *const seen_keys = own_keys + first * size, *const seen_values = own_values + first * size;
        const REAL *const next_keys = head + 1 < rows * kv_heads ? seen_keys + width * size : seen_keys;
        int64_t j = 0;
        for (; j + TOGETHER <= group; j += TOGETHER)
            NAME(attend_together)(
                space + j * size, seen_keys, seen_values, to + j * size, scores, next_keys, cap,
                position + 1 - first, size, TOGETHER);
        for (; j < group; ++j)
            NAME(attend_together)(
                space + j * size, seen_keys, seen_values, to + j * size, scores, next_keys, cap,
                position + 1 - first, size, 1);
    }
}

/* One new token for each of `rows` sequences: its key and value are written at `positions[row]`, and its
 * queries attend to all columns up to there, or to the last `window` of them where that is not 0. Scores are
 * multiplied by `factor`, and become cap tanh(score / cap) where cap is not 0. keys and values [rows, kv_heads,
 * width, size], attended [rows, kv_heads, group, size], rotation [rows, size]. space has group (size + highest
 * position + COLUMNS) + size numbers. */
void NAME(attend)(
    const REAL *restrict fused, const float *restrict scale, float eps, const float *restrict rotation,
    const int64_t *restrict positions, REAL *restrict keys, REAL *restrict values, REAL *restrict attended,
    float *restrict space, int64_t rows, int64_t kv_heads, int64_t group, int64_t width, int64_t size,
    float factor, float cap, int64_t window)
{
#define SIZED(size) \
    NAME(attend_sized)( \
        fused, scale, eps, rotation, positions, keys, values, attended, space, rows, kv_heads, group, width, \
        size, factor, cap, window)
    /* The usual sizes as constants: their loops vanish. */
    if (size == 64)
        SIZED(64);
    else if (size == 128)
        SIZED(128);
    else
        SIZED(size);
#undef SIZED
}

/* Whole prompts of `width` tokens: queries [prompts, kv_heads group, width, size] as attention wants them,
 * keys and values [prompts, kv_heads, width, size] as they are kept. rotation [width, size]. space has `size`
 * numbers. */
void NAME(split_heads)(
    const REAL *restrict fused, const float *restrict scale, float eps, const float *restrict rotation,
    REAL *restrict queries, REAL *restrict keys, REAL *restrict values, float *restrict space,
    int64_t prompts, int64_t kv_heads, int64_t group, int64_t width, int64_t size)
{
    for (int64_t token = 0; token < prompts * width; ++token) {
        const int64_t prompt = token / width, column = token % width;
        const float *const turned = rotation + column * size;
        for (int64_t head = 0; head < kv_heads; ++head) {
            const REAL *const from = fused + (token * kv_heads + head) * (group + 2) * size;
            const int64_t own = prompt * kv_heads + head, line = (own * width + column) * size;
            NAME(keep)(
                from + group * size, scale ? scale + group * size : NULL, eps, turned, keys + line,
                values + line, space, size);
            for (int64_t j = 0; j < group; ++j) {
                REAL *const to = queries + ((own * group + j) * width + column) * size;
                NAME(turn)(from + j * size, scale ? scale + j * size : NULL, eps, turned, 1.0f, space, size);
                for (int64_t i = 0; i < size; ++i)
                    to[i] = PUT(space[i]);
            }
        }
    }
}

#undef BLOCK
#undef TOGETHER
#undef COLUMNS
