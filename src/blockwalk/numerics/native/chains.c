/* Chains of element-wise operations on bfloat16 numbers in one pass each, for numerics/chains.py: RMSNorm, SwiGLU and GeGLU,
 * and rotary positions. What a chain's operations round to bfloat16 is rounded here, and a sum has one order: the bits are
 * every processor's.
 *
 * Rows are shared out over the threads of torch's own team. Nothing is allocated and nothing is kept.
 */

#include <math.h>

#include "vectors.h"

#define SUMS 16                              /* that a row is added up in */

typedef struct {
    const uint16_t *a, *b, *grad;
    uint16_t *out, *other;
    float *scales;                           /* of each row 1 / sqrt(mean square + eps) */
    int64_t rows, width;
    float eps;
    int kind;
    int64_t next;
} job_t;

enum { NORM, NORM_BACKWARD, LESS_ONE, LESS_ONE_BACKWARD, SILU, SILU_BACKWARD, GELU, GELU_BACKWARD };

INLINE float total(const float *sums) {
    float sum = 0.0f;
    for (int l = 0; l < SUMS; l++) sum += sums[l];
    return sum;
}

INLINE float rounded(float x) { return from_bf16(to_bf16(x)); }

/* A norm's answer of x = a * scale and its weight b: as Llama's, b * x with x rounded; as Gemma's, whose weight is kept less
 * one, x * (1 + b). */
INLINE float weighted(float x, uint16_t b, int less_one) {
    return less_one ? x * (1.0f + from_bf16(b)) : from_bf16(b) * rounded(x);
}

/* The gradient of x. */
INLINE float unweighted(uint16_t grad, uint16_t b, int less_one) {
    return less_one ? from_bf16(grad) * (1.0f + from_bf16(b)) : rounded(from_bf16(grad) * from_bf16(b));
}

INLINE void norm(const uint16_t *restrict a, const uint16_t *restrict b, uint16_t *restrict out, float *scale, int64_t width,
                 float eps, int less_one) {
    float sums[SUMS] = {0};
    int64_t d = 0;
    for (; d + SUMS <= width; d += SUMS)
        for (int l = 0; l < SUMS; l++) sums[l] += from_bf16(a[d + l]) * from_bf16(a[d + l]);
    for (; d < width; d++) sums[d % SUMS] += from_bf16(a[d]) * from_bf16(a[d]);
    const float factor = 1.0f / sqrtf(total(sums) / (float)width + eps);
    *scale = factor;
    for (d = 0; d < width; d++) out[d] = to_bf16(weighted(from_bf16(a[d]) * factor, b[d], less_one));
}

/* The gradient of a, with that of x as g: g * scale - a * scale^3 * mean(g * a). */
INLINE void norm_backward(const uint16_t *restrict a, const uint16_t *restrict b, const uint16_t *restrict grad,
                          uint16_t *restrict out, float scale, int64_t width, int less_one) {
    float sums[SUMS] = {0};
    int64_t d = 0;
    for (; d + SUMS <= width; d += SUMS)
        for (int l = 0; l < SUMS; l++) sums[l] += unweighted(grad[d + l], b[d + l], less_one) * from_bf16(a[d + l]);
    for (; d < width; d++) sums[d % SUMS] += unweighted(grad[d], b[d], less_one) * from_bf16(a[d]);
    const float shift = scale * scale * scale * (total(sums) / (float)width);
    for (d = 0; d < width; d++)
        out[d] = to_bf16(unweighted(grad[d], b[d], less_one) * scale - from_bf16(a[d]) * shift);
}

/* 1 / (1 + e^-x), of e^-|x|: 2 to the nearest integer by the exponent, to the rest by Taylor's polynomial. */
INLINE float sigmoid(float x) {
    const float exponent = fabsf(x) * -LOG2_E, least = exponent < -126.0f ? -126.0f : exponent;
    const float shifted = least + 12582912.0f;                                                        /* 1.5 * 2^23 */
    const float part = least - (shifted - 12582912.0f);
    float y = 1.540353e-4f * part + 1.333356e-3f;
    y = y * part + 9.618129e-3f;
    y = y * part + 5.550411e-2f;
    y = y * part + 2.402265e-1f;
    y = y * part + 6.931472e-1f;
    y = y * part + 1.0f;
    uint32_t bits, power;
    memcpy(&bits, &y, 4);
    memcpy(&power, &shifted, 4);
    y = bits_to_float(bits + (power << 23));
    return (x < 0.0f ? y : 1.0f) / (1.0f + y);
}

/* Both activations are x * sigmoid(v): silu with v = x, and gelu's approximation by tanh with this v, sqrt(8 / pi) times
 * (x + 0.044715 x^3). Beyond 32 its sigmoid is 0 or 1, and x^3 might have no number. */
#define GELU_SCALE 1.5957691216f
#define GELU_CUBE 0.044715f

INLINE float clamped(float x) { return x > 32.0f ? 32.0f : x < -32.0f ? -32.0f : x; }

/* sigmoid(v) */
INLINE float part_of(float x, int gelu) {
    const float inner = clamped(x);
    return sigmoid(gelu ? GELU_SCALE * inner * (1.0f + GELU_CUBE * inner * inner) : x);
}

/* dv / dx */
INLINE float slope(float x, int gelu) {
    const float inner = clamped(x);
    return gelu ? GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * inner * inner) : 1.0f;
}

/* out = activation(a) * b. */
INLINE void gate(const uint16_t *restrict a, const uint16_t *restrict b, uint16_t *restrict out, int64_t width, int gelu) {
    for (int64_t d = 0; d < width; d++) {
        const float x = from_bf16(a[d]);
        out[d] = to_bf16(rounded(x * part_of(x, gelu)) * from_bf16(b[d]));
    }
}

