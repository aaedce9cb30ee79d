/* Causal attention of bfloat16 numbers, forward and backward, for numerics/causal_attention.py.
 *
 * A document is tokens of one row of the batch that see one another, each up to itself. It is taken by tiles of TILE queries
 * and TILE keys; tiles above the diagonal are left out. Sums are float32 and their order is one: it depends on a document's
 * length alone, neither on the threads nor on the documents beside it.
 *
 * Nothing is allocated and nothing is kept: memory for the tiles comes from the caller, a part for each thread. A task is a
 * piece (some queries of a document) in one head.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8                               /* of a block of the product that is kept in registers */
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 4
#else
#define LANES 4
#define ROWS 4
#endif

#define TILE 64
#define STEP 16                              /* tokens and features are filled up with zeros to a multiple of it */
#define FILLED(n) (((n) + STEP - 1) / STEP * STEP)
#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

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

INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 64u);                      /* NaN */
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec at(const float *x) { return *(const vec *)x; }
INLINE void put(float *x, vec value) { *(vec *)x = value; }

/* a*b + c, rounded once where the processor can. */
INLINE vec fma_(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec most(vec a, vec b) {
    const ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
}

/* 2^x for x <= 0, nought below the normal numbers: the nearest integer goes to the exponent, the rest to a polynomial
 * (Taylor's, 1.2e-7 at one half). What is not a number stays so. */
INLINE vec exp2_(vec x) {
    const vec magic = all(12582912.0f);                                                               /* 1.5 * 2^23 */
    const ivec nought = x < all(-126.0f);
    const vec shifted = x + magic;
    const vec part = x - (shifted - magic);
    vec y = fma_(all(1.540353e-4f), part, all(1.333356e-3f));
    y = fma_(y, part, all(9.618129e-3f));
    y = fma_(y, part, all(5.550411e-2f));
    y = fma_(y, part, all(2.402265e-1f));
    y = fma_(y, part, all(6.931472e-1f));
    y = fma_(y, part, all(1.0f));
    return (vec)(((ivec)y + ((ivec)shifted << 23)) & ~nought);
}

/* --- products of tiles ---------------------------------------------------------------------------------------------- */

/* c[rows, columns] = (or +=) a[rows, inner] * b[inner, columns], a block of ROWS rows and `wide` vectors in registers. */
INLINE void block(int wide, const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t b_row, float *c,
                  int64_t c_row, int64_t inner, int adds) {
    vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) sums[r][w] = adds ? at(c + r * c_row + w * LANES) : all(0.0f);
    for (int64_t k = 0; k < inner; k++) {
        vec row[2];
        for (int w = 0; w < wide; w++) row[w] = at(b + k * b_row + w * LANES);
        for (int r = 0; r < ROWS; r++) {
            const vec factor = all(a[r * a_row + k * a_inner]);
            for (int w = 0; w < wide; w++) sums[r][w] = fma_(factor, row[w], sums[r][w]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) put(c + r * c_row + w * LANES, sums[r][w]);
}

INLINE void blocks(const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t b_row, float *c, int64_t c_row,
                   int64_t rows, int64_t columns, int64_t inner, int adds) {
    for (int64_t column = 0; column < columns;) {
        const int wide = columns - column >= 2 * LANES ? 2 : 1;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const float *from = a + row * a_row;
            float *to = c + row * c_row + column;
            if (wide == 2) block(2, from, a_row, a_inner, b + column, b_row, to, c_row, inner, adds);
            else block(1, from, a_row, a_inner, b + column, b_row, to, c_row, inner, adds);
        }
        column += wide * LANES;
    }
}

/* a's rows lie one after the other; or, transposed, its columns. */
static void product(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t rows,
                    int64_t columns, int64_t inner, int adds) {
    if (adds) blocks(a, a_row, 1, b, b_row, c, c_row, rows, columns, inner, 1);
    else blocks(a, a_row, 1, b, b_row, c, c_row, rows, columns, inner, 0);
}

static void add_transposed(const float *a, int64_t a_inner, const float *b, int64_t b_row, float *c, int64_t c_row,
                           int64_t rows, int64_t columns, int64_t inner) {
    blocks(a, 1, a_inner, b, b_row, c, c_row, rows, columns, inner, 1);
}

/* --- tokens to float32 and back ------------------------------------------------------------------------------------- */

INLINE uint16_t *token(const job_t *job, int tensor, int64_t row, int64_t head, int64_t number) {
    const int64_t *strides = job->strides + 3 * tensor;
    const int64_t own = tensor == KEY || tensor == VALUE ? head / job->shared : head;
    return job->tensors[tensor] + row * strides[0] + own * strides[1] + number * strides[2];
}

/* Tokens [first, end) to rows of FILLED(width) floats, times `factor`, and zeros up to FILLED(end - first). */
static void widen(const job_t *job, int tensor, int64_t row, int64_t head, int64_t first, int64_t end, float factor,
                  float *out) {
    const int64_t width = job->width, pitch = FILLED(width), count = end - first;
    for (int64_t i = 0; i < count; i++, out += pitch) {
        const uint16_t *from = token(job, tensor, row, head, first + i);
        for (int64_t d = 0; d < width; d++) out[d] = bits_to_float((uint32_t)from[d] << 16) * factor;
        for (int64_t d = width; d < pitch; d++) out[d] = 0.0f;
    }
    memset(out, 0, (size_t)((FILLED(count) - count) * pitch) * sizeof *out);
}

static void narrow(const job_t *job, int tensor, int64_t row, int64_t head, int64_t first, int64_t end, float factor,
                   const float *values) {
    const int64_t width = job->width, pitch = FILLED(width);
    for (int64_t i = 0; i < end - first; i++, values += pitch) {
        uint16_t *to = token(job, tensor, row, head, first + i);
        for (int64_t d = 0; d < width; d++) to[d] = to_bf16(values[d] * factor);
    }
}

/* [count, pitch] to [pitch, TILE]. */
static void transpose(const float *in, float *out, int64_t count, int64_t pitch) {
    for (int64_t d = 0; d < pitch; d += STEP)
        for (int64_t i = 0; i < count; i++)
            for (int64_t e = d; e < d + STEP; e++) out[e * TILE + i] = in[i * pitch + e];
}

/* --- forward -------------------------------------------------------------------------------------------------------- */

INLINE float highest(const float *x, int64_t n) {
    vec best = at(x);
    for (int64_t i = LANES; i < n; i += LANES) best = most(best, at(x + i));
    float answer = best[0];
    for (int i = 1; i < LANES; i++) answer = best[i] > answer ? best[i] : answer;
    return answer;
}

/* Floats that a task needs for a document whose last query has so many tokens before it, itself among them. */
int64_t blockwalk_attention_floats(int64_t tokens, int64_t width, int backward) {
    const int64_t pitch = FILLED(width), filled = FILLED(tokens);
    if (backward) return 3 * filled * pitch + filled + 5 * TILE * pitch + 2 * TILE * TILE;
    return 2 * (filled + TILE) * pitch + 2 * TILE * pitch + TILE * TILE + 2 * TILE;
}

static void forward(const job_t *job, const int64_t *piece, int64_t head, float *scratch) {
    const int64_t row = piece[0], begin = piece[1], end = piece[3], pitch = FILLED(job->width);
    const int64_t keys = FILLED(end - begin);
    float *turned = scratch, *values = turned + (keys + TILE) * pitch, *queries = values + (keys + TILE) * pitch;
    float *out = queries + TILE * pitch, *scores = out + TILE * pitch, *peak = scores + TILE * TILE, *sum = peak + TILE;
    for (int64_t j = begin; j < end; j += TILE) {                            /* a tile of keys lies as [pitch, TILE] */
        const int64_t stop = j + TILE < end ? j + TILE : end;
        widen(job, KEY, row, head, j, stop, 1.0f, queries);
        transpose(queries, turned + (j - begin) * pitch, FILLED(stop - j), pitch);
    }
    widen(job, VALUE, row, head, begin, end, 1.0f, values);
    for (int64_t i = piece[2]; i < end; i += TILE) {
        const int64_t until = i + TILE < end ? i + TILE : end, rows = FILLED(until - i);
        widen(job, QUERY, row, head, i, until, job->scale * LOG2_E, queries);
        memset(out, 0, (size_t)(rows * pitch) * sizeof *out);
        for (int64_t r = 0; r < rows; r++) {
            peak[r] = -1e30f;
            sum[r] = 0.0f;
        }
        for (int64_t j = begin; j < until; j += TILE) {
            const int64_t stop = j + TILE < until ? j + TILE : until, columns = FILLED(stop - j);
            product(queries, pitch, turned + (j - begin) * pitch, TILE, scores, TILE, rows, columns, pitch, 0);
            for (int64_t r = 0; r < rows; r++) {
                float *line = scores + r * TILE;
                for (int64_t c = i + r < j ? 0 : i + r - j + 1; c < columns; c++) line[c] = -1e30f;
                const float best = highest(line, columns);
                const float now = best > peak[r] ? best : peak[r];
                const vec level = all(now);
                vec total = all(0.0f);
                for (int64_t c = 0; c < columns; c += LANES) {
                    const vec weight = exp2_(at(line + c) - level);
                    put(line + c, weight);
                    total += weight;
                }
                float added = 0.0f;
                for (int l = 0; l < LANES; l++) added += total[l];
                if (now != peak[r]) {
                    const vec less = exp2_(all(peak[r] - now));
                    sum[r] *= less[0];
                    for (int64_t d = 0; d < pitch; d += LANES) put(out + r * pitch + d, at(out + r * pitch + d) * less);
                    peak[r] = now;
                }
                sum[r] += added;
            }
            product(scores, TILE, values + (j - begin) * pitch, pitch, out, pitch, rows, pitch, columns, 1);
        }
        float *log_sums = job->log_sums + (row * job->heads + head) * job->tokens + i;
        for (int64_t r = 0; r < until - i; r++) {
            log_sums[r] = peak[r] + __builtin_log2f(sum[r]);
            narrow(job, OUT, row, head, i + r, i + r + 1, 1.0f / sum[r], out + r * pitch);
        }
    }
}

/* --- backward ------------------------------------------------------------------------------------------------------- */

static void backward(const job_t *job, const int64_t *piece, int64_t head, float *scratch) {
    const int64_t row = piece[0], begin = piece[1], end = piece[3], pitch = FILLED(job->width);
    const int64_t width = job->width, filled = FILLED(end - begin);
    float *queries = scratch, *grads = queries + filled * pitch, *of_queries = grads + filled * pitch;
    float *deltas = of_queries + filled * pitch, *keys = deltas + filled, *keys_turned = keys + TILE * pitch;
    float *values_turned = keys_turned + TILE * pitch, *of_keys = values_turned + TILE * pitch;
    float *of_values = of_keys + TILE * pitch, *weights = of_values + TILE * pitch, *of_scores = weights + TILE * TILE;
    const float *log_sums = job->log_sums + (row * job->heads + head) * job->tokens + begin;
    widen(job, QUERY, row, head, begin, end, job->scale * LOG2_E, queries);
    widen(job, GRAD, row, head, begin, end, 1.0f, grads);
    memset(of_queries, 0, (size_t)(filled * pitch) * sizeof *of_queries);
    for (int64_t i = 0; i < filled; i++) {
        deltas[i] = 0.0f;
        if (i >= end - begin) continue;
        const uint16_t *out = token(job, OUT, row, head, begin + i);
        float sums[LANES] = {0};
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES)
            for (int l = 0; l < LANES; l++)
                sums[l] += bits_to_float((uint32_t)out[d + l] << 16) * grads[i * pitch + d + l];
        for (; d < width; d++) deltas[i] += bits_to_float((uint32_t)out[d] << 16) * grads[i * pitch + d];
        for (int l = 0; l < LANES; l++) deltas[i] += sums[l];
    }
    for (int64_t j = begin; j < end; j += TILE) {
        const int64_t stop = j + TILE < end ? j + TILE : end, columns = FILLED(stop - j);
        widen(job, VALUE, row, head, j, stop, 1.0f, keys);
        transpose(keys, values_turned, columns, pitch);
        widen(job, KEY, row, head, j, stop, 1.0f, keys);
        transpose(keys, keys_turned, columns, pitch);
        memset(of_keys, 0, (size_t)(2 * TILE * pitch) * sizeof *of_keys);                /* of_values lie behind them */
        for (int64_t i = j; i < end; i += TILE) {
            const int64_t at_i = i - begin, rows = FILLED((i + TILE < end ? i + TILE : end) - i);
            const float *query = queries + at_i * pitch, *grad = grads + at_i * pitch;
            product(query, pitch, keys_turned, TILE, weights, TILE, rows, columns, pitch, 0);
            product(grad, pitch, values_turned, TILE, of_scores, TILE, rows, columns, pitch, 0);
            for (int64_t r = 0; r < rows; r++) {
                float *line = weights + r * TILE, *of_line = of_scores + r * TILE;
                const vec level = all(i + r < end ? log_sums[at_i + r] : 0.0f), delta = all(deltas[at_i + r]);
                for (int64_t c = 0; c < columns; c += LANES) put(line + c, exp2_(at(line + c) - level));
                if (i == j)
                    for (int64_t c = r + 1; c < columns; c++) line[c] = 0.0f;
                for (int64_t c = 0; c < columns; c += LANES)
                    put(of_line + c, at(line + c) * (at(of_line + c) - delta));
            }
            add_transposed(weights, TILE, grad, pitch, of_values, pitch, columns, pitch, rows);
            add_transposed(of_scores, TILE, query, pitch, of_keys, pitch, columns, pitch, rows);
            product(of_scores, TILE, keys, pitch, of_queries + at_i * pitch, pitch, rows, pitch, columns, 1);
        }
        narrow(job, GRAD_KEY, row, head, j, stop, LN_2, of_keys);              /* queries carry scale * log2(e) */
        narrow(job, GRAD_VALUE, row, head, j, stop, 1.0f, of_values);
    }
    narrow(job, GRAD_QUERY, row, head, begin, end, job->scale, of_queries);
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
