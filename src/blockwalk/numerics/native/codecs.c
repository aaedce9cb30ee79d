/* Decoding of quantised weights, and encoding where a walk writes them back, for numerics/codecs/codecs.py.
 *
 * Every function here has a twin in torch with the same bits: values are the float32 product of an integer code (or an
 * e4m3 number) and its scale, rounded to nearest even in the output dtype. The layout is described in numerics/codecs/layout.py.
 *
 * Nothing is allocated and nothing is kept. Rows are shared out over the threads of the OpenMP runtime that torch has
 * already loaded: its GOMP_parallel comes as a pointer, so that this file links against nothing and starts no threads
 * of its own beside torch's.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDE 1
#endif

enum { FP8 = 0, INT8 = 1, INT4 = 2, Q4_0 = 3, Q4_1 = 4, Q8_0 = 5, Q4_K = 6, Q6_K = 7,
       NF4 = 8 };                             /* codec; the last one is encoded here, and decoded by torch */
enum { BF16 = 0, FP16 = 1, FP32 = 2 };       /* dtype of the output */

typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Finite values only: the encoder refuses the others. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits = float_to_bits(x);
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

/* float16 to float32: the exponent is moved by a product, which also makes subnormals right. */
static inline float from_fp16(uint16_t half) {
    float magnitude = bits_to_float((uint32_t)(half & 0x7FFFu) << 13) * 0x1p112f;
    return half & 0x8000u ? -magnitude : magnitude;
}

/* n <= 16 scales as float32. */
static inline void widen(const uint16_t *halves, float *out, int64_t n) {
#ifdef WIDE
    const __mmask16 some = (__mmask16)(0xFFFFu >> (16 - n));
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, halves)));
#else
    for (int64_t i = 0; i < n; i++) out[i] = from_fp16(halves[i]);
#endif
}

/* float32 to float16, to nearest even, overflowing to infinity as torch does. */
static inline uint16_t to_fp16(float x) {
    uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u;
    bits &= 0x7FFFFFFFu;
    if (bits >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);       /* 65520 and above */
    if (bits < 0x38800000u)                                           /* subnormal: the addition rounds for us */
        return (uint16_t)(sign | (float_to_bits(bits_to_float(bits) + 0.5f) - 0x3F000000u));
    return (uint16_t)(sign | ((bits - 0x38000000u + 0xFFFu + ((bits >> 13) & 1u)) >> 13));
}

static inline void put(void *out, int64_t i, float x, int dtype) {
    if (dtype == BF16) ((uint16_t *)out)[i] = to_bf16(x);
    else if (dtype == FP16) ((uint16_t *)out)[i] = to_fp16(x);
    else ((float *)out)[i] = x;
}

/* --- int4: one group, `half` bytes of codes, first half of the group in the low nibbles --------------------------- */

#ifdef WIDE

/* Two vectors of values as 32 words. vcvtne2ps2bf16 takes subnormals for zero: no caller passes any. */
static inline __m512i words32(__m512 a, __m512 b, int dtype) {
    if (dtype == FP16) {
        const int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(a, nearest));
        return _mm512_inserti64x4(low, _mm512_cvtps_ph(b, nearest), 1);
    }
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
#else
    const __m512i one = _mm512_set1_epi32(1), below = _mm512_set1_epi32(0x7FFF);
    __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    x = _mm512_add_epi32(_mm512_add_epi32(x, below), _mm512_and_si512(_mm512_srli_epi32(x, 16), one));
    y = _mm512_add_epi32(_mm512_add_epi32(y, below), _mm512_and_si512(_mm512_srli_epi32(y, 16), one));
    __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
    return _mm512_inserti64x4(low, _mm512_cvtepi32_epi16(_mm512_srli_epi32(y, 16)), 1);
#endif
}

static inline void put32(void *out, int64_t i, __m512 a, __m512 b, int dtype) {
    if (dtype == FP32) {
        _mm512_storeu_ps((float *)out + i, a);
        _mm512_storeu_ps((float *)out + i + 16, b);
    } else {
        _mm512_storeu_si512((uint16_t *)out + i, words32(a, b, dtype));
    }
}

