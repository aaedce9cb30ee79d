/* Counter-based noise, added to parameters as they are read. noise.py is the other half and holds the definition: the
 * keys, the coefficients, the numpy path with the same bits, and the tests' oracle.
 *
 * Everything is one pass over tiles that stay in the first-level cache:
 *
 *     out = cast(float32(source) + scale * z)     rounded to nearest even, or stochastically with 16 random bits
 *
 * in float32, product and sum rounded separately (compiled with -ffp-contract=off). Parameters are little-endian.
 *
 * Pieces are shared out over the threads of the OpenMP runtime that torch has already loaded, as in codecs.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDE 1
#endif

/* Words are read as draws and floats as patterns: these types may alias any other. */
typedef uint16_t __attribute__((may_alias)) draw_t;
typedef uint32_t __attribute__((may_alias)) pattern_t;

typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

enum dtype { FLOAT32, BFLOAT16, FLOAT16, UINT16, INT32 };
enum kind { NONE, GAUSSIAN, RADEMACHER };

#define TILE 2048            /* elements; LANES counters of the kind with the most draws a counter */
#define PIECE (8 * TILE)     /* elements that a thread takes at a time: microseconds of work */
#define EDGE 256             /* at most this many draws before the first one asked for, and after the last */
#define WORDS ((TILE + 2 * EDGE) / 4 + 4 * LANES)
#define LANES 8              /* counters made at once */
#define MULTIPLIER_0 0xD2E7470EE14C6C93ull
#define MULTIPLIER_1 0xCA5A826395121157ull
#define WEYL_0 0x9E3779B97F4A7C15ull
#define WEYL_1 0xBB67AE8584CAA73Bull

/* Philox 4x64-10 (Salmon et al., SC'11) of the counters (counter + i, 0, 0, 0), i < groups * LANES: 4 words each. */
#ifdef WIDE
/* 64 x 64 -> 128 bits out of four products of halves, a counter a lane: the low halves come back in `low`. */
static inline __m512i multiply_wide(__m512i a, __m512i multiplier, __m512i *low) {
    const __m512i mask = _mm512_set1_epi64(0xffffffff);
    const __m512i a_high = _mm512_srli_epi64(a, 32), m_high = _mm512_srli_epi64(multiplier, 32);
    const __m512i bottom = _mm512_mul_epu32(a, multiplier);
    const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(a_high, multiplier), _mm512_srli_epi64(bottom, 32));
    const __m512i cross = _mm512_add_epi64(_mm512_mul_epu32(a, m_high), _mm512_and_si512(middle, mask));
    const __m512i carries = _mm512_add_epi64(_mm512_srli_epi64(middle, 32), _mm512_srli_epi64(cross, 32));
    *low = _mm512_mullo_epi64(a, multiplier);
    return _mm512_add_epi64(_mm512_mul_epu32(a_high, m_high), carries);
}

#define XOR3(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)

