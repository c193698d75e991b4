/* Causal attention inside each sequence of a packed row, forward and backward, without a matrix of scores.
 *
 * Run r owns the queries of tokens query_ends[r] .. query_ends[r + 1]; they are the last of its sequence, whose
 * keys are those of the tokens key_tokens[key_ends[r] .. key_ends[r + 1]]: a prompt that several runs share, and
 * the run's own. A query sees the keys up to its own, and `window` of them at most where that is not 0.
 *
 * query, out [tokens, groups * heads, size], key, value [tokens, groups, size]: a token's numbers lie together,
 * one token *_stride numbers behind the other; `heads` query heads share a key head. Arithmetic is in float32,
 * QUERIES rows (a token with one of its heads each) at a time. sums [tokens, groups * heads] is the logarithm of
 * the sum of e^score, all that the backward pass needs besides its inputs and outputs (FlashAttention-2, arXiv
 * 2307.08691, section 3.1).
 *
 * scratch: memory for floats, as extensions/native/passes.py makes it: blocks of QUERIES rows over the keys (1, or 2
 * for the gradient), 3 over a head, and tables of keys by head (2, or 5), rounded up to WIDTH. */

#ifndef PACKED_ATTENTION
#define PACKED_ATTENTION

struct rows {
    int64_t first, last;           /* of the run's rows */
    int64_t seen_from, seen_to[QUERIES]; /* the keys that any of them sees; up to where each one does */
};

/* Which keys a block of rows sees. Rows beyond the last see what the last one does. */
static struct rows rows_at(int64_t row, int64_t count, int64_t heads, int64_t before, int64_t window)
{
    struct rows block = {row, row + QUERIES < count ? row + QUERIES : count, 0, {0}};
    for (int j = 0; j < QUERIES; ++j) {
        const int64_t own = row + j < count ? row + j : count - 1;
        block.seen_to[j] = before + own / heads + 1;
    }
    const int64_t from = window ? block.seen_to[0] - window : 0;
    block.seen_from = from > 0 ? from : 0;
    return block;
}

/* Where the keys of one row of a block begin. */
static inline int64_t seen_from(const struct rows *block, int j, int64_t window)
{
    const int64_t from = window ? block->seen_to[j] - window : 0;
    return from > 0 ? from : 0;
}

#endif

static inline void NAME(load_row)(const REAL *from, int64_t size, float *restrict to, int64_t padded)
{
    for (int64_t i = 0; i < size; ++i)
        to[i] = GET(from[i]);
    for (int64_t i = size; i < padded; ++i)
        to[i] = 0;
}

/* A block of query rows, rows beyond the run's as zeros. */
static void NAME(load_block)(
    const REAL *base, int64_t stride, const struct rows *block, int64_t heads, int64_t size,
    float *restrict to, int64_t padded)
{
    for (int j = 0; j < QUERIES; ++j) {
        const int64_t row = block->first + j;
        if (row < block->last)
            NAME(load_row)(base + row / heads * stride + row % heads * size, size, to + j * padded, padded);
        else
            memset(to + j * padded, 0, (size_t)padded * sizeof(float));
    }
}

/* The rows of a block that are the run's, back to where `load_block` reads such rows. */
static void NAME(store_block)(
    const float *restrict from, int64_t padded, const struct rows *block, int64_t heads, int64_t size, REAL *base,
    int64_t stride)
{
    for (int64_t row = block->first; row < block->last; ++row) {
        REAL *const to = base + row / heads * stride + row % heads * size;
        for (int64_t i = 0; i < size; ++i)
            to[i] = PUT(from[(row - block->first) * padded + i]);
    }
}

/* The keys (or values) of a sequence: as rows [keys, padded size], as columns [padded size, padded keys], or both;
 * either may be null. */