/* A group has one scale, so its values are one of sixteen: they are computed once, then permuted into place. */
static inline void nibbles(const uint8_t *codes, __m512 values, int half, void *out, int dtype) {
    if (dtype == FP32) {
        float *low = out, *high = low + half;
        for (int i = 0; i < half; i += 16) {
            __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
            _mm512_storeu_ps(low + i, _mm512_permutexvar_ps(bytes, values));
            _mm512_storeu_ps(high + i, _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values));
        }
        return;
    }
    /* Indices are the low 4 bits of a word: no masks. Halves of 16 words suit processors whose 512 bits are two turns. */
    const __m256i table = _mm512_castsi512_si256(words32(values, values, dtype));
    __m256i *low = out, *high = (__m256i *)((uint16_t *)out + half);
    for (int i = 0; i < half / 16; i++) {
        __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes + i));
        _mm256_storeu_si256(low + i, _mm256_permutexvar_epi16(bytes, table));
        _mm256_storeu_si256(high + i, _mm256_permutexvar_epi16(_mm256_srli_epi16(bytes, 4), table));
    }
}

static inline void int4_group(const uint8_t *codes, float d, int half, void *out, int dtype) {
    const __m512 steps = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    nibbles(codes, _mm512_mul_ps(steps, _mm512_set1_ps(d)), half, out, dtype);
}

/* A block of Q4_0 (d, codes) or Q4_1 (d, m, codes): the two scales are widened at once. */
static inline void nibble_block(const uint8_t *b, int codec, void *out, int dtype) {
    uint32_t scales;
    memcpy(&scales, b, 4);
    const __m128 widened = _mm_cvtph_ps(_mm_cvtsi32_si128((int)scales));
    if (codec == Q4_0) {
        int4_group(b + 2, _mm_cvtss_f32(widened), 16, out, dtype);
        return;
    }
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 scaled = _mm512_mul_ps(steps, _mm512_broadcastss_ps(widened));
    nibbles(b + 4, _mm512_add_ps(scaled, _mm512_broadcastss_ps(_mm_movehdup_ps(widened))), 16, out, dtype);
}

#else

/* In two loops over a local block: compilers vectorise each of them, but not the one that does both. */
static inline void int4_group(const uint8_t *restrict codes, float d, int half, void *restrict out, int dtype) {
    float values[64];
    for (int i = 0; i < half; i++) values[i] = (float)((int)(codes[i] & 15) - 8) * d;
    for (int i = 0; i < half; i++) values[half + i] = (float)((int)(codes[i] >> 4) - 8) * d;
    for (int i = 0; i < 2 * half; i++) put(out, i, values[i], dtype);
}

#endif

/* Columns [first, last) of one row into out. */
static inline void int4_row(const uint8_t *codes, const uint16_t *scales, int64_t first, int64_t last, int half,
                            void *out, int dtype) {
    const int64_t group = 2 * half, size = dtype == FP32 ? 4 : 2;
    uint8_t *to = out;
    int64_t column = first;
    while (column < last) {
        const int64_t g = column / group, begin = column - g * group, left = last - column;
        if (begin == 0 && left >= group) {
            float d[16];                                               /* sixteen groups at a time */
            const int64_t groups = left / group < 16 ? left / group : 16;
            widen(scales + g, d, groups);
            for (int64_t k = 0; k < groups; k++)
                int4_group(codes + (g + k) * half, d[k], half, to + k * group * size, dtype);
            to += groups * group * size;
            column += groups * group;
        } else {                                                       /* a range that cuts a group, or padding */
            float whole[64];
            const int64_t take = group - begin < left ? group - begin : left;
            int4_group(codes + g * half, from_fp16(scales[g]), half, whole, dtype);
            memcpy(to, (uint8_t *)whole + begin * size, (size_t)(take * size));
            to += take * size;
            column += take;
        }
    }
}

/* --- int8 and fp8: one scale a row -------------------------------------------------------------------------------- */

static inline void int8_row(const int8_t *restrict codes, float scale, int64_t n, void *restrict out, int dtype) {
    int64_t i = 0;
#ifdef WIDE
    const int64_t whole = scale >= 0x1p-126f ? n & ~31 : 0;           /* no subnormal products: see words32 */
    for (; i < whole; i += 32) {
        __m512i a = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
        __m512i b = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i + 16)));
        put32(out, i, _mm512_mul_ps(_mm512_cvtepi32_ps(a), _mm512_set1_ps(scale)),
              _mm512_mul_ps(_mm512_cvtepi32_ps(b), _mm512_set1_ps(scale)), dtype);
    }
#endif
    for (; i < n; i++) put(out, i, (float)codes[i] * scale, dtype);
}