static inline __attribute__((always_inline)) void philox(uint64_t counter, uint64_t k0, uint64_t k1, uint64_t *words,
                                                         const int groups) {
    const __m512i multiplier_0 = _mm512_set1_epi64((long long)MULTIPLIER_0);
    const __m512i multiplier_1 = _mm512_set1_epi64((long long)MULTIPLIER_1);
    __m512i a[4], b[4], c[4], d[4];
    for (int g = 0; g < groups; g++) {
        const __m512i first = _mm512_set1_epi64((long long)(counter + (uint64_t)(g * LANES)));
        a[g] = _mm512_add_epi64(first, _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
        b[g] = c[g] = d[g] = _mm512_setzero_si512();
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const __m512i key_0 = _mm512_set1_epi64((long long)k0), key_1 = _mm512_set1_epi64((long long)k1);
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++) {
            __m512i low_a, low_c;
            const __m512i high_a = multiply_wide(a[g], multiplier_0, &low_a);
            const __m512i high_c = multiply_wide(c[g], multiplier_1, &low_c);
            a[g] = XOR3(high_c, b[g], key_0);
            b[g] = low_c;
            c[g] = XOR3(high_a, d[g], key_1);
            d[g] = low_a;
        }
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    /* Transposed: the four words of counter 0, then of counter 1, ... */
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (int g = 0; g < groups; g++) {
        const __m512i ab_even = _mm512_unpacklo_epi64(a[g], b[g]), ab_odd = _mm512_unpackhi_epi64(a[g], b[g]);
        const __m512i cd_even = _mm512_unpacklo_epi64(c[g], d[g]), cd_odd = _mm512_unpackhi_epi64(c[g], d[g]);
        const __m512i even_02 = _mm512_permutex2var_epi64(ab_even, low, cd_even);
        const __m512i even_46 = _mm512_permutex2var_epi64(ab_even, high, cd_even);
        const __m512i odd_13 = _mm512_permutex2var_epi64(ab_odd, low, cd_odd);
        const __m512i odd_57 = _mm512_permutex2var_epi64(ab_odd, high, cd_odd);
        uint64_t *to = words + 4 * LANES * g;
        _mm512_storeu_si512(to, _mm512_shuffle_i64x2(even_02, odd_13, 0x44));
        _mm512_storeu_si512(to + 8, _mm512_shuffle_i64x2(even_02, odd_13, 0xee));
        _mm512_storeu_si512(to + 16, _mm512_shuffle_i64x2(even_46, odd_57, 0x44));
        _mm512_storeu_si512(to + 24, _mm512_shuffle_i64x2(even_46, odd_57, 0xee));
    }
}
#else
static inline uint64_t multiply(uint64_t a, uint64_t multiplier, uint64_t *low) {
    const unsigned __int128 product = (unsigned __int128)a * multiplier;
    *low = (uint64_t)product;
    return (uint64_t)(product >> 64);
}

static inline void philox(uint64_t counter, uint64_t k0, uint64_t k1, uint64_t *words, const int groups) {
    for (int i = 0; i < groups * LANES; i++, words += 4) {
        uint64_t a = counter + (uint64_t)i, b = 0, c = 0, d = 0, key_0 = k0, key_1 = k1;
        for (int round = 0; round < 10; round++) {
            uint64_t low_a, low_c;
            const uint64_t high_a = multiply(a, MULTIPLIER_0, &low_a);
            const uint64_t high_c = multiply(c, MULTIPLIER_1, &low_c);
            a = high_c ^ b ^ key_0;
            b = low_c;
            c = high_a ^ d ^ key_1;
            d = low_a;
            key_0 += WEYL_0;
            key_1 += WEYL_1;
        }
        words[0] = a;
        words[1] = b;
        words[2] = c;
        words[3] = d;
    }
}
#endif

/* 16-bit draws to Gaussian values; n is a multiple of 16. The table holds what the polynomial answers for each draw. */
static void gaussian(const draw_t *draws, float *z, int64_t n, const float *coefficients, const float *table) {
#ifdef WIDE
    /* Two registers hold the 32 segments of one coefficient: a permute replaces a load from the second-level cache. */
    __m512 low[4], high[4];
    for (int i = 0; i < 4; i++) {
        low[i] = _mm512_loadu_ps(coefficients + 32 * i);
        high[i] = _mm512_loadu_ps(coefficients + 32 * i + 16);
    }
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i draw = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(draws + i)));
        const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(draw, 15), 31);
        const __m512i odd = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi32(draw, 1), _mm512_set1_epi32(0xffff)),
                                            _mm512_set1_epi32(1));
        const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(odd));
        const __m512i segment = _mm512_srli_epi32(bits, 22); /* the permutes read its low five bits */
        const __m512i fraction = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x3fffff)),
                                                 _mm512_castps_si512(one));
        const __m512 t = _mm512_sub_ps(_mm512_castsi512_ps(fraction), one);
        __m512 value = _mm512_mul_ps(_mm512_permutex2var_ps(low[3], segment, high[3]), t);
        value = _mm512_add_ps(value, _mm512_permutex2var_ps(low[2], segment, high[2]));
        value = _mm512_mul_ps(value, t);
        value = _mm512_add_ps(value, _mm512_permutex2var_ps(low[1], segment, high[1]));
        value = _mm512_mul_ps(value, t);
        value = _mm512_add_ps(value, _mm512_permutex2var_ps(low[0], segment, high[0]));
        _mm512_storeu_ps(z + i, _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign)));
    }
    (void)table;
