/* Next tokens from logits: a race of exponential numbers (sampler.py of rollout/decode), in two passes over a
 * row. */

/* Numbers that are compared at once; where the winner is, is looked for only in runs that it comes from. */
#define RUN 64

/* For each row, tokens[row] = argmax of e^(x - highest) / noise with x = logits / temperature; where
 * `greedy`, of x; the first of equals. logprobs[row] = log_softmax(x)[token].
 *
 * Row r of logits begins `stride` numbers behind the one before. Its noise is made of two windows of words,
 * which begin at offsets[r] of the first and offsets[offsets_stride + r] of the second table, after both have
 * taken their step; there are `windows` of them, a power of two. The sum of two words, as a magnitude and
 * times `unit`, is u, uniform in (0, 1), and the noise is -log(1 - u). */
void NAME(sample)(
    const REAL *restrict logits, int64_t stride, const float *restrict temperature,
    const float *restrict greedy,
    const uint32_t *restrict first_words, const uint32_t *restrict second_words, float unit, int64_t windows,
    int64_t *restrict offsets, int64_t offsets_stride, int64_t first_step, int64_t second_step,
    int64_t *restrict tokens, float *restrict logprobs, int64_t rows, int64_t vocab)
{
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *const own = logits + row * stride;
        int64_t *const offset = offsets + row;
        offset[0] = (offset[0] + first_step) & (windows - 1);
        offset[offsets_stride] = (offset[offsets_stride] + second_step) & (windows - 1);
        const uint32_t *const first = first_words + offset[0];
        const uint32_t *const second = second_words + offset[offsets_stride];
        const float per_temperature = 1.0f / temperature[row];
        int32_t highest = INT32_MIN;
        for (int64_t i = 0; i < vocab; ++i) {
            const int32_t rank = rank_of(GET(own[i]));
            highest = rank > highest ? rank : highest;
        }
        const float most = of_rank(highest);
        const int by_chance = greedy[row] == 0;
        double sum = 0;
        int32_t best = INT32_MIN;
        int64_t winner = 0;
        for (int64_t start = 0; start < vocab; start += RUN) {
            const int64_t count = vocab - start < RUN ? vocab - start : RUN;
            int32_t ranks[RUN], best_of_run = INT32_MIN;
            float sum_of_run = 0;
            for (int64_t i = 0; i < count; ++i) {
                const float share = exp_of((GET(own[start + i]) - most) * per_temperature);
                sum_of_run += share;
                if (by_chance) {
                    /* Any but the lowest negative number, which no even and odd word add up to. */
                    const int32_t word = (int32_t)(first[start + i] + second[start + i]);
                    ranks[i] = rank_of(share / -log_of_rest((float)(word < 0 ? -word : word) * unit));
                } else
                    ranks[i] = rank_of(GET(own[start + i]));
                best_of_run = ranks[i] > best_of_run ? ranks[i] : best_of_run;
            }
            sum += sum_of_run;
            if (best_of_run > best) {
                best = best_of_run;
                int64_t i = 0;
                while (ranks[i] != best)
                    ++i;
                winner = start + i;
            }
        }
        tokens[row] = winner;
        logprobs[row] = (GET(own[winner]) - most) * per_temperature - logf((float)sum);
    }
}

#undef RUN