#ifdef WIDE

/* e4m3 has float16's form with an exponent one bit shorter, of bias 7 instead of 15: shifted into place it reads as
 * 2^-8 times the value, subnormals included. */
static inline __m512 from_e4m3(const uint8_t *codes, float scale_256) {
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(bytes, 7), 15);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x7F)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(scale_256));
}

#endif

static inline void fp8_row(const uint8_t *restrict codes, float scale, int64_t n, void *restrict out, int dtype) {
    int64_t i = 0;
#ifdef WIDE
    const int64_t whole = scale >= 0x1p-117f ? n & ~31 : 0;           /* the least e4m3 number is 2^-9 */
    for (; i < whole; i += 32)
        put32(out, i, from_e4m3(codes + i, scale * 256.0f), from_e4m3(codes + i + 16, scale * 256.0f), dtype);
#endif
    for (; i < n; i++) {                                               /* the same in float32's form: 2^-120 */
        float magnitude = bits_to_float((uint32_t)(codes[i] & 0x7Fu) << 20) * 0x1p120f;
        put(out, i, (codes[i] & 0x80u ? -magnitude : magnitude) * scale, dtype);
    }
}

/* --- blocks of GGUF: scales and codes of a group together (numerics/codecs/blocks.py) ------------------------------ */

static inline int block_elements(int codec) { return codec >= Q4_K ? 256 : 32; }

static inline int block_bytes(int codec) {
    return codec == Q4_0 ? 18 : codec == Q4_1 ? 20 : codec == Q8_0 ? 34 : codec == Q4_K ? 144 : 210;
}

static inline float half_at(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return from_fp16(bits);
}

/* The scale and the minimum of part j, six bits each, in q4_k's twelve bytes. */
static inline void six_bits(const uint8_t *s, int j, float *scale, float *minimum) {
    *scale = (float)(j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    *minimum = (float)(j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4);
}

/* A block's values. Every loop has a constant length, and none mixes two scales: compilers vectorise them. */
static inline __attribute__((always_inline)) void block_values(const uint8_t *restrict b, float *restrict y, int codec) {
    if (codec == Q4_0) {
        const float d = half_at(b);
        for (int i = 0; i < 16; i++) y[i] = (float)((int)(b[2 + i] & 15) - 8) * d;
        for (int i = 0; i < 16; i++) y[16 + i] = (float)((int)(b[2 + i] >> 4) - 8) * d;
    } else if (codec == Q4_1) {
        const float d = half_at(b), m = half_at(b + 2);
        for (int i = 0; i < 16; i++) y[i] = (float)(b[4 + i] & 15) * d + m;
        for (int i = 0; i < 16; i++) y[16 + i] = (float)(b[4 + i] >> 4) * d + m;
    } else if (codec == Q8_0) {
        const float d = half_at(b);
        for (int i = 0; i < 32; i++) y[i] = (float)(int8_t)b[2 + i] * d;
    } else if (codec == Q4_K) {
        const float d = half_at(b), least = half_at(b + 2);
        for (int j = 0; j < 8; j++) {
            const uint8_t *q = b + 16 + 32 * (j / 2);
            const int shift = 4 * (j % 2);
            float scale, minimum;
            six_bits(b + 4, j, &scale, &minimum);
            scale *= d;
            minimum *= least;
            for (int i = 0; i < 32; i++) y[32 * j + i] = (float)(q[i] >> shift & 15) * scale - minimum;
        }
    } else {
        const float d = half_at(b + 208);
        for (int j = 0; j < 16; j++) {                                 /* part j: half n, quarter k, 16 elements at l */
            const int n = j / 8, k = j / 2 % 4, l = 16 * (j % 2);
            const uint8_t *low = b + 64 * n + 32 * (k % 2) + l, *high = b + 128 + 32 * n + l;
            const float scale = d * (float)(int8_t)b[192 + j];
            for (int i = 0; i < 16; i++)
                y[16 * j + i] = (float)((int)((low[i] >> 4 * (k / 2) & 15) | (high[i] >> 2 * k & 3) << 4) - 32) * scale;
        }
    }
}

/* Columns [first, last) of one row into out. */
static inline __attribute__((always_inline)) void block_row(const uint8_t *row, int64_t first, int64_t last, int codec,
                                                            void *out, int dtype) {
    const int elements = block_elements(codec);
    const int64_t start = first / elements * elements;
    const uint8_t *b = row + start / elements * block_bytes(codec);
    for (int64_t at = start; at < last; at += elements, b += block_bytes(codec)) {
#ifdef WIDE
        if ((codec == Q4_0 || codec == Q4_1) && at >= first && at + 32 <= last) {
            nibble_block(b, codec, (uint8_t *)out + (at - first) * (dtype == FP32 ? 4 : 2), dtype);
            continue;
        }
#endif
        float y[256];
        block_values(b, y, codec);
        const int64_t from = at < first ? first - at : 0, to = last - at < elements ? last - at : elements;
        if (dtype == FP32) {
            memcpy((float *)out + (at + from - first), y + from, (size_t)(to - from) * 4);
            continue;
        }
        int64_t i = from;
#ifdef WIDE
        for (; i + 32 <= to; i += 32)                                  /* no value is subnormal: see words32 */
            put32(out, at + i - first, _mm512_loadu_ps(y + i), _mm512_loadu_ps(y + i + 16), dtype);
#endif
        for (; i < to; i++) put(out, at + i - first, y[i], dtype);
    }
}

/* --- a range of rows ---------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *scales, *codes;
    const int64_t *index;                    /* rows by name, or NULL for start, start + 1, ... */
    uint8_t *out;
    int64_t start, rows, first, last, row_bytes, row_scales;
    int64_t prefetched;                      /* rows before this one fetch the row AHEAD of them */
    int64_t piece, next;
    int codec, half, dtype;
} job_t;

