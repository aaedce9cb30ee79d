/* Products of bfloat16 matrices on a processor that adds up pairs of such numbers (vdpbf16ps), for
 * numerics/native_products.py; elsewhere this file is empty. So it is where there are tiles of them (AMX), whose products
 * a library makes several times as fast.
 *
 * The answer's columns are taken WIDE at a time. Their part of b, a panel, is packed into the thread's memory as the
 * instruction reads it: a unit is two numbers that are neighbours in the sum. Rows of a go over it, ROWS at a time in
 * registers. A sum is float32, in one order over its whole length, whatever lies beside it; the answer is rounded once.
 *
 * Nothing is allocated and nothing is kept.
 */

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include "vectors.h"

#define WIDE 32
#define ROWS 14
#define JOINT 2                              /* panels of columns in codes that are decoded at once: they share lines of cache */

typedef struct {
    const uint16_t *numbers;
    int64_t pitch;                           /* numbers from one row to the next */
    int turned;                              /* rows are what the product calls columns */
} matrix_t;

/* A matrix in codes: blockwalk_decode of codecs.c, and what it takes of one. */
typedef struct {
    void (*decode)(int codec, int half, int dtype, const void *scales, const void *codes, int64_t row_bytes,
                   int64_t row_scales, const int64_t *index, int64_t start, int64_t rows, int64_t first, int64_t last,
                   void *out, parallel_fn parallel, int threads);
    const void *scales, *codes;
    int64_t row_bytes, row_scales, first_row;
    int codec, half;
} encoded_t;

typedef struct {
    matrix_t a, b;
    const encoded_t *encoded;                /* b where it has no numbers */
    matrix_t thin_a, thin_b;                 /* [rows, thin], [thin, columns]: their product goes into the same sums */
    int64_t thin;
    const uint16_t *bias;
    uint16_t *out;
    int64_t out_pitch, rows, inner, columns;
    int64_t chunk;                           /* rows of a task, a multiple of WIDE unless it is all */
    uint32_t *scratch;                       /* of each thread panels: of b, of a turned, and JOINT of decoded numbers */
    int64_t next_task, next_thread;
    float alpha;
    int adds;
} job_t;

INLINE int64_t pairs_of(int64_t inner) { return (inner + 1) / 2; }

/* --- panels --------------------------------------------------------------------------------------------------------- */

/* Up to 16 rows of 16 units to 16 rows of the panel. */
INLINE void turn(const uint16_t *from, int64_t pitch, uint32_t *to, int rows) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_loadu_si512(from + i * pitch) : _mm512_setzero_si512();
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + i * WIDE, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 4) * WIDE, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 8) * WIDE, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 12) * WIDE, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
}

/* Rows of pairs as they lie: [count, inner] to [pairs, WIDE] units. */
static void pack_rows(const uint16_t *from, int64_t pitch, int64_t count, int64_t inner, uint32_t *panel) {
    const int64_t turned = inner & ~31;
    for (int64_t half = 0; half < count; half += LANES, from += LANES * pitch, panel += LANES) {
        const int rows = count - half < LANES ? (int)(count - half) : LANES;
        for (int64_t i = 0; i < turned; i += 32) {
            if (rows == LANES) turn(from + i, pitch, panel + i / 2 * WIDE, LANES);
            else turn(from + i, pitch, panel + i / 2 * WIDE, rows);
        }
        for (int64_t i = turned; i < inner; i += 2)
            for (int row = 0; row < LANES; row++) {
                uint32_t unit = 0;
                if (row < rows) memcpy(&unit, from + row * pitch + i, i + 1 < inner ? 4 : 2);
                panel[i / 2 * WIDE + row] = unit;
            }
    }
}

/* Rows of which two make pairs: [inner, count] to [pairs, WIDE] units. */
static void pack_columns(const uint16_t *from, int64_t pitch, int64_t count, int64_t inner, uint32_t *panel) {
    const __mmask32 some = count >= WIDE ? 0xFFFFFFFFu : (1u << count) - 1;
    for (int64_t i = 0; i < inner; i += 2, from += 2 * pitch, panel += WIDE) {
        const __m512i first = _mm512_maskz_loadu_epi16(some, from);
        const __m512i second = _mm512_maskz_loadu_epi16(i + 1 < inner ? some : 0, from + pitch);
        for (int half = 0; half < 2; half++) {
            const __m256i low = half ? _mm512_extracti64x4_epi64(first, 1) : _mm512_castsi512_si256(first);
            const __m256i high = half ? _mm512_extracti64x4_epi64(second, 1) : _mm512_castsi512_si256(second);
            const __m512i units = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                                  _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            _mm512_storeu_si512(panel + half * LANES, units);
        }
    }
}

