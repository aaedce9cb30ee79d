/* Causal attention of bfloat16 numbers, forward and backward, for numerics/causal_attention.py.
 *
 * A document is tokens of one row of the batch that see one another, each up to itself. It is taken by tiles of TILE queries
 * and TILE keys; tiles above the diagonal are left out. Sums are float32 and their order is one: it depends on a document's
 * length alone, neither on the threads nor on the documents beside it.
 *
 * Nothing is allocated and nothing is kept: memory for the tiles comes from the caller, a part for each thread. A task is a
 * piece (some queries of a document) in one head.
 */

#include "vectors.h"

#if defined(__AVX512F__)
#define ROWS 8                               /* of a block of the product that is kept in registers */
#else
#define ROWS 4
#endif

#define TILE 64
#define STEP 16                              /* tokens and features are filled up with zeros to a multiple of it */
#define FILLED(n) (((n) + STEP - 1) / STEP * STEP)

enum { QUERY = 0, KEY = 1, VALUE = 2, OUT = 3, GRAD = 4, GRAD_QUERY = 5, GRAD_KEY = 6, GRAD_VALUE = 7, TENSORS = 8 };

typedef struct {
    uint16_t *const *tensors;                /* TENSORS of them, [B, H, S, D]; keys and values have fewer heads */
    const int64_t *strides;                  /* three of each, in elements: row, head, token; features lie side by side */
    const int64_t *pieces;                   /* [pieces, 4]: row of the batch, first token, first query, end */
    int64_t count, heads, shared, width, tokens;  /* shared: heads of queries that read one head of keys */
    float *log_sums;                         /* [B, H, S]: log2 of each query's sum */
    float *scratch;
    int64_t scratch_floats;                  /* of a thread */
    int64_t next_task, next_thread;
    float scale;
    int backward;
} job_t;

/* --- operands ------------------------------------------------------------------------------------------------------- */

/* An operand lies in units of four bytes: PAIR numbers that are neighbours in the sum of a product. A processor that adds up
 * pairs of bfloat16 numbers (vdpbf16ps) takes them as they come, and what is computed here rounded to them; elsewhere a unit
 * is a float. UNITS(n) is how many n numbers take; n is a multiple of STEP. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIR 2
#else
#define PAIR 1
#endif
#define UNITS(n) ((n) / PAIR)

/* One unit in every lane. */
INLINE vec spread(const float *unit) {
    int32_t bits;
    memcpy(&bits, unit, 4);
    return (vec)(bits - (ivec){0});
}

/* c and the products of two vectors of units. */
INLINE vec dot(vec a, vec b, vec c) {
#if PAIR == 2
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    return fma_(a, b, c);
#endif
}

/* LANES numbers of one row, as UNITS(LANES) units. */
INLINE void put_row(float *units, vec numbers) {
#if PAIR == 2
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
    memcpy(units, &halves, sizeof halves);
#else
    put(units, numbers);
#endif
}

/* Numbers of two rows that are neighbours in the sum, as LANES units; where a unit has one number the second row lies `next`
 * units on. */
INLINE void put_rows(float *units, int64_t next, vec upper, vec lower) {
#if PAIR == 2
    const __m512i upper_bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)upper));
    const __m512i lower_bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)lower));
    put(units, (vec)_mm512_or_si512(upper_bits, _mm512_slli_epi32(lower_bits, 16)));
    (void)next;
#else
    put(units, upper);
    put(units + next, lower);
#endif
}

INLINE uint16_t *token(const job_t *job, int tensor, int64_t row, int64_t head, int64_t number) {
    const int64_t *strides = job->strides + 3 * tensor;
    const int64_t own = tensor == KEY || tensor == VALUE ? head / job->shared : head;
    return job->tensors[tensor] + row * strides[0] + own * strides[1] + number * strides[2];
}