/* Some columns of many rows, or rows in any order, are short runs far apart: no hardware prefetcher follows them.
 * Always inlined: gcc takes a function that only prefetches for one without effect and drops the call. */
static inline __attribute__((always_inline)) void prefetch_row(const job_t *job, int64_t i, int codec, int half) {
    const int64_t row = job->index ? job->index[i] : job->start + i;
    int64_t first = codec == INT4 ? job->first / 2 : job->first, last = codec == INT4 ? job->last / 2 : job->last;
    if (codec >= Q4_0) {
        first = first / block_elements(codec) * block_bytes(codec);
        last = (last + block_elements(codec) - 1) / block_elements(codec) * block_bytes(codec);
    }
    const uint8_t *codes = job->codes + row * job->row_bytes;
    for (int64_t at = first; at < last; at += 64) __builtin_prefetch(codes + at);
    __builtin_prefetch(codes + last - 1);
    if (codec == INT4)
        __builtin_prefetch((const uint16_t *)job->scales + row * job->row_scales + job->first / (2 * half));
}

static inline void decode_row(const job_t *job, int64_t i, int codec, int half, int dtype) {
    const int64_t row = job->index ? job->index[i] : job->start + i, n = job->last - job->first;
    const uint8_t *codes = job->codes + row * job->row_bytes;
    void *out = job->out + i * n * (dtype == FP32 ? 4 : 2);
    if (codec >= Q4_0) {
        block_row(codes, job->first, job->last, codec, out, dtype);
        return;
    }
    if (codec == INT4) {
        int4_row(codes, (const uint16_t *)job->scales + row * job->row_scales, job->first, job->last, half, out, dtype);
        return;
    }
    const float scale = ((const float *)job->scales)[row];
    if (codec == INT8) int8_row((const int8_t *)codes + job->first, scale, n, out, dtype);
    else fp8_row(codes + job->first, scale, n, out, dtype);
}

enum { AHEAD = 16 };                         /* rows: a microsecond or so, a few times the latency of memory */

/* The constants are spelled out so that each case compiles to its own loop. */
#define CASE(codec_, half_, dtype_)                                                                \
    if (job->codec == codec_ && (codec_ != INT4 || job->half == half_) && job->dtype == dtype_) {  \
        for (int64_t i = from; i < to; i++) {                                                      \
            if (i < job->prefetched) prefetch_row(job, i + AHEAD, codec_, half_);                  \
            decode_row(job, i, codec_, half_, dtype_);                                             \
        }                                                                                          \
    }
#define CASES(codec_, half_) CASE(codec_, half_, BF16) CASE(codec_, half_, FP16) CASE(codec_, half_, FP32)