#else
    for (int64_t i = 0; i < n; i++) z[i] = table[draws[i]];
    (void)coefficients;
#endif
}

/* Bits to signs, 1 for bit 0 and -1 for bit 1; n is a multiple of 64. */
static void rademacher(const uint64_t *words, float *z, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) {
        const uint64_t word = words[i / 64];
#ifdef WIDE
        for (int j = 0; j < 4; j++)
            _mm512_storeu_ps(z + i + 16 * j, _mm512_mask_blend_ps((__mmask16)(word >> 16 * j), _mm512_set1_ps(1.0f),
                                                                  _mm512_set1_ps(-1.0f)));
#else
        pattern_t *to = (pattern_t *)(z + i);
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t signs = (uint32_t)(word >> 32 * half);
            for (uint32_t bit = 0; bit < 32; bit++)
                to[32 * half + bit] = 0x3f800000u | (signs << (31u - bit) & 0x80000000u);
        }
#endif
    }
}

/* The elements of the next tile: up to a border that is a multiple of every kind's draws a counter. */
static int64_t tile(int64_t first, int64_t left) {
    const int64_t n = TILE - first % EDGE;
    return left < n ? left : n;
}

/* The words of draws [first, first + n) of a kind with this many draws a counter, from the start of the first counter.
 * Answers how many draws in `words` come before the first one asked for. */
static int words_for(int64_t first, int64_t n, int64_t draws, uint64_t k0, uint64_t k1, uint64_t *words) {
    const int64_t counter = first / draws;
    const int64_t counters = (first + n - 1) / draws - counter + 1;
    int64_t done = 0;
    for (; done + 4 * LANES <= counters; done += 4 * LANES)
        philox((uint64_t)(counter + done), k0, k1, words + 4 * done, 4);
    for (; done < counters; done += LANES)
        philox((uint64_t)(counter + done), k0, k1, words + 4 * done, 1);
    return (int)(first - counter * draws);
}

static void load(const void *source, enum dtype dtype, int64_t at, int64_t n, float *x) {
    if (dtype == FLOAT32) {
        memcpy(x, (const float *)source + at, (size_t)n * 4);
        return;
    }
    const uint16_t *half = (const uint16_t *)source + at;
    pattern_t *bits = (pattern_t *)x;
    if (dtype == BFLOAT16) {
        for (int64_t i = 0; i < n; i++) bits[i] = (uint32_t)half[i] << 16;
        return;
    }
    int64_t i = 0;
#ifdef WIDE
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(x + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half + i))));
#endif
    for (; i < n; i++) {
        const uint32_t magnitude = half[i] & 0x7fffu;
        union { float value; uint32_t bits; } subnormal = {(float)(int32_t)magnitude * 0x1p-24f};
        const uint32_t bias = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u; /* infinities keep a full exponent */
        const uint32_t pattern = magnitude < 0x400u ? subnormal.bits : (magnitude << 13) + bias;
        bits[i] = pattern | (uint32_t)(half[i] & 0x8000u) << 16;
    }
}

/* Stochastic rounding rounds the magnitude up with the probability of its remainder: `random` is uniform in 0..65535.
 * Rounding to nearest even is the same sum with a half, less one unit where the last bit kept is even. */