/* Tokens [first, end) to rows of FILLED(width) numbers, and zeros up to FILLED(end - first). */
static void take(const job_t *job, int tensor, int64_t row, int64_t head, int64_t first, int64_t end, float *units) {
    const int64_t width = job->width, pitch = FILLED(width), count = end - first;
    memset(units, 0, (size_t)(FILLED(count) * UNITS(pitch)) * sizeof *units);
    for (int64_t i = 0; i < count; i++, units += UNITS(pitch)) {
        const uint16_t *from = token(job, tensor, row, head, first + i);
#if PAIR == 2
        memcpy(units, from, (size_t)width * sizeof *from);
#else
        for (int64_t d = 0; d < width; d++) units[d] = from_bf16(from[d]);
#endif
    }
}

/* Rows [count, pitch] to [pitch / PAIR, TILE]: for sums over features. */
static void turn(const float *units, float *out, int64_t count, int64_t pitch) {
    const int64_t width = UNITS(pitch), step = UNITS(STEP);
    for (int64_t d = 0; d < width; d += step)
        for (int64_t i = 0; i < count; i++)
            for (int64_t e = d; e < d + step; e++) out[e * TILE + i] = units[i * width + e];
}

/* Rows [count, pitch] to [count / PAIR, pitch] units: for sums over tokens. Where a unit is a number they are that as they
 * lie, and stay there. Answers where they are. */
static const float *pair_rows(const float *units, float *out, int64_t count, int64_t pitch) {
#if PAIR == 2
    const uint16_t *from = (const uint16_t *)units;
    for (int64_t i = 0; i < count; i += 2, from += 2 * pitch)
        for (int64_t d = 0; d < pitch; d += LANES, out += LANES) {
            __m256i upper, lower;
            memcpy(&upper, from + d, sizeof upper);
            memcpy(&lower, from + pitch + d, sizeof lower);
            put(out, (vec)_mm512_or_si512(_mm512_cvtepu16_epi32(upper),
                                          _mm512_slli_epi32(_mm512_cvtepu16_epi32(lower), 16)));
        }
    return out - UNITS(count) * pitch;
#else
    (void)out;
    (void)count;
    (void)pitch;
    return units;
#endif
}

static void give(const job_t *job, int tensor, int64_t row, int64_t head, int64_t first, int64_t end, float factor,
                 const float *values) {
    const int64_t width = job->width, pitch = FILLED(width);
    for (int64_t i = 0; i < end - first; i++, values += pitch) {
        uint16_t *to = token(job, tensor, row, head, first + i);
        for (int64_t d = 0; d < width; d++) to[d] = to_bf16(values[d] * factor);
    }
}

/* --- products of tiles ---------------------------------------------------------------------------------------------- */

/* c[rows, columns] (+)= a[rows, inner] * b[inner, columns] over the units [from, inner), a block of ROWS rows and `wide`
 * vectors in registers; what is not added to is multiplied by `factor`. */