/* What every thread runs: take the next piece until none is left. */
static void decode_body(void *data) {
    job_t *job = data;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&job->next, job->piece, __ATOMIC_RELAXED);
        if (from >= job->rows) return;
        const int64_t to = from + job->piece < job->rows ? from + job->piece : job->rows;
        CASES(INT4, 16)
        CASES(INT4, 32)
        CASES(INT8, 0)
        CASES(FP8, 0)
        CASES(Q4_0, 0)
        CASES(Q4_1, 0)
        CASES(Q8_0, 0)
        CASES(Q4_K, 0)
        CASES(Q6_K, 0)
    }
}

/* Columns [first, last) of `rows` rows, densely into out [rows, last - first].
 *   scales, codes   the two parts of the encoded parameter; row_bytes and row_scales are their strides per row. Of blocks, codes
 *                   alone
 *   index           int64 row numbers, or NULL for start, start + 1, ...
 *   half            int4 only: half of the group size, 16 or 32
 *   parallel        GOMP_parallel of the running OpenMP, or NULL; threads: at most this many */
void blockwalk_decode(int codec, int half, int dtype, const void *scales, const void *codes, int64_t row_bytes,
                      int64_t row_scales, const int64_t *index, int64_t start, int64_t rows, int64_t first, int64_t last,
                      void *out, parallel_fn parallel, int threads) {
    const int64_t columns = last - first;
    if (rows <= 0 || columns <= 0) return;
    /* 16 K elements a piece: microseconds of work, and a few pieces for each thread to even out. */
    const int64_t whole = codec >= Q4_0 ? row_bytes / block_bytes(codec) * block_elements(codec)
                                        : codec == INT4 ? 2 * row_bytes : row_bytes;
    const int scattered = index != NULL || columns < whole;
    job_t job = {scales, codes, index, out, start, rows, first, last, row_bytes, row_scales,
                 scattered ? rows - AHEAD : 0, 16384 / columns + 1, 0, codec, half, dtype};
    if (parallel == NULL || threads < 2 || job.piece >= rows) decode_body(&job);
    else parallel(decode_body, &job, (unsigned)threads, 0);
}

/* --- encoding fp8 and int8 ---------------------------------------------------------------------------------------- */

typedef struct {
    const float *x;
    const uint16_t *draws;                   /* one for each element, or NULL: to nearest even */
    float *scales;
    uint8_t *codes;
    int64_t rows, columns, piece, next;
    int codec;
} encode_job_t;

/* |step| in units of a grid, rounded: away from zero where the remainder, in 2^-16, and the draw make a whole. */
static inline int32_t round_units(float units, uint32_t draw, int stochastic) {
    if (!stochastic) return (int32_t)__builtin_rintf(units);
    int32_t whole = (int32_t)units;
    return whole + ((int32_t)__builtin_rintf((units - (float)whole) * 65536.0f) + (int32_t)draw >= 65536);
}

static inline void encode_row(const float *restrict x, const uint16_t *restrict draws, float *restrict scale,
                              uint8_t *restrict codes, int64_t n, int codec, int stochastic) {
    uint32_t top = 0;                        /* magnitudes compare as integers */
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = float_to_bits(x[i]) & 0x7FFFFFFFu;
        top = bits > top ? bits : top;
    }
    *scale = bits_to_float(top) / (codec == FP8 ? 448.0f : 127.0f);
    const float divisor = *scale == 0.0f ? __builtin_inff() : *scale;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t draw = stochastic ? draws[i] : 0;
        const uint32_t bits = float_to_bits(x[i] / divisor), sign = bits >> 31;
        const float magnitude = bits_to_float(bits & 0x7FFFFFFFu);
        if (codec == INT8) {
            int32_t code = round_units(magnitude, draw, stochastic);
            code = code > 127 ? 127 : code;
            codes[i] = (uint8_t)(sign ? -code : code);
        } else {
            /* Units of 2^(exponent - 3), the exponent not below -6: 8 to 16 of them, fewer for subnormals, so that a
             * carry into the next exponent comes out of the sum by itself. */
            int32_t exponent = (int32_t)((bits >> 23) & 0xFFu) - 127;
            exponent = exponent < -6 ? -6 : exponent;
            const float units = magnitude * bits_to_float((uint32_t)(127 + 3 - exponent) << 23);
            int32_t code = ((exponent + 6) << 3) + round_units(units, draw, stochastic);
            code = code > 0x7E ? 0x7E : code;
            codes[i] = (uint8_t)((uint32_t)code | sign << 7);
        }
    }
}