static inline uint16_t to_bfloat16(uint32_t bits, uint32_t random, int stochastic) {
    const uint32_t carry = stochastic ? random : 0x7fffu + ((bits >> 16) & 1u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)((bits + carry) >> 16);
}

static inline uint16_t to_float16(uint32_t bits, uint32_t random, int stochastic) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    /* A normal result drops 13 bits of the whole pattern; a subnormal one drops `shift` bits of the significand. */
    const uint32_t normal = magnitude >= 0x38800000u;
    const uint32_t exponent = magnitude >> 23;
    const uint32_t wide = exponent >= 86u ? 126u - exponent : 40u; /* from 40 on the remainder is less than one draw */
    const uint32_t shift = normal ? 13u : wide;
    const uint32_t significand = normal ? magnitude - 0x38000000u : (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t kept = shift < 25u ? significand >> shift : 0u;
    const uint32_t dropped = shift < 25u ? significand & ((1u << shift) - 1u) : significand;
    /* The remainder in units of 2^-16 of the last place kept, and whether there is more of it below. */
    const uint32_t finer = shift < 16u ? 0u : shift - 16u;
    const uint32_t remainder = shift < 16u ? dropped << (16u - shift) : dropped >> finer;
    const uint32_t sticky = (dropped & ((1u << finer) - 1u)) != 0u;
    const uint32_t half = 2u * remainder + sticky + (kept & 1u) > 0x10000u;
    uint32_t result = kept + (stochastic ? (remainder + random) >> 16 : half);
    result = magnitude >= 0x47800000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return (uint16_t)(result | (bits >> 16 & 0x8000u));
}

static void store(const float *x, const draw_t *random, void *out, enum dtype dtype, int64_t at, int64_t n) {
    const pattern_t *bits = (const pattern_t *)x;
    if (dtype == FLOAT32) {
        memcpy((float *)out + at, x, (size_t)n * 4);
        return;
    }
    uint16_t *half = (uint16_t *)out + at;
    if (dtype == BFLOAT16) {
        if (random) for (int64_t i = 0; i < n; i++) half[i] = to_bfloat16(bits[i], random[i], 1);
        else for (int64_t i = 0; i < n; i++) half[i] = to_bfloat16(bits[i], 0, 0);
    } else {
        if (random) for (int64_t i = 0; i < n; i++) half[i] = to_float16(bits[i], random[i], 1);
        else {
            int64_t i = 0;
#ifdef WIDE
            for (; i + 16 <= n; i += 16)
                _mm256_storeu_si256((__m256i *)(half + i),
                                    _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
            for (; i < n; i++) half[i] = to_float16(bits[i], 0, 0);
        }
    }
}

/* --- what a thread does ------------------------------------------------------------------------------------------- */

typedef struct {
    const void *source;
    void *out;
    const int64_t *row_index;
    const float *coefficients, *table;
    int64_t source_stride, out_stride, rows, width, start, pitch, piece, next;
    uint64_t k0, k1, r0, r1;
    float scale, decay;
    enum dtype source_dtype, out_dtype;
    int kind, rounding;
} noise_job_t;

/* Columns [from, to) of row r. */
static void noise_row(const noise_job_t *job, int64_t r, int64_t from, int64_t to) {
    const int64_t element = job->start + (job->row_index ? job->row_index[r] : r) * job->pitch;
    const int kind = job->kind;
    const float scale = job->scale, decay = job->decay;
    uint64_t words[WORDS], rounding_words[WORDS];
    float noise[TILE + 2 * EDGE];
    float x[TILE];
    for (int64_t c = from, n; c < to; c += n) {
        n = tile(element + c, to - c);
        const float *z = noise;
        const draw_t *random = NULL;
        if (kind == GAUSSIAN) {
            const int skip = words_for(element + c, n, 16, job->k0, job->k1, words);
            gaussian((const draw_t *)words, noise, (skip + n + 15) / 16 * 16, job->coefficients, job->table);
            z += skip;
        } else if (kind == RADEMACHER) {
            const int skip = words_for(element + c, n, 256, job->k0, job->k1, words);
            rademacher(words, noise, (skip + n + 63) / 64 * 64);
            z += skip;
        }
        if (job->rounding) {
            const int skip = words_for(element + c, n, 16, job->r0, job->r1, rounding_words);
            random = (const draw_t *)rounding_words + skip;
        }
        if (job->source) load(job->source, job->source_dtype, r * job->source_stride + c, n, x);
        if (decay != 1.0f) for (int64_t i = 0; i < n; i++) x[i] *= decay;
        if (kind != NONE && job->source) for (int64_t i = 0; i < n; i++) x[i] += scale * z[i];
        if (kind != NONE && !job->source) for (int64_t i = 0; i < n; i++) x[i] = scale * z[i];
        store(x, random, job->out, job->out_dtype, r * job->out_stride + c, n);
    }
}

/* Pieces of a single row's columns, or of the rows, until none is left. */
static void noise_body(void *data) {
    noise_job_t *job = data;
    const int64_t count = job->rows == 1 ? job->width : job->rows;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&job->next, job->piece, __ATOMIC_RELAXED);
        if (from >= count) return;
        const int64_t to = from + job->piece < count ? from + job->piece : count;
        if (job->rows == 1) noise_row(job, 0, from, to);
        else for (int64_t r = from; r < to; r++) noise_row(job, r, 0, job->width);
    }
}