static void NAME(load_table)(
    const REAL *base, int64_t stride, const int64_t *tokens, int64_t keys, int64_t size,
    float *restrict rows, float *restrict columns, int64_t padded_size, int64_t padded_keys)
{
    for (int64_t k = 0; k < padded_keys; ++k) {
        if (k >= keys) {
            for (int64_t i = 0; columns && i < size; ++i)
                columns[i * padded_keys + k] = 0;
            continue;
        }
        const REAL *const from = base + tokens[k] * stride;
        if (rows)
            NAME(load_row)(from, size, rows + k * padded_size, padded_size);
        for (int64_t i = 0; columns && i < size; ++i)
            columns[i * padded_keys + k] = GET(from[i]);
    }
}

void NAME(packed_attention)(
    const REAL *query, int64_t query_stride, const REAL *key, int64_t key_stride, const REAL *value,
    int64_t value_stride, const int64_t *query_ends, const int64_t *key_ends, const int64_t *key_tokens,
    int64_t window, float scale, REAL *out, float *sums, float *scratch, int64_t runs, int64_t groups,
    int64_t heads, int64_t size, int64_t most_keys)
{
    const int64_t wide = round_up(size, WIDTH), long_ = round_up(most_keys, WIDTH);
    float *const scores = scratch, *const block_q = scores + QUERIES * long_;
    float *const block_out = block_q + QUERIES * wide;
    float *const key_columns = block_out + QUERIES * wide, *const values = key_columns + wide * long_;
    const int64_t out_stride = groups * heads * size;
    for (int64_t run = 0; run < runs; ++run)
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t first = query_ends[run], tokens = query_ends[run + 1] - first;
            const int64_t keys = key_ends[run + 1] - key_ends[run], padded = round_up(keys, WIDTH);
            const int64_t *const own = key_tokens + key_ends[run];
            const int64_t of_heads = first * out_stride + group * heads * size;
            const REAL *const q = query + first * query_stride + group * heads * size;
            NAME(load_table)(key + group * size, key_stride, own, keys, size, NULL, key_columns, wide, padded);
            NAME(load_table)(value + group * size, value_stride, own, keys, size, values, NULL, wide, padded);
            for (int64_t row = 0; row < tokens * heads; row += QUERIES) {
                const struct rows block = rows_at(row, tokens * heads, heads, keys - tokens, window);
                const int64_t from = block.seen_from / WIDTH * WIDTH, to = block.seen_to[QUERIES - 1];
                NAME(load_block)(q, query_stride, &block, heads, size, block_q, wide);
                rows_times(
                    block_q, wide, 0, size, key_columns, padded, scores, padded, from, round_up(to, WIDTH));
                for (int j = 0; j < QUERIES; ++j) {
                    float *const s = scores + j * padded;
                    const int64_t begin = seen_from(&block, j, window), end = block.seen_to[j];
                    float most = -INFINITY, sum = 0;
                    for (int64_t k = begin; k < end; ++k)
                        most = s[k] > most ? s[k] : most;
                    for (int64_t k = begin; k < end; ++k) {
                        s[k] = exp_of((s[k] - most) * scale);
                        sum += s[k];
                    }
                    for (int64_t k = from; k < begin; ++k)
                        s[k] = 0;
                    for (int64_t k = end; k < to; ++k)
                        s[k] = 0;
                    const float share = 1.0f / sum;
                    for (int64_t k = begin; k < end; ++k)
                        s[k] *= share;
                    const int64_t r = row + j;
                    if (r < block.last)
                        sums[(first + r / heads) * groups * heads + group * heads + r % heads] =
                            most * scale + logf(sum);
                }
                rows_times(scores, padded, from, to, values, wide, block_out, wide, 0, wide);
                NAME(store_block)(block_out, wide, &block, heads, size, out + of_heads, out_stride);
            }
        }
}

/* dkey and dvalue [tokens, groups, size] are float32 and are added to: several runs may share a key. dout and out
 * are contiguous, dquery too. */