INLINE void block(int wide, const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t b_row, float *c,
                  int64_t c_row, int64_t from, int64_t inner, int adds, float factor) {
    vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) sums[r][w] = adds ? at(c + r * c_row + w * LANES) : all(0.0f);
    for (int64_t k = from; k < inner; k++) {
        vec row[2];
        for (int w = 0; w < wide; w++) row[w] = at(b + k * b_row + w * LANES);
        for (int r = 0; r < ROWS; r++) {
            const vec unit = spread(a + r * a_row + k * a_inner);
            for (int w = 0; w < wide; w++) sums[r][w] = dot(unit, row[w], sums[r][w]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) {
            if (!adds) sums[r][w] *= all(factor);
            put(c + r * c_row + w * LANES, sums[r][w]);
        }
}

/* What the diagonal of a tile lets be left out: nothing; columns of the answer behind a block's last row; summands behind it;
 * summands before its first row. */
enum { WHOLE = 0, COLUMNS_UP_TO_ROW = 1, SUMMANDS_UP_TO_ROW = 2, SUMMANDS_FROM_ROW = 3 };

INLINE void blocks(int part, const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t b_row, float *c,
                   int64_t c_row, int64_t rows, int64_t columns, int64_t inner, int adds, float factor) {
    for (int64_t column = 0; column < columns;) {
        const int wide = columns - column >= 2 * LANES ? 2 : 1;
        for (int64_t row = part == COLUMNS_UP_TO_ROW ? column / ROWS * ROWS : 0; row < rows; row += ROWS) {
            const int64_t first = part == SUMMANDS_FROM_ROW ? row / PAIR : 0;
            const int64_t end = part == SUMMANDS_UP_TO_ROW ? UNITS(row + ROWS) : UNITS(inner);
            const float *from = a + row * a_row;
            float *to = c + row * c_row + column;
            if (wide == 2) block(2, from, a_row, a_inner, b + column, b_row, to, c_row, first, end, adds, factor);
            else block(1, from, a_row, a_inner, b + column, b_row, to, c_row, first, end, adds, factor);
        }
        column += wide * LANES;
    }
}

/* Scores [queries, keys] of rows [queries, pitch] and keys [pitch / PAIR, TILE], times a factor. */
static void scores_of(const float *a, const float *keys, float *out, int64_t rows, int64_t columns, int64_t pitch,
                      int diagonal, float factor) {
    blocks(diagonal ? COLUMNS_UP_TO_ROW : WHOLE, a, UNITS(pitch), 1, keys, TILE, out, TILE, rows, columns, pitch, 0, factor);
}

/* out [queries, pitch] += weights [queries, keys] * values [keys / PAIR, pitch]. */
static void add_of_keys(const float *weights, const float *values, float *out, int64_t rows, int64_t keys, int64_t pitch,
                        int diagonal) {
    if (diagonal) blocks(SUMMANDS_UP_TO_ROW, weights, TILE, 1, values, pitch, out, pitch, rows, pitch, keys, 1, 1.0f);
    else blocks(WHOLE, weights, TILE, 1, values, pitch, out, pitch, rows, pitch, keys, 1, 1.0f);
}

/* out [keys, pitch] += weights [queries / PAIR, keys] turned * values [queries / PAIR, pitch]. */
static void add_of_queries(const float *weights, const float *values, float *out, int64_t keys, int64_t rows, int64_t pitch,
                           int diagonal) {
    if (diagonal) blocks(SUMMANDS_FROM_ROW, weights, 1, TILE, values, pitch, out, pitch, keys, pitch, rows, 1, 1.0f);
    else blocks(WHOLE, weights, 1, TILE, values, pitch, out, pitch, keys, pitch, rows, 1, 1.0f);
}

/* --- forward -------------------------------------------------------------------------------------------------------- */

INLINE float highest(const float *x, int64_t n) {
    vec best = at(x);
    for (int64_t i = LANES; i < n; i += LANES) best = most(best, at(x + i));
    for (int apart = LANES / 2; apart; apart /= 2) best = most(best, turned_by(best, apart));
    return best[0];
}

/* A line of scores to a line of 2^(score - level), as units, at the same place; answers their sum. */
INLINE float weigh(float *line, int64_t columns, float level) {
    vec total = all(0.0f);
    for (int64_t c = 0; c < columns; c += LANES) {
        const vec weight = exp2_(at(line + c) - all(level));
        put_row(line + UNITS(c), weight);
        total += weight;
    }
    return sum_of(total);
}

static void forward(const job_t *job, const int64_t *piece, int64_t head, float *scratch) {
    const int64_t row = piece[0], begin = piece[1], end = piece[3], pitch = FILLED(job->width);
    const int64_t keys = FILLED(end - begin);
    float *turned = scratch, *paired = turned + UNITS((keys + TILE) * pitch);
    float *queries = paired + UNITS((keys + TILE) * pitch), *out = queries + UNITS(TILE * pitch);
    float *scores = out + TILE * pitch, *peak = scores + TILE * TILE, *sum = peak + TILE;
    for (int64_t j = begin; j < end; j += TILE) {
        const int64_t stop = j + TILE < end ? j + TILE : end;
        take(job, KEY, row, head, j, stop, queries);
        turn(queries, turned + UNITS((j - begin) * pitch), FILLED(stop - j), pitch);
        float *place = paired + UNITS((j - begin) * pitch);
        take(job, VALUE, row, head, j, stop, PAIR == 1 ? place : queries);
        pair_rows(queries, place, FILLED(stop - j), pitch);
    }
    for (int64_t i = piece[2]; i < end; i += TILE) {
        const int64_t until = i + TILE < end ? i + TILE : end, rows = FILLED(until - i);
        take(job, QUERY, row, head, i, until, queries);
        memset(out, 0, (size_t)(rows * pitch) * sizeof *out);
        for (int64_t r = 0; r < rows; r++) {
            peak[r] = -1e30f;
            sum[r] = 0.0f;
        }
        for (int64_t j = begin; j < until; j += TILE) {
            const int64_t stop = j + TILE < until ? j + TILE : until, columns = FILLED(stop - j);
            const int diagonal = j == i;
            scores_of(queries, turned + UNITS((j - begin) * pitch), scores, rows, columns, pitch, diagonal,
                      job->scale * LOG2_E);
            for (int64_t r = 0; r < rows; r++) {
                float *line = scores + r * TILE;
                const int64_t reach = diagonal ? FILLED(r + 1) : columns;
                for (int64_t c = i + r < j ? 0 : i + r - j + 1; c < reach; c++) line[c] = -1e30f;
                const float best = highest(line, reach);
                const float now = best > peak[r] ? best : peak[r];
                const float added = weigh(line, reach, now);
                if (now != peak[r]) {
                    const vec less = exp2_(all(peak[r] - now));
                    sum[r] *= less[0];
                    for (int64_t d = 0; d < pitch; d += LANES) put(out + r * pitch + d, at(out + r * pitch + d) * less);
                    peak[r] = now;
                }
                sum[r] += added;
            }
            add_of_keys(scores, paired + UNITS((j - begin) * pitch), out, rows, columns, pitch, diagonal);
        }
        float *log_sums = job->log_sums + (row * job->heads + head) * job->tokens + i;
        for (int64_t r = 0; r < until - i; r++) {
            log_sums[r] = peak[r] + __builtin_log2f(sum[r]);
            give(job, OUT, row, head, i + r, i + r + 1, 1.0f / sum[r], out + r * pitch);
        }
    }
}

/* --- backward ------------------------------------------------------------------------------------------------------- */

/* The sum of a query's answer times the answer's gradient. */
static float delta_of(const uint16_t *out, const uint16_t *grad, int64_t width) {
    float sums[LANES] = {0}, rest = 0.0f;
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES)
        for (int l = 0; l < LANES; l++)
            sums[l] += from_bf16(out[d + l]) * from_bf16(grad[d + l]);
    for (; d < width; d++) rest += from_bf16(out[d]) * from_bf16(grad[d]);
    return rest + sum_of(at(sums));
}