/* The gradients of a and b. */
INLINE void gate_backward(const uint16_t *restrict a, const uint16_t *restrict b, const uint16_t *restrict grad,
                          uint16_t *restrict of_a, uint16_t *restrict of_b, int64_t width, int gelu) {
    for (int64_t d = 0; d < width; d++) {
        const float x = from_bf16(a[d]), g = from_bf16(grad[d]), part = part_of(x, gelu);
        of_b[d] = to_bf16(g * rounded(x * part));
        of_a[d] = to_bf16(rounded(g * from_bf16(b[d])) * (part * (1.0f + x * slope(x, gelu) * (1.0f - part))));
    }
}

/* out = x * cosine + (-second half, first half) * sine; turned back, its transpose: the gradient of x. */
INLINE void rotate(const uint16_t *restrict x, const uint16_t *restrict cosine, const uint16_t *restrict sine,
                   uint16_t *restrict out, int64_t half, int back) {
    for (int64_t d = 0; d < half; d++) {
        const float first = from_bf16(x[d]), second = from_bf16(x[d + half]);
        const float to_first = rounded(second * from_bf16(sine[back ? d + half : d]));
        const float to_second = rounded(first * from_bf16(sine[back ? d : d + half]));
        const float own = rounded(first * from_bf16(cosine[d])), other = rounded(second * from_bf16(cosine[d + half]));
        out[d] = to_bf16(back ? own + to_first : own - to_first);
        out[d + half] = to_bf16(back ? other - to_second : other + to_second);
    }
}

typedef struct {
    const uint16_t *x, *cosine, *sine;
    uint16_t *out;
    const int64_t *strides;                  /* rows, heads, tokens of x; the same of out; rows and tokens of cosine, of sine */
    int64_t rows, heads, tokens, width;
    int back;
    int64_t next;
} turn_t;

static void turn_body(void *data) {
    turn_t *job = data;
    const int64_t *of = job->strides, at_once = 16384 / (job->width * job->heads) + 1;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&job->next, at_once, __ATOMIC_RELAXED);
        if (first >= job->rows * job->tokens) return;
        const int64_t end = first + at_once < job->rows * job->tokens ? first + at_once : job->rows * job->tokens;
        for (int64_t place = first; place < end; place++) {
            const int64_t row = place / job->tokens, token = place % job->tokens;
            const uint16_t *x = job->x + row * of[0] + token * of[2];
            const uint16_t *cosine = job->cosine + row * of[6] + token * of[7];
            const uint16_t *sine = job->sine + row * of[8] + token * of[9];
            uint16_t *out = job->out + row * of[3] + token * of[5];
            for (int64_t head = 0; head < job->heads; head++) {
                if (job->back) rotate(x + head * of[1], cosine, sine, out + head * of[4], job->width / 2, 1);
                else rotate(x + head * of[1], cosine, sine, out + head * of[4], job->width / 2, 0);
            }
        }
    }
}

/* x and out [rows, heads, tokens, width], cosine and sine [rows, tokens, width], features side by side. */
void blockwalk_rotary(const uint16_t *x, const uint16_t *cosine, const uint16_t *sine, uint16_t *out, const int64_t *strides,
                      int64_t rows, int64_t heads, int64_t tokens, int64_t width, int back, parallel_fn parallel,
                      int threads) {
    turn_t job = {x, cosine, sine, out, strides, rows, heads, tokens, width, back, 0};
    if (parallel == NULL || threads < 2) turn_body(&job);
    else parallel(turn_body, &job, (unsigned)threads, 0);
}

/* What every thread runs: take the next rows until none are left. */
static void body(void *data) {
    job_t *job = data;
    const int64_t width = job->width, at_once = 16384 / width + 1;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&job->next, at_once, __ATOMIC_RELAXED);
        if (first >= job->rows) return;
        const int64_t end = first + at_once < job->rows ? first + at_once : job->rows;
        for (int64_t row = first; row < end; row++) {
            const int64_t place = row * width;
            const uint16_t *a = job->a + place, *b = job->b + place, *grad = job->grad + place;
            uint16_t *out = job->out + place;
            switch (job->kind) {
                case NORM: norm(a, job->b, out, job->scales + row, width, job->eps, 0); break;
                case NORM_BACKWARD: norm_backward(a, job->b, grad, out, job->scales[row], width, 0); break;
                case LESS_ONE: norm(a, job->b, out, job->scales + row, width, job->eps, 1); break;
                case LESS_ONE_BACKWARD: norm_backward(a, job->b, grad, out, job->scales[row], width, 1); break;
                case SILU: gate(a, b, out, width, 0); break;
                case SILU_BACKWARD: gate_backward(a, b, grad, out, job->other + place, width, 0); break;
                case GELU: gate(a, b, out, width, 1); break;
                case GELU_BACKWARD: gate_backward(a, b, grad, out, job->other + place, width, 1); break;
            }
        }
    }
}

/* Matrices [rows, width], all without gaps; a norm's b is its weight [width]. */
void blockwalk_chain(int kind, const uint16_t *a, const uint16_t *b, const uint16_t *grad, uint16_t *out, uint16_t *other,
                     float *scales, int64_t rows, int64_t width, float eps, parallel_fn parallel, int threads) {
    job_t job = {a, b, grad, out, other, scales, rows, width, eps, kind, 0};
    if (parallel == NULL || threads < 2 || rows < 2) body(&job);
    else parallel(body, &job, (unsigned)threads, 0);
}