/* --- products ------------------------------------------------------------------------------------------------------- */

/* Up to 16 numbers as floats. */
INLINE __m512 widened(const uint16_t *numbers, __mmask16 some) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, numbers)), 16);
}

/* One unit of each of `rows` rows, `bytes` of it, times the panel's. */
INLINE void step(__m512 sums[ROWS][2], int rows, int vectors, const uint16_t *a, int64_t row_step, const uint32_t *panel,
                 size_t bytes) {
    __m512bh of_b[2];
    for (int v = 0; v < vectors; v++) of_b[v] = (__m512bh)_mm512_loadu_si512(panel + v * LANES);
    for (int r = 0; r < rows; r++) {
        int32_t unit = 0;
        memcpy(&unit, a + r * row_step, bytes);
        const __m512bh of_a = (__m512bh)_mm512_set1_epi32(unit);
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], of_a, of_b[v]);
    }
}

/* Units of a lie `unit_step` numbers apart, its rows `row_step`; a packed row is filled up. */
INLINE void add_up(__m512 sums[ROWS][2], int rows, int vectors, const uint16_t *a, int64_t row_step, int64_t unit_step,
                   const uint32_t *panel, int64_t inner, int packed) {
    const int64_t whole = packed ? pairs_of(inner) : inner / 2;
    for (int64_t k = 0; k < whole; k++)
        step(sums, rows, vectors, a + k * unit_step, row_step, panel + k * WIDE, 4);
    if (whole < pairs_of(inner))
        step(sums, rows, vectors, a + whole * unit_step, row_step, panel + whole * WIDE, 2);
}

/* `rows` rows of the answer in a panel's columns; the thin panel lies behind it. */
INLINE void block(const job_t *job, int rows, int vectors, const uint16_t *a, int64_t row_step, int64_t unit_step,
                  const uint32_t *panel, int64_t row, int64_t column) {
    __m512 sums[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
    add_up(sums, rows, vectors, a, row_step, unit_step, panel, job->inner, job->a.turned);
    if (job->thin)
        add_up(sums, rows, vectors, job->thin_a.numbers + row * job->thin_a.pitch, job->thin_a.pitch, 2,
               panel + pairs_of(job->inner) * WIDE, job->thin, 0);
    for (int v = 0; v < vectors; v++) {
        const int64_t place = column + v * LANES, left = job->columns - place;
        const __mmask16 some = left >= LANES ? 0xFFFF : (__mmask16)((1u << left) - 1);
        const __m512 bias = job->bias ? widened(job->bias + place, some) : _mm512_setzero_ps();
        for (int r = 0; r < rows; r++) {
            uint16_t *to = job->out + (row + r) * job->out_pitch + place;
            const __m512 sum = _mm512_mul_ps(sums[r][v], _mm512_set1_ps(job->alpha));
            const __m512 answer = _mm512_add_ps(sum, job->adds ? widened(to, some) : bias);
            _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(answer));
        }
    }
}

INLINE void blocks(const job_t *job, int vectors, const uint16_t *a, int64_t row_step, int64_t unit_step,
                   const uint32_t *panel, int64_t first, int64_t end, int64_t column) {
    int64_t row = first;
    for (; row + ROWS <= end; row += ROWS, a += ROWS * row_step)
        block(job, ROWS, vectors, a, row_step, unit_step, panel, row, column);
    for (; row + 4 <= end; row += 4, a += 4 * row_step)
        block(job, 4, vectors, a, row_step, unit_step, panel, row, column);
    for (; row < end; row++, a += row_step) block(job, 1, vectors, a, row_step, unit_step, panel, row, column);
}

/* Rows [first, end) of the answer in the columns of a panel. */
static void rows_of(const job_t *job, const uint32_t *panel, uint32_t *panel_of_a, int64_t first, int64_t end,
                    int64_t column) {
    const int narrow = job->columns - column <= LANES;
    const matrix_t *a = &job->a;
    if (!a->turned) {
        if (narrow) blocks(job, 1, a->numbers + first * a->pitch, a->pitch, 2, panel, first, end, column);
        else blocks(job, 2, a->numbers + first * a->pitch, a->pitch, 2, panel, first, end, column);
        return;
    }
    for (int64_t row = first; row < end; row += WIDE) {
        const int64_t stop = row + WIDE < end ? row + WIDE : end;
        const uint16_t *packed = (const uint16_t *)panel_of_a;
        pack_columns(a->numbers + row, a->pitch, stop - row, job->inner, panel_of_a);
        if (narrow) blocks(job, 1, packed, 2, 2 * WIDE, panel, row, stop, column);
        else blocks(job, 2, packed, 2, 2 * WIDE, panel, row, stop, column);
    }
}

