/* Vectors of floats as the processor has them, in GCC's and clang's terms, for kernels that round as they like. */

#pragma once

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
#define LANE_NUMBERS ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif defined(__AVX2__)
#define LANES 8
#define LANE_NUMBERS ((ivec){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define LANES 4
#define LANE_NUMBERS ((ivec){0, 1, 2, 3})
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float from_bf16(uint16_t bits) { return bits_to_float((uint32_t)bits << 16); }

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

/* Lane i + n of x in lane i, around the end. */
INLINE vec turned_by(vec x, int n) {
#ifdef __clang__
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = x[(i + n) % LANES];
    return y;
#else
    return __builtin_shuffle(x, (LANE_NUMBERS + n) & (LANES - 1));
#endif
}

INLINE float sum_of(vec x) {
    for (int apart = LANES / 2; apart; apart /= 2) x += turned_by(x, apart);
    return x[0];
}

/* The first `count` lanes, and noughts. */
INLINE vec up_to(vec x, int64_t count) {
    return (vec)((ivec)x & (LANE_NUMBERS < (int32_t)count - (ivec){0}));
}

#define LOG2_E 1.44269504088896340736f

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
