/* Runs every kernel of blockwalk.numerics.native on the same numbers, and prints a checksum of what each wrote: a program for
 * processors that the tests' Python does not run on. Its argument is a file with the coefficients and the table of the Gaussian. */
#include <stdint.h>
#include <stdio.h>

typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
void blockwalk_noise(const void *, int, int64_t, void *, int, int64_t, int64_t, int64_t, int64_t, int64_t, const int64_t *, int,
                     uint64_t, uint64_t, float, int, uint64_t, uint64_t, const float *, const float *, parallel_fn, int);
void blockwalk_draws(void *, int, int64_t, int64_t, uint64_t, uint64_t, parallel_fn, int);
void blockwalk_decode(int, int, int, const void *, const void *, int64_t, int64_t, const int64_t *, int64_t, int64_t, int64_t,
                      int64_t, void *, parallel_fn, int);
void blockwalk_encode(int, const float *, const uint16_t *, float *, uint8_t *, int64_t, int64_t, parallel_fn, int);
void blockwalk_encode_groups(int, int, int, const void *, const float *, uint8_t *, int64_t, int64_t, uint8_t *, int64_t, int64_t,
                             int64_t, int64_t, parallel_fn, int);
void blockwalk_largest(int, const void *, int64_t, float *);

enum { ROWS = 3, COLUMNS = 1536, ALL = ROWS * COLUMNS };
static float coefficients[128], table[65536], x[ALL], out[ALL], scales[ROWS];
static uint16_t draws[ALL], halves[ALL / 32];
static uint8_t codes[2 * ALL];

static void say(const char *what, int a, int b, const void *data, int64_t bytes) {
    uint64_t sum = 14695981039346656037ull;
    for (int64_t i = 0; i < bytes; i++) sum = (sum ^ ((const uint8_t *)data)[i]) * 1099511628211ull;
    printf("%s %d %d %016llx\n", what, a, b, (unsigned long long)sum);
}

int main(int count, char **arguments) {
    FILE *file = count > 1 ? fopen(arguments[1], "rb") : NULL;
    if (!file || fread(coefficients, 4, 128, file) != 128 || fread(table, 4, 65536, file) != 65536) return 2;
    const int64_t index[ROWS] = {0, 1, 2}, row_bytes[] = {COLUMNS, COLUMNS, COLUMNS / 2, 18 * COLUMNS / 32, 20 * COLUMNS / 32,
                                                          34 * COLUMNS / 32, 144 * COLUMNS / 256, 210 * COLUMNS / 256};
    uint64_t state = 1;
    for (int i = 0; i < 2 * ALL; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        codes[i] = (uint8_t)(state >> 40) & 0xbf;            /* 16-bit scales among them are finite */
        if (i < ALL) x[i] = (float)(int32_t)(state >> 32) * 1e-9f;
        if (i < ALL / 32) halves[i] = (uint16_t)(state >> 33) & 0x3fff;
    }
    blockwalk_draws(draws, 3, ALL, 7, 11, 13, NULL, 1);
    say("draws", 0, 0, draws, sizeof draws);
    for (int kind = 0; kind < 3; kind++)
        for (int dtype = 0; dtype < 3; dtype++)
            for (int rounding = 0; rounding < 2; rounding++) {
                blockwalk_noise(x, 0, COLUMNS, out, dtype, COLUMNS, ROWS, COLUMNS, 5, COLUMNS, index, kind, 17, 19, 0.37f, rounding, 23,
                                29, coefficients, table, NULL, 1);
                say("noise", kind, 2 * dtype + rounding, out, dtype ? 2 * ALL : 4 * ALL);
            }
    for (int codec = 0; codec < 8; codec++)
        for (int dtype = 0; dtype < 3; dtype++) {
            for (int i = 0; i < ROWS; i++) scales[i] = 0.003f * (float)(i + 1);
            blockwalk_decode(codec, 16, dtype, codec == 2 ? (void *)halves : (void *)scales, codes, row_bytes[codec],
                             codec == 2 ? COLUMNS / 32 : 1, NULL, 0, ROWS, 3, COLUMNS - 5, out, NULL, 1);
            say("decode", codec, dtype, out, (int64_t)(dtype == 2 ? 4 : 2) * ROWS * (COLUMNS - 8));
        }
    for (int codec = 0; codec < 2; codec++)
        for (int random = 0; random < 2; random++) {
            blockwalk_encode(codec, x, random ? draws : NULL, scales, codes, ROWS, COLUMNS, NULL, 1);
            say("encode", codec, random, codes, ALL);
            say("scales", codec, random, scales, sizeof scales);
        }
    float borders[15], largest[3];
    for (int i = 0; i < 15; i++) borders[i] = -0.93f + 0.13f * (float)i;
    const int formats[5][3] = {{2, 32, 2}, {2, 64, 2}, {4, 32, 4}, {8, 32, 4}, {8, 64, 4}};        /* codec, group, scales' bytes */
    for (int i = 0; i < 5; i++) {
        const int size = formats[i][1], groups = COLUMNS / size, of_scales = formats[i][2], block = of_scales + size / 2;
        blockwalk_encode_groups(formats[i][0], size, 2, x, borders, codes, groups * block, block, codes + of_scales, groups * block,
                                block, ROWS, COLUMNS - 7, NULL, 1);
        say("groups", formats[i][0], size, codes, ROWS * groups * block);
    }
    for (int dtype = 0; dtype < 3; dtype++) blockwalk_largest(dtype, dtype == 2 ? (void *)x : (void *)draws, ALL, largest + dtype);
    say("largest", 0, 0, largest, sizeof largest);
    return 0;
}