/* `count` columns from `column` of a matrix of `inner` rows, as units. */
static void pack(const matrix_t *b, int64_t inner, int64_t column, int64_t count, uint32_t *panel) {
    if (b->turned) pack_rows(b->numbers + column * b->pitch, b->pitch, count, inner, panel);
    else pack_columns(b->numbers + column, b->pitch, count, inner, panel);
}

/* `count` columns from `column` of b in codes, decoded as they lie: rows of codes where b is turned. */
static matrix_t decode(const job_t *job, int64_t column, int64_t count, uint16_t *decoded) {
    const encoded_t *e = job->encoded;
    const int turned = job->b.turned;
    const int64_t first = turned ? column : 0, rows = turned ? count : job->inner;
    const int64_t left = turned ? 0 : column, width = turned ? job->inner : count;
    e->decode(e->codec, e->half, 0, e->scales, e->codes, e->row_bytes, e->row_scales, NULL, e->first_row + first, rows, left,
              left + width, decoded, NULL, 1);
    return (matrix_t){decoded, width, turned};
}

/* What every thread runs: take the next panels in the next rows until none is left. */
static void body(void *data) {
    job_t *job = data;
    const int64_t units = pairs_of(job->inner) * WIDE, thin_units = pairs_of(job->thin) * WIDE;
    const int64_t at_once = job->encoded && !job->b.turned ? JOINT * WIDE : WIDE;
    const int64_t parts = (job->columns + at_once - 1) / at_once;
    const int64_t number = __atomic_fetch_add(&job->next_thread, 1, __ATOMIC_RELAXED);
    uint32_t *panel = job->scratch + ((2 + JOINT) * units + thin_units) * number, *panel_of_a = panel + units + thin_units;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED);
        const int64_t row = task / parts * job->chunk, left = task % parts * at_once;
        if (row >= job->rows) return;
        const int64_t end = row + job->chunk < job->rows ? row + job->chunk : job->rows;
        const int64_t right = left + at_once < job->columns ? left + at_once : job->columns;
        matrix_t decoded = {0};
        if (job->encoded) decoded = decode(job, left, right - left, (uint16_t *)(panel_of_a + units));
        for (int64_t column = left; column < right; column += WIDE) {
            const int64_t count = right - column < WIDE ? right - column : WIDE;
            if (job->encoded) pack(&decoded, job->inner, column - left, count, panel);
            else pack(&job->b, job->inner, column, count, panel);
            if (job->thin) pack(&job->thin_b, job->thin, column, count, panel + units);
            rows_of(job, panel, panel_of_a, row, end, column);
        }
    }
}

/* out[rows, columns] = alpha * (a[rows, inner] * b[inner, columns] + thin_a[rows, thin] * thin_b[thin, columns]) + (out, or
 * bias, or nothing). A matrix lies turned where its columns are the rows of its memory; thin_a does not. */
void blockwalk_product(const uint16_t *a, int64_t a_pitch, int a_turned, const uint16_t *b, int64_t b_pitch, int b_turned,
                       const encoded_t *encoded, const uint16_t *thin_a, int64_t thin_a_pitch, const uint16_t *thin_b,
                       int64_t thin_b_pitch, int thin_b_turned, int64_t thin, const uint16_t *bias, uint16_t *out,
                       int64_t out_pitch, int64_t rows, int64_t inner, int64_t columns, int64_t chunk, uint32_t *scratch,
                       float alpha, int adds, parallel_fn parallel, int threads) {
    job_t job = {{a, a_pitch, a_turned}, {b, b_pitch, b_turned}, encoded, {thin_a, thin_a_pitch, 0},
                 {thin_b, thin_b_pitch, thin_b_turned}, thin, bias, out, out_pitch, rows, inner, columns, chunk, scratch,
                 0, 0, alpha, adds};
    if (parallel == NULL || threads < 2) body(&job);
    else parallel(body, &job, (unsigned)threads, 0);
}

#endif