/* out[r, c] = cast(source[r, c] + scale * z[e]), e = start + row(r) * pitch + c, row(r) = row_index ? row_index[r] : r.
 *
 * source: float32, bfloat16 or float16, strides in elements between rows, or NULL for zero (then out = scale * z).
 * kind NONE leaves z out. rounding != 0 rounds to 16 bits stochastically, with the draws e of the key (r0, r1).
 * coefficients: 4 x 32 floats; table: 65536 floats.
 * parallel: GOMP_parallel of the running OpenMP, or NULL; threads: at most this many. */
void blockwalk_noise(const void *source, int source_dtype, int64_t source_stride, void *out, int out_dtype,
                     int64_t out_stride, int64_t rows, int64_t width, int64_t start, int64_t pitch,
                     const int64_t *row_index, int kind, uint64_t k0, uint64_t k1, float scale, int rounding,
                     uint64_t r0, uint64_t r1, const float *coefficients, const float *table, parallel_fn parallel,
                     int threads) {
    if (rows <= 0 || width <= 0) return;
    noise_job_t job = {source, out, row_index, coefficients, table, source_stride, out_stride, rows, width, start, pitch,
                       rows == 1 ? PIECE : PIECE / width + 1, 0, k0, k1, r0, r1, scale, 1.0f,
                       (enum dtype)source_dtype, (enum dtype)out_dtype, kind, rounding};
    if (parallel == NULL || threads < 2) noise_body(&job);
    else parallel(noise_body, &job, (unsigned)threads, 0);
}

/* One tensor of many: count elements that follow each other, in the parameter from element `start` on. */
typedef struct {
    const void *source;
    void *out;
    int64_t count, start;
    uint64_t k0, k1, r0, r1;
    float scale, decay;
    int32_t source_dtype, out_dtype, rounding, unused;
} run_t;

/* out = cast(source * decay + scale * z) for each run in turn: product, product and sum rounded separately. A step has
 * hundreds of short vectors, and each call from Python takes longer than the work on one.
 *
 * thread_elements: a thread gets at least this many; the rest as in blockwalk_noise. */