static void backward(const job_t *job, const int64_t *piece, int64_t head, float *scratch) {
    const int64_t row = piece[0], begin = piece[1], end = piece[3], pitch = FILLED(job->width);
    const int64_t filled = FILLED(end - begin), all_rows = UNITS(filled * pitch), tile_rows = UNITS(TILE * pitch);
    float *queries = scratch, *grads = queries + all_rows, *of_queries = grads + all_rows;
    float *deltas = of_queries + filled * pitch, *keys = deltas + filled, *keys_turned = keys + tile_rows;
    float *values_turned = keys_turned + tile_rows, *of_keys = values_turned + tile_rows;
    float *of_values = of_keys + TILE * pitch, *weights = of_values + TILE * pitch, *of_scores = weights + TILE * TILE;
    float *by_keys = PAIR == 1 ? of_scores : of_scores + TILE * TILE;       /* the gradients of scores for sums over keys */
    float *pairs = by_keys + TILE * TILE;
    const float *log_sums = job->log_sums + (row * job->heads + head) * job->tokens + begin;
    take(job, QUERY, row, head, begin, end, queries);
    take(job, GRAD, row, head, begin, end, grads);
    const float *paired_queries = pair_rows(queries, pairs, filled, pitch);
    const float *paired_grads = pair_rows(grads, pairs + all_rows, filled, pitch);
    float *place_of_keys = pairs + 2 * all_rows;
    memset(of_queries, 0, (size_t)(filled * pitch) * sizeof *of_queries);
    for (int64_t i = 0; i < filled; i++) {
        const int64_t number = begin + i;
        deltas[i] = number < end ? delta_of(token(job, OUT, row, head, number), token(job, GRAD, row, head, number),
                                            job->width) : 0.0f;
    }
    for (int64_t j = begin; j < end; j += TILE) {
        const int64_t stop = j + TILE < end ? j + TILE : end, columns = FILLED(stop - j);
        take(job, VALUE, row, head, j, stop, keys);
        turn(keys, values_turned, columns, pitch);
        take(job, KEY, row, head, j, stop, keys);
        turn(keys, keys_turned, columns, pitch);
        const float *paired_keys = pair_rows(keys, place_of_keys, columns, pitch);
        memset(of_keys, 0, (size_t)(2 * TILE * pitch) * sizeof *of_keys);                /* of_values lie behind them */
        for (int64_t i = j; i < end; i += TILE) {
            const int64_t at_i = i - begin, rows = FILLED((i + TILE < end ? i + TILE : end) - i);
            const int diagonal = i == j;
            scores_of(queries + UNITS(at_i * pitch), keys_turned, weights, rows, columns, pitch, diagonal,
                      job->scale * LOG2_E);
            scores_of(grads + UNITS(at_i * pitch), values_turned, of_scores, rows, columns, pitch, diagonal, 1.0f);
            for (int64_t r = 0; r < rows; r += 2) {
                const int64_t reach = diagonal ? FILLED(r + 2) : columns;
                float *line = weights + r * TILE, *of_line = of_scores + r * TILE;
                for (int64_t c = 0; c < reach; c += LANES) {
                    vec weight[2], of_score[2];
                    for (int64_t n = 0; n < 2; n++) {
                        const int64_t query = at_i + r + n;
                        const float level = i + r + n < end ? log_sums[query] : 0.0f;
                        weight[n] = exp2_(at(line + n * TILE + c) - all(level));
                        of_score[n] = weight[n] * (at(of_line + n * TILE + c) - all(deltas[query]));
                        if (diagonal) {
                            weight[n] = up_to(weight[n], r + n + 1 - c);
                            of_score[n] = up_to(of_score[n], r + n + 1 - c);
                        }
                        put_row(by_keys + (r + n) * TILE + UNITS(c), of_score[n]);
                    }
                    put_rows(weights + UNITS(r) * TILE + c, TILE, weight[0], weight[1]);
                    put_rows(of_scores + UNITS(r) * TILE + c, TILE, of_score[0], of_score[1]);
                }
            }
            const float *values_of_grads = paired_grads + UNITS(at_i * pitch);
            add_of_queries(weights, values_of_grads, of_values, columns, rows, pitch, diagonal);
            add_of_queries(of_scores, paired_queries + UNITS(at_i * pitch), of_keys, columns, rows, pitch, diagonal);
            add_of_keys(by_keys, paired_keys, of_queries + at_i * pitch, rows, columns, pitch, diagonal);
        }
        give(job, GRAD_KEY, row, head, j, stop, job->scale, of_keys);
        give(job, GRAD_VALUE, row, head, j, stop, 1.0f, of_values);
    }
    give(job, GRAD_QUERY, row, head, begin, end, job->scale, of_queries);
}

/* What every thread runs: take the next task until none is left. */
static void body(void *data) {
    job_t *job = data;
    float *scratch = job->scratch + __atomic_fetch_add(&job->next_thread, 1, __ATOMIC_RELAXED) * job->scratch_floats;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED);
        if (task >= job->count * job->heads) return;
        const int64_t *piece = job->pieces + 4 * (task / job->heads);
        (job->backward ? backward : forward)(job, piece, task % job->heads, scratch);
    }
}

/* Pieces come the longest first. Backward's have all queries of their document; its gradients of keys and values are of each
 * head of the queries. */
void blockwalk_attention(uint16_t *const *tensors, const int64_t *strides, const int64_t *pieces, int64_t count, int64_t heads,
                         int64_t shared, int64_t width, int64_t tokens, float *log_sums, float *scratch,
                         int64_t scratch_floats, float scale, int is_backward, parallel_fn parallel, int threads) {
    job_t job = {tensors, strides, pieces, count, heads, shared, width, tokens, log_sums, scratch, scratch_floats,
                 0, 0, scale, is_backward};
    if (parallel == NULL || threads < 2) body(&job);
    else parallel(body, &job, (unsigned)threads, 0);
}