void NAME(packed_attention_gradient)(
    const REAL *dout, const REAL *query, int64_t query_stride, const REAL *key, int64_t key_stride,
    const REAL *value, int64_t value_stride, const REAL *out, const float *sums, const int64_t *query_ends,
    const int64_t *key_ends, const int64_t *key_tokens, int64_t window, float scale, REAL *dquery, float *dkey,
    float *dvalue, float *scratch, int64_t runs, int64_t groups, int64_t heads, int64_t size,
    int64_t most_keys)
{
    const int64_t wide = round_up(size, WIDTH), long_ = round_up(most_keys, WIDTH);
    float *const shares = scratch, *const dshares = shares + QUERIES * long_;
    float *const block_q = dshares + QUERIES * long_, *const block_d = block_q + QUERIES * wide;
    float *const block_dq = block_d + QUERIES * wide, *const keys_ = block_dq + QUERIES * wide;
    float *const key_columns = keys_ + wide * long_, *const value_columns = key_columns + wide * long_;
    float *const dkeys = value_columns + wide * long_, *const dvalues = dkeys + wide * long_;
    const int64_t out_stride = groups * heads * size;
    for (int64_t run = 0; run < runs; ++run)
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t first = query_ends[run], tokens = query_ends[run + 1] - first;
            const int64_t keys = key_ends[run + 1] - key_ends[run], padded = round_up(keys, WIDTH);
            const int64_t *const own = key_tokens + key_ends[run];
            const int64_t of_heads = first * out_stride + group * heads * size;
            const REAL *const q = query + first * query_stride + group * heads * size;
            NAME(load_table)(key + group * size, key_stride, own, keys, size, keys_, key_columns, wide, padded);
            NAME(load_table)(
                value + group * size, value_stride, own, keys, size, NULL, value_columns, wide, padded);
            memset(dkeys, 0, (size_t)(keys * wide) * sizeof(float));
            memset(dvalues, 0, (size_t)(keys * wide) * sizeof(float));
            for (int64_t row = 0; row < tokens * heads; row += QUERIES) {
                const struct rows block = rows_at(row, tokens * heads, heads, keys - tokens, window);
                const int64_t from = block.seen_from / WIDTH * WIDTH, to = block.seen_to[QUERIES - 1];
                NAME(load_block)(q, query_stride, &block, heads, size, block_q, wide);
                NAME(load_block)(dout + of_heads, out_stride, &block, heads, size, block_d, wide);
                rows_times(
                    block_q, wide, 0, size, key_columns, padded, shares, padded, from, round_up(to, WIDTH));
                rows_times(
                    block_d, wide, 0, size, value_columns, padded, dshares, padded, from, round_up(to, WIDTH));
                for (int j = 0; j < QUERIES; ++j) {
                    float *const p = shares + j * padded, *const dp = dshares + j * padded;
                    const int64_t r = row + j;
                    const int64_t begin = seen_from(&block, j, window);
                    const int64_t end = r < block.last ? block.seen_to[j] : begin;
                    float sum = 0, dot = 0;
                    if (r < block.last) {
                        const int64_t head = group * heads + r % heads;
                        const REAL *const y = out + (first + r / heads) * out_stride + head * size;
                        sum = sums[(first + r / heads) * groups * heads + head];
                        for (int64_t i = 0; i < size; ++i)
                            dot += GET(y[i]) * block_d[j * wide + i];
                    }
                    for (int64_t k = begin; k < end; ++k) {
                        p[k] = exp_of(p[k] * scale - sum);
                        dp[k] = p[k] * (dp[k] - dot) * scale;
                    }
                    for (int64_t k = from; k < begin; ++k)
                        p[k] = dp[k] = 0;
                    for (int64_t k = end; k < to; ++k)
                        p[k] = dp[k] = 0;
                }
                rows_times(dshares, padded, from, to, keys_, wide, block_dq, wide, 0, wide);
                add_outer(shares, padded, block_d, wide, dvalues, wide, from, to, wide);
                add_outer(dshares, padded, block_q, wide, dkeys, wide, from, to, wide);
                NAME(store_block)(block_dq, wide, &block, heads, size, dquery + of_heads, out_stride);
            }
            for (int64_t k = 0; k < keys; ++k) {
                const int64_t at = own[k] * groups * size + group * size;
                for (int64_t i = 0; i < size; ++i) {
                    dkey[at + i] += dkeys[k * wide + i];
                    dvalue[at + i] += dvalues[k * wide + i];
                }
            }
        }
}