#define ENCODE(codec_, stochastic_)                                                                       \
    if (job->codec == codec_ && (job->draws != NULL) == stochastic_) {                                    \
        for (int64_t row = from, at = from * job->columns; row < to; row++, at += job->columns)           \
            encode_row(job->x + at, stochastic_ ? job->draws + at : NULL, job->scales + row,              \
                       job->codes + at, job->columns, codec_, stochastic_);                               \
    }

static void encode_body(void *data) {
    encode_job_t *job = data;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&job->next, job->piece, __ATOMIC_RELAXED);
        if (from >= job->rows) return;
        const int64_t to = from + job->piece < job->rows ? from + job->piece : job->rows;
        ENCODE(FP8, 0)
        ENCODE(FP8, 1)
        ENCODE(INT8, 0)
        ENCODE(INT8, 1)
    }
}

/* Rows of finite float32 x [rows, columns] to scales [rows] and codes [rows, columns]; draws [rows, columns] or NULL. */
void blockwalk_encode(int codec, const float *x, const uint16_t *draws, float *scales, uint8_t *codes, int64_t rows,
                      int64_t columns, parallel_fn parallel, int threads) {
    if (rows <= 0 || columns <= 0) return;
    encode_job_t job = {x, draws, scales, codes, rows, columns, 16384 / columns + 1, 0, codec};
    if (parallel == NULL || threads < 2 || job.piece >= rows) encode_body(&job);
    else parallel(encode_body, &job, (unsigned)threads, 0);
}

/* --- encoding groups of four bits --------------------------------------------------------------------------------- */

typedef struct {
    const void *x;
    uint8_t *scales, *codes;
    const float *borders;                    /* of nf4: between neighbouring levels */
    int64_t rows, columns, groups;
    int64_t scale_row, scale_group, code_row, code_group;        /* bytes from one to the next */
    int64_t piece, next;
    int codec, dtype, size;
} group_job_t;

/* Elements of a group as float32, noughts after a row's last. */
static inline void take_group(const group_job_t *job, int64_t first, int64_t count, float *restrict out, int size) {
    if (job->dtype == FP32) {
        memcpy(out, (const float *)job->x + first, (size_t)count * 4);
    } else if (job->dtype == BF16) {
        const uint16_t *halves = (const uint16_t *)job->x + first;
        for (int64_t i = 0; i < count; i++) out[i] = bits_to_float((uint32_t)halves[i] << 16);
    } else {
        const uint16_t *halves = (const uint16_t *)job->x + first;
        for (int64_t i = 0; i < count; i++) out[i] = from_fp16(halves[i]);
    }
    for (int64_t i = count; i < size; i++) out[i] = 0.0f;
}

/* The largest magnitude of n contiguous numbers of a dtype, as float32; not a number where one of them is none. */
void blockwalk_largest(int dtype, const void *x, int64_t n, float *out) {
    uint32_t top = 0;                        /* magnitudes compare as integers, what is no number above infinity */
    if (dtype == FP32) {
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = ((const uint32_t *)x)[i] & 0x7FFFFFFFu;
            top = bits > top ? bits : top;
        }
        *out = bits_to_float(top);
        return;
    }
    uint16_t half = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t bits = ((const uint16_t *)x)[i] & 0x7FFFu;
        half = bits > half ? bits : half;
    }
    if (dtype == BF16) *out = bits_to_float((uint32_t)half << 16);
    else *out = half >= 0x7C00u ? bits_to_float(0x7F800000u | (uint32_t)(half & 0x3FFu) << 13) : from_fp16(half);
}

/* Integers in the order of the floats that they stand for, and back: compilers make vectors of their least and largest. */
static inline int32_t in_order(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

/* Of noughts of both signs torch keeps the first. */
static inline float first_nought(float extreme, const float *x) {
    if (extreme != 0.0f) return extreme;
    while (*x != 0.0f) x++;
    return *x;
}

static inline void extremes(const float *restrict x, int size, float *low, float *high) {
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int i = 0; i < size; i++) {
        const int32_t key = in_order((int32_t)float_to_bits(x[i]));
        least = key < least ? key : least;
        most = key > most ? key : most;
    }
    *low = first_nought(bits_to_float((uint32_t)in_order(least)), x);
    *high = first_nought(bits_to_float((uint32_t)in_order(most)), x);
}

static inline float or_infinity(float divisor) { return divisor == 0.0f ? __builtin_inff() : divisor; }

static inline void put_half(uint8_t *out, uint16_t half) { memcpy(out, &half, 2); }

