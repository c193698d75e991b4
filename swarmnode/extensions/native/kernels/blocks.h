/* Products of a few rows with a matrix of float32, as attention over short sequences needs them. A block is QUERIES
 * rows; widths are multiples of WIDTH, so every loop inside has constant bounds and sums stay in registers. */

#define QUERIES 4
#define LANES 16
#define WIDTH (2 * LANES)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline int64_t round_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step * step;
}

/* out[j][c] = sum of a[j][i] b[i][c] over from <= i < to, for first <= c < last; first and last are multiples of
 * WIDTH. */
static void rows_times(
    const float *restrict a, int64_t a_stride, int64_t from, int64_t to, const float *restrict b,
    int64_t b_stride, float *restrict out, int64_t out_stride, int64_t first, int64_t last)
{
    for (int64_t c = first; c < last; c += WIDTH) {
        vec sum[QUERIES][2] = {0};
        for (int64_t i = from; i < to; ++i) {
            const vec left = *(const vec *)(b + i * b_stride + c);
            const vec right = *(const vec *)(b + i * b_stride + c + LANES);
            for (int j = 0; j < QUERIES; ++j) {
                const float x = a[j * a_stride + i];
                sum[j][0] += x * left;
                sum[j][1] += x * right;
            }
        }
        for (int j = 0; j < QUERIES; ++j) {
            *(vec *)(out + j * out_stride + c) = sum[j][0];
            *(vec *)(out + j * out_stride + c + LANES) = sum[j][1];
        }
    }
}

/* out[i][c] += sum of a[j][i] b[j][c] over the rows j of a block, for from <= i < to. */
static void add_outer(
    const float *restrict a, int64_t a_stride, const float *restrict b, int64_t b_stride, float *restrict out,
    int64_t out_stride, int64_t from, int64_t to, int64_t width)
{
    for (int64_t c = 0; c < width; c += WIDTH) {
        vec left[QUERIES], right[QUERIES];
        for (int j = 0; j < QUERIES; ++j) {
            left[j] = *(const vec *)(b + j * b_stride + c);
            right[j] = *(const vec *)(b + j * b_stride + c + LANES);
        }
        for (int64_t i = from; i < to; ++i) {
            vec *const to_left = (vec *)(out + i * out_stride + c);
            vec *const to_right = (vec *)(out + i * out_stride + c + LANES);
            vec sum_left = *to_left, sum_right = *to_right;
            for (int j = 0; j < QUERIES; ++j) {
                const float x = a[j * a_stride + i];
                sum_left += x * left[j];
                sum_right += x * right[j];
            }
            *to_left = sum_left;
            *to_right = sum_right;
        }
    }
}