void blockwalk_noise_runs(const run_t *runs, int64_t count, int kind, const float *coefficients, const float *table,
                          parallel_fn parallel, int threads, int64_t thread_elements) {
    for (const run_t *run = runs; run < runs + count; run++) {
        if (run->count <= 0) continue;
        noise_job_t job = {run->source, run->out, NULL, coefficients, table, 0, 0, 1, run->count, run->start, 0,
                           PIECE, 0, run->k0, run->k1, run->r0, run->r1, run->scale, run->decay,
                           (enum dtype)run->source_dtype, (enum dtype)run->out_dtype, kind, run->rounding};
        const int64_t most = run->count / thread_elements;
        const int team = most < threads ? (int)most : threads;
        if (parallel == NULL || team < 2) noise_body(&job);
        else parallel(noise_body, &job, (unsigned)team, 0);
    }
}

typedef struct {
    void *out;
    int64_t count, start, next;
    uint64_t k0, k1;
    int out_dtype;
} draws_job_t;

static void draws_body(void *data) {
    draws_job_t *job = data;
    uint64_t words[WORDS];
    for (;;) {
        const int64_t from = __atomic_fetch_add(&job->next, PIECE, __ATOMIC_RELAXED);
        const int64_t to = from + PIECE < job->count ? from + PIECE : job->count;
        if (from >= job->count) return;
        for (int64_t c = from, n; c < to; c += n) {
            n = tile(job->start + c, to - c);
            const draw_t *draws = (const draw_t *)words + words_for(job->start + c, n, 16, job->k0, job->k1, words);
            if (job->out_dtype == UINT16) memcpy((uint16_t *)job->out + c, draws, (size_t)n * 2);
            else for (int64_t i = 0; i < n; i++) ((int32_t *)job->out)[c + i] = draws[i];
        }
    }
}

/* out[i] = the 16-bit draw start + i of the key, as uint16 or int32. */
void blockwalk_draws(void *out, int out_dtype, int64_t count, int64_t start, uint64_t k0, uint64_t k1,
                     parallel_fn parallel, int threads) {
    draws_job_t job = {out, count, start, 0, k0, k1, out_dtype};
    if (parallel == NULL || threads < 2) draws_body(&job);
    else parallel(draws_body, &job, (unsigned)threads, 0);
}

typedef struct {
    float *out;
    const float *left, *right, *scales;
    int64_t terms, rows, columns, rank, piece, next;
} products_job_t;

static void products_body(void *data) {
    products_job_t *job = data;
    const int64_t rank = job->rank, columns = job->columns;
    float z[TILE];
    for (;;) {
        const int64_t from = __atomic_fetch_add(&job->next, job->piece, __ATOMIC_RELAXED);
        if (from >= job->rows) return;
        const int64_t to = from + job->piece < job->rows ? from + job->piece : job->rows;
        for (int64_t r = from; r < to; r++) {
            for (int64_t c = 0, n; c < columns; c += n) {
                float *x = job->out + r * columns + c;
                n = columns - c < TILE ? columns - c : TILE;
                for (int64_t q = 0; q < job->terms; q++) {
                    const float *a = job->left + (q * job->rows + r) * rank, scale = job->scales[q];
                    const float *b = job->right + q * rank * columns + c;
                    for (int64_t i = 0; i < n; i++) z[i] = a[0] * b[i];
                    for (int64_t k = 1; k < rank; k++)
                        for (int64_t i = 0; i < n; i++) z[i] += a[k] * b[k * columns + i];
                    for (int64_t i = 0; i < n; i++) x[i] += scale * z[i];
                }
            }
        }
    }
}

/* out[r, c] += scales[q] * sum over k of left[q, r, k] * right[q, k, c], for each of the terms q in turn, in float32, each
 * product and sum rounded by itself in the order of k: the bits do not depend on the range. */
void blockwalk_add_products(float *out, int64_t rows, int64_t columns, int64_t terms, int64_t rank, const float *left,
                            const float *right, const float *scales, parallel_fn parallel, int threads) {
    if (rows <= 0 || columns <= 0) return;
    products_job_t job = {out, left, right, scales, terms, rows, columns, rank, PIECE / columns + 1, 0};
    if (parallel == NULL || threads < 2) products_body(&job);
    else parallel(products_body, &job, (unsigned)threads, 0);
}