static inline void encode_group(const float *restrict x, uint8_t *restrict scale, uint8_t *restrict bytes,
                                const float *restrict borders, int codec, int size) {
    uint8_t code[64];
    if (codec == NF4) {
        uint32_t top = 0;                    /* magnitudes compare as integers */
        float unit[64];
        int32_t passed[64];
        for (int i = 0; i < size; i++) {
            const uint32_t bits = float_to_bits(x[i]) & 0x7FFFFFFFu;
            top = bits > top ? bits : top;
        }
        memcpy(scale, &top, 4);
        const float divisor = or_infinity(bits_to_float(top));
        for (int i = 0; i < size; i++) unit[i] = x[i] / divisor, passed[i] = 0;
        for (int k = 0; k < 15; k++)
            for (int i = 0; i < size; i++) passed[i] += !(borders[k] >= unit[i]);
        for (int i = 0; i < size; i++) code[i] = (uint8_t)passed[i];
        for (int i = 0; i < size / 2; i++) bytes[i] = (uint8_t)(code[2 * i] << 4 | code[2 * i + 1]);
        return;
    }
    float low, high;
    extremes(x, size, &low, &high);
    if (codec == INT4) {
        const uint16_t half = to_fp16((high >= -low ? high : low) / -8.0f);
        const float divisor = or_infinity(from_fp16(half));
        put_half(scale, half);
        for (int i = 0; i < size; i++) {
            float step = __builtin_rintf(x[i] / divisor);
            step = step < -8.0f ? -8.0f : step > 7.0f ? 7.0f : step;
            code[i] = (uint8_t)((int32_t)step + 8);
        }
    } else {
        const float d = (high - low) / 15.0f, divisor = or_infinity(d);
        put_half(scale, to_fp16(d));
        put_half(scale + 2, to_fp16(low));
        for (int i = 0; i < size; i++) {
            float step = (x[i] - low) / divisor + 0.5f;
            step = step < 0.0f ? 0.0f : step > 15.0f ? 15.0f : step;
            code[i] = (uint8_t)(int32_t)step;
        }
    }
    for (int i = 0; i < size / 2; i++) bytes[i] = (uint8_t)(code[i] | code[i + size / 2] << 4);
}

#define ENCODE_GROUPS(codec_, size_)                                                                      \
    if (job->codec == codec_ && job->size == size_) {                                                     \
        for (int64_t row = from; row < to; row++)                                                         \
            for (int64_t group = 0; group < job->groups; group++) {                                       \
                const int64_t begin = group * size_, rest = job->columns - begin;                         \
                take_group(job, row * job->columns + begin, rest < size_ ? rest : size_, x, size_);       \
                encode_group(x, job->scales + row * job->scale_row + group * job->scale_group,            \
                             job->codes + row * job->code_row + group * job->code_group, job->borders,    \
                             codec_, size_);                                                              \
            }                                                                                             \
    }

static void encode_groups_body(void *data) {
    group_job_t *job = data;
    float x[64];
    for (;;) {
        const int64_t from = __atomic_fetch_add(&job->next, job->piece, __ATOMIC_RELAXED);
        if (from >= job->rows) return;
        const int64_t to = from + job->piece < job->rows ? from + job->piece : job->rows;
        ENCODE_GROUPS(INT4, 32)
        ENCODE_GROUPS(INT4, 64)
        ENCODE_GROUPS(Q4_1, 32)
        ENCODE_GROUPS(NF4, 32)
        ENCODE_GROUPS(NF4, 64)
    }
}

/* Rows of finite x [rows, columns], contiguous, of a dtype, to the scales and codes of groups of `size` elements. Both
 * are given by the bytes from one row to the next, and from one group to the next: blocks may be interleaved. */
void blockwalk_encode_groups(int codec, int size, int dtype, const void *x, const float *borders, uint8_t *scales,
                             int64_t scale_row, int64_t scale_group, uint8_t *codes, int64_t code_row,
                             int64_t code_group, int64_t rows, int64_t columns, parallel_fn parallel, int threads) {
    if (rows <= 0 || columns <= 0) return;
    group_job_t job = {x, scales, codes, borders, rows, columns, (columns + size - 1) / size, scale_row, scale_group,
                       code_row, code_group, 16384 / columns + 1, 0, codec, dtype, size};
    if (parallel == NULL || threads < 2 || job.piece >= rows) encode_groups_body(&job);
    else parallel(encode_groups_body, &job, (unsigned)threads, 0);
}
