/* Products with weights of 4, 5 and 8 bits, as panels.py lays them out: panels of 16 outputs, blocks of 32 columns.
 *
 * x is brought to whole numbers by blocks of 32 columns of a row: 16 bits each, as two planes of signed bytes (256 * high
 * + low), so that all sums within a block are exact. A block's sum is then scaled in float32. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define BLOCK 32
#define PANEL 16
#define WORDS 8                  /* of 4 columns in a block */
#define STEP (PANEL * 4)         /* bytes of a word of all outputs */
#define VECTORS (STEP / WIDTH)   /* that hold them */
#define HALF_PANEL ((VECTORS + 1) / 2)
#define LANES (WIDTH / 4)
#define PLANES 2
#define BASE 256
#define LARGEST (127 * BASE + 127)
#define ROWS 4                   /* whose sums fit into registers at once */
#define FEW 3                    /* rows for which weights are unpacked in registers */
#define PARALLEL_FROM 16384      /* multiply-adds, below which one thread is quicker than two */

typedef long long index_t;
typedef int8_t bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef uint8_t ubytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int32_t ints __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef float floats __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

enum scale_kind { FLOAT, HALF, BFLOAT };

/* acc[i] += the sum over 4 bytes of w[4i + b] * x[4 * word + b]; `small` says that no weight is negative. */
#if defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t quad; /* 4 words of a row of x */
INLINE quad load_quad(const int8_t *x) { return vld1q_s8(x); }
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    (void)small;
    switch (word) {
    case 0: return (ints)vdotq_laneq_s32((int32x4_t)acc, (int8x16_t)w, x, 0);
    case 1: return (ints)vdotq_laneq_s32((int32x4_t)acc, (int8x16_t)w, x, 1);
    case 2: return (ints)vdotq_laneq_s32((int32x4_t)acc, (int8x16_t)w, x, 2);
    default: return (ints)vdotq_laneq_s32((int32x4_t)acc, (int8x16_t)w, x, 3);
    }
}
#else
typedef const int8_t *quad;
INLINE quad load_quad(const int8_t *x) { return x; }
INLINE int32_t word_of(quad x, const int word) {
    int32_t value;
    memcpy(&value, x + 4 * word, 4);
    return value;
}
#if defined(__AVX512BW__)
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    __m512i weights = (__m512i)w, inputs = _mm512_set1_epi32(word_of(x, word));
    if (!small) {
        inputs = _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), inputs);
        weights = _mm512_abs_epi8(weights);
    }
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, weights, inputs);
#else
    __m512i pairs = _mm512_maddubs_epi16(weights, inputs);
    return acc + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#endif
}
#elif defined(__AVX2__)
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    __m256i weights = (__m256i)w, inputs = _mm256_set1_epi32(word_of(x, word));
    if (!small) {
        inputs = _mm256_sign_epi8(inputs, weights);
        weights = _mm256_abs_epi8(weights);
    }
#if defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, weights, inputs);
#else
    __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
    return acc + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
#else
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    (void)small;
    for (int b = 0; b < 4; b++) acc += (((ints)w << (24 - 8 * b)) >> 24) * x[4 * word + b];
    return acc;
}
#endif
#endif

/* Numbers as float32: of IEEE halves all but infinities, exactly. */
INLINE floats load_scales(const void *scales, index_t at, const enum scale_kind kind) {
    if (kind == FLOAT) return *(const floats *)((const float *)scales + at);
#if defined(__ARM_FEATURE_DOTPROD)
    if (kind == HALF) return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)scales + at)));
#endif
    ints wide = __builtin_convertvector(*(const halves *)((const uint16_t *)scales + at), ints);
    if (kind == BFLOAT) return (floats)(wide << 16);
    return (floats)(((wide & 0x7fff) << 13) | ((wide & 0x8000) << 16)) * 0x1p112f;
}

INLINE bytes load_bytes(const uint8_t *p) { return *(const bytes *)p; }

/* A word of all outputs from packed codes. Codes of 4 bits lie two to a byte, 4 words apart; the fifth bits of a byte's 8
 * words lie together behind them. */
INLINE bytes unpack(const uint8_t *block, const int word, const int vector, const int bits) {
    if (bits == 8) return load_bytes(block + word * STEP + vector * WIDTH);
    ubytes both = (ubytes)load_bytes(block + word % 4 * STEP + vector * WIDTH);
    ubytes code = both & 15;
    if (word >= 4) code = both >> 4;
    if (bits == 5) {
        ubytes high = (ubytes)load_bytes(block + 4 * STEP + vector * WIDTH);
        code |= ((high >> word) & 1) << 4;
    }
    return (bytes)code;
}

INLINE index_t block_bytes(const int bits) { return STEP * bits; }

/* One row of x in whole numbers: blocks of [planes][32] bytes, for each the scale and the sum of its numbers, and what
 * that sum stands for. */
struct input {
    int8_t *codes;
    float *scales, *shares;
    int32_t *sums;
};

static void round_row(const float *x, index_t columns, struct input out) {
    for (index_t at = 0; at < columns; at += BLOCK) {
        float values[BLOCK] = {0}, largest = 0;
        int32_t whole[BLOCK], sum = 0;
        memcpy(values, x + at, (columns - at < BLOCK ? columns - at : BLOCK) * sizeof(float));
        for (int i = 0; i < BLOCK; i++) largest = fmaxf(largest, fabsf(values[i]));
        float scale = largest / LARGEST, inverse = largest > 0x1p-100f ? LARGEST / largest : 0;
        for (int i = 0; i < BLOCK; i++) whole[i] = (int32_t)rintf(values[i] * inverse);
        for (int i = 0; i < BLOCK; i++) {
            int32_t high = (whole[i] + BASE / 2) >> 8, low = whole[i] - BASE * high;
            low = low < -127 ? -127 : low; /* some processors cannot negate -128 */
            out.codes[PLANES * at + i] = high;
            out.codes[PLANES * at + BLOCK + i] = low;
            sum += BASE * high + low;
        }
        out.scales[at / BLOCK] = scale;
        out.sums[at / BLOCK] = sum;
        out.shares[at / BLOCK] = scale * sum;
    }
}

/* A panel: codes of `bits`, and for each group of blocks the scales and, where there are any, minimums of 16 outputs.
 * A weight is (code - shift) * scale + minimum. */
struct panel {
    const uint8_t *codes;
    const void *scales, *minimums;
    index_t blocks, group;
    int shift;
};

INLINE void put(const floats *total, const float *bias, float *y, index_t width) {
    float out[PANEL];
    memcpy(out, total, sizeof out);
    for (index_t i = 0; i < width; i++) y[i] = out[i] + (bias ? bias[i] : 0);
}

/* `some` vectors of outputs, from `first` on, of a few rows: both planes at once, so that each weight is unpacked once. */
INLINE void multiply(struct panel w, const struct input *x, floats (*out)[VECTORS], const int first, const int some,
                     const int rows, const int bits, const int small, const enum scale_kind kind, const int has_minimums) {
    floats total[FEW][VECTORS] = {{{0}}};
    index_t at = first * LANES, left = w.group;
    for (index_t block = 0; block < w.blocks; block++) {
        ints acc[PLANES][FEW][VECTORS] = {{{{0}}}};
        const uint8_t *codes = w.codes + block * block_bytes(bits);
        __builtin_prefetch(codes + 8 * block_bytes(bits));
        __builtin_prefetch(codes + 8 * block_bytes(bits) + STEP);
#pragma GCC unroll 1
        for (int half = 0; half < 2; half++) {
            quad inputs[PLANES][FEW];
            for (int p = 0; p < PLANES; p++)
                for (int r = 0; r < rows; r++)
                    inputs[p][r] = load_quad(x[r].codes + (block * PLANES + p) * BLOCK + half * BLOCK / 2);
#pragma GCC unroll 4
            for (int word = 0; word < WORDS / 2; word++)
                for (int v = 0; v < some; v++) {
                    bytes weights = unpack(codes, half * WORDS / 2 + word, first + v, bits);
                    for (int p = 0; p < PLANES; p++)
                        for (int r = 0; r < rows; r++)
                            acc[p][r][v] = dot(acc[p][r][v], weights, inputs[p][r], word, small);
                }
        }
        for (int v = 0; v < some; v++) {
            floats scales = load_scales(w.scales, at + v * LANES, kind);
            for (int r = 0; r < rows; r++) {
                ints sum = (acc[0][r][v] << 8) + acc[1][r][v];
                if (!has_minimums && small) sum -= w.shift * x[r].sums[block];
                total[r][v] += __builtin_convertvector(sum, floats) * (scales * x[r].scales[block]);
            }
            if (!has_minimums) continue;
            floats minimums = load_scales(w.minimums, at + v * LANES, kind);
            for (int r = 0; r < rows; r++) total[r][v] += minimums * x[r].shares[block];
        }
        if (--left == 0) at += PANEL, left = w.group;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < some; v++) out[r][first + v] = total[r][v];
}

/* The same for `rows` rows, which lie `stride` apart in y, with a byte a code and scales in float32. One plane comes after
 * the other: then a sum has one register, and there are enough for four rows. */
INLINE void multiply_rows(struct panel w, const struct input *x, const float *bias, float *y, index_t stride,
                          index_t width, const int rows, const int small, const int has_minimums) {
    floats total[ROWS][VECTORS] = {{{0}}};
    index_t at = 0, left = w.group;
    for (index_t block = 0; block < w.blocks; block++) {
        ints acc[ROWS][VECTORS] = {{{0}}};
        const uint8_t *codes = w.codes + block * block_bytes(8);
#pragma GCC unroll 1
        for (int quarter = 0; quarter < 4; quarter++) {
            quad inputs[ROWS];
            if (quarter == 2)
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < VECTORS; v++) {
                        acc[r][v] <<= 8;
                        if (!has_minimums && small) acc[r][v] -= w.shift * x[r].sums[block];
                    }
            for (int r = 0; r < rows; r++) inputs[r] = load_quad(x[r].codes + block * PLANES * BLOCK + quarter * BLOCK / 2);
#pragma GCC unroll 4
            for (int word = 0; word < WORDS / 2; word++)
                for (int v = 0; v < VECTORS; v++) {
                    bytes weights = load_bytes(codes + (quarter % 2 * WORDS / 2 + word) * STEP + v * WIDTH);
                    for (int r = 0; r < rows; r++) acc[r][v] = dot(acc[r][v], weights, inputs[r], word, small);
                }
        }
        for (int v = 0; v < VECTORS; v++) {
            floats scales = load_scales(w.scales, at + v * LANES, FLOAT);
            for (int r = 0; r < rows; r++)
                total[r][v] += __builtin_convertvector(acc[r][v], floats) * (scales * x[r].scales[block]);
            if (has_minimums) {
                floats minimums = load_scales(w.minimums, at + v * LANES, FLOAT);
                for (int r = 0; r < rows; r++) total[r][v] += minimums * x[r].shares[block];
            }
        }
        if (--left == 0) at += PANEL, left = w.group;
    }
    for (int r = 0; r < rows; r++) put(total[r], bias, y + r * stride, width);
}

static void one_row(struct panel w, const struct input *x, const float *bias, float *y, index_t width, int bits, int kind) {
    floats out[1][VECTORS];
#define CASE(b, k) \
    if (bits == b && kind == k && !w.minimums) multiply(w, x, out, 0, VECTORS, 1, b, b < 8, k, 0); \
    if (bits == b && kind == k && w.minimums) multiply(w, x, out, 0, VECTORS, 1, b, b < 8, k, 1)
    CASE(4, HALF);
    CASE(4, FLOAT);
    CASE(4, BFLOAT);
    CASE(5, HALF);
    CASE(5, FLOAT);
    CASE(5, BFLOAT);
    CASE(8, HALF);
    CASE(8, FLOAT);
    CASE(8, BFLOAT);
#undef CASE
    put(out[0], bias, y, width);
}

/* The same panel with a byte a code and scales in float32, for many rows. */
INLINE void widen_codes(struct panel w, uint8_t *codes, const int bits) {
    for (index_t block = 0; block < w.blocks; block++) {
        for (int line = 0; line < bits; line++) __builtin_prefetch(w.codes + (block + 8) * block_bytes(bits) + line * STEP);
        for (int word = 0; word < WORDS; word++)
            for (int v = 0; v < VECTORS; v++)
                *(bytes *)(codes + block * block_bytes(8) + word * STEP + v * WIDTH) =
                    unpack(w.codes + block * block_bytes(bits), word, v, bits);
    }
}

INLINE void widen_scales(const void *scales, float *wide, index_t count, const enum scale_kind kind) {
    for (index_t i = 0; i < count; i += LANES) *(floats *)(wide + i) = load_scales(scales, i, kind);
}

static struct panel with_wide_codes(struct panel w, uint8_t *codes, int bits) {
    if (bits == 4) widen_codes(w, codes, 4);
    if (bits == 5) widen_codes(w, codes, 5);
    if (bits != 8) w.codes = codes;
    return w;
}

static struct panel with_wide_scales(struct panel w, float *scales, int kind) {
    index_t count = (w.blocks + w.group - 1) / w.group * PANEL;
    struct panel wide = w;
    for (int part = 0; part < 2; part++) {
        const void *from = part ? w.minimums : w.scales;
        if (!from) continue;
        if (kind == HALF) widen_scales(from, scales + part * count, count, HALF);
        if (kind == BFLOAT) widen_scales(from, scales + part * count, count, BFLOAT);
        if (kind == FLOAT) widen_scales(from, scales + part * count, count, FLOAT);
    }
    wide.scales = scales;
    wide.minimums = w.minimums ? scales + count : 0;
    return wide;
}

/* Two or three rows of weights that are packed: as many outputs at once as have their sums in registers. */
static void few_rows(struct panel w, const struct input *x, const float *bias, float *y, index_t rows, index_t stride,
                     index_t width, int bits) {
    floats out[FEW][VECTORS];
#define CASE(b, r, some, has_minimums) \
    if (bits == b && rows == r && !w.minimums == !has_minimums) \
        for (int first = 0; first < VECTORS; first += some) \
            multiply(w, x, out, first, some, r, b, 1, FLOAT, has_minimums)
    CASE(4, 2, VECTORS, 0);
    CASE(4, 2, VECTORS, 1);
    CASE(5, 2, VECTORS, 0);
    CASE(5, 2, VECTORS, 1);
    CASE(4, 3, HALF_PANEL, 0);
    CASE(4, 3, HALF_PANEL, 1);
    CASE(5, 3, HALF_PANEL, 0);
    CASE(5, 3, HALF_PANEL, 1);
#undef CASE
    for (index_t r = 0; r < rows; r++) put(out[r], bias, y + r * stride, width);
}

INLINE void all_rows(struct panel w, const struct input *x, const float *bias, float *y, index_t rows, index_t stride,
                     index_t width, const int small, const int has_minimums) {
    index_t row = 0;
#define TAKE(count) \
    for (; row + count <= rows; row += count) \
        multiply_rows(w, x + row, bias, y + row * stride, stride, width, count, small, has_minimums)
    TAKE(ROWS);
    TAKE(2);
    TAKE(1);
#undef TAKE
}

static void many_rows(struct panel w, const struct input *x, const float *bias, float *y, index_t rows, index_t stride,
                      index_t width, int small) {
    if (small && w.minimums) all_rows(w, x, bias, y, rows, stride, width, 1, 1);
    if (small && !w.minimums) all_rows(w, x, bias, y, rows, stride, width, 1, 0);
    if (!small && w.minimums) all_rows(w, x, bias, y, rows, stride, width, 0, 1);
    if (!small && !w.minimums) all_rows(w, x, bias, y, rows, stride, width, 0, 0);
}

/* As panels.py has it; a group has `group` columns, and panels have codes and scales so many bytes apart. */
struct matrix {
    const uint8_t *codes;
    const char *scales, *minimums;
    index_t rows, columns, group, bits, scale_kind, shift, units, codes_apart, scales_apart;
};

static struct panel panel_of(const struct matrix *w, index_t number) {
    index_t at = number * w->scales_apart;
    return (struct panel){w->codes + number * w->codes_apart, w->scales + at, w->minimums ? w->minimums + at : 0,
                          (w->columns + BLOCK - 1) / BLOCK, w->group / BLOCK, w->shift};
}

/* One of equal parts of a panel's columns. */
static struct panel unit_of(struct panel w, index_t unit, index_t units, int bits, int scale_bytes) {
    index_t blocks = w.blocks / units, at = unit * blocks / w.group * PANEL * scale_bytes;
    return (struct panel){w.codes + unit * blocks * block_bytes(bits), (const char *)w.scales + at,
                          w.minimums ? (const char *)w.minimums + at : 0, blocks, w.group, w.shift};
}

/* Each sum over the columns is made in one order, block by block, however many rows there are. */
INLINE void multiply_panel(struct panel w, const struct input *x, const float *bias, float *y, index_t rows,
                           index_t stride, index_t width, int bits, int kind, int small) {
    if (rows == 1) one_row(w, x, bias, y, width, bits, kind);
    else if (bits < 8) few_rows(w, x, bias, y, rows, stride, width, bits);
    else many_rows(w, x, bias, y, rows, stride, width, small);
}

/* The same by units, a power of two, whose sums are added up as a balanced tree: as many of its branches wait as the
 * number of the unit has ones. */
static void multiply_units(struct panel w, const struct input *x, const float *bias, float *y, index_t rows,
                           index_t stride, index_t width, int bits, int kind, int small, index_t units, float *branches) {
    index_t size = rows * width;
    int scale_bytes = kind == FLOAT ? 4 : 2;
    for (index_t unit = 0; unit < units; unit++, x += rows) {
        float *own = branches + __builtin_popcountll(unit) * size;
        struct panel part = unit_of(w, unit, units, bits, scale_bytes);
        multiply_panel(part, x, unit ? 0 : bias, own, rows, width, width, bits, kind, small);
        for (index_t left = unit; left & 1; left >>= 1, own -= size)
            for (index_t i = 0; i < size; i++) own[i - size] += own[i];
    }
    for (index_t row = 0; row < rows; row++) memcpy(y + row * stride, branches + row * width, width * sizeof(float));
}

#define MOST_BRANCHES 4 /* of 8 units */

/* y = x @ w.T + bias: x is [m, columns] in float32, y [m, rows]. */
void panel_product(const struct matrix *w, const float *x, const float *bias, float *y, index_t m) {
    index_t n = w->rows, k = w->columns, blocks = (k + BLOCK - 1) / BLOCK, panels = (n + PANEL - 1) / PANEL;
    index_t units = w->units, of_unit = blocks / units;
    int8_t *rounded = aligned_alloc(64, m * blocks * PLANES * BLOCK);
    float *scales = malloc(m * blocks * sizeof(float)), *shares = malloc(m * blocks * sizeof(float));
    int32_t *sums = malloc(m * blocks * sizeof(int32_t));
    struct input *inputs = malloc(units * m * sizeof(struct input));
    for (index_t i = 0; i < units * m; i++) {
        index_t at = i % m * blocks + i / m * of_unit;
        inputs[i] = (struct input){rounded + at * PLANES * BLOCK, scales + at, shares + at, sums + at};
    }
    if (m == 1) round_row(x, k, inputs[0]);
#pragma omp parallel if (m * n * k > PARALLEL_FROM)
    {
        uint8_t *wide = m > 1 ? aligned_alloc(64, blocks * BLOCK * PANEL) : 0;
        float *wide_scales = m > 1 ? aligned_alloc(64, blocks * PANEL * 2 * sizeof(float)) : 0;
        float *branches = units > 1 ? malloc(MOST_BRANCHES * m * PANEL * sizeof(float)) : 0;
        if (m > 1) {
#pragma omp for schedule(static)
            for (index_t row = 0; row < m; row++) round_row(x + row * k, k, inputs[row]);
        }
#pragma omp for schedule(static)
        for (index_t p = 0; p < panels; p++) {
            struct panel own = panel_of(w, p);
            const float *own_bias = bias ? bias + p * PANEL : 0;
            index_t width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
            int bits = w->bits, kind = w->scale_kind, small = bits < 8;
            if (m > 1) own = with_wide_scales(own, wide_scales, kind), kind = FLOAT;
            if (m > FEW) own = with_wide_codes(own, wide, bits), bits = 8;
            if (units > 1)
                multiply_units(own, inputs, own_bias, y + p * PANEL, m, n, width, bits, kind, small, units, branches);
            else multiply_panel(own, inputs, own_bias, y + p * PANEL, m, n, width, bits, kind, small);
        }
        free(wide);
        free(wide_scales);
        free(branches);
    }
    free(rounded);
    free(scales);
    free(shares);
    free(sums);
    free(inputs);
}

/* 16 numbers e4m3 as float32 over 2^120: sign, exponent and mantissa just change places. */
INLINE void widen_numbers(const uint8_t *codes, floats out[VECTORS]) {
    typedef uint8_t some __attribute__((vector_size(LANES), aligned(1), may_alias));
    for (int v = 0; v < VECTORS; v++) {
#if defined(__ARM_FEATURE_DOTPROD)
        static const uint8_t places[4][16] = {{16, 16, 16, 0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3},
                                              {16, 16, 16, 4, 16, 16, 16, 5, 16, 16, 16, 6, 16, 16, 16, 7},
                                              {16, 16, 16, 8, 16, 16, 16, 9, 16, 16, 16, 10, 16, 16, 16, 11},
                                              {16, 16, 16, 12, 16, 16, 16, 13, 16, 16, 16, 14, 16, 16, 16, 15}};
        ints wide = (ints)vqtbl1q_u8(vld1q_u8(codes), vld1q_u8(places[v])) >> 4;
#else
        ints wide = (__builtin_convertvector(*(const some *)(codes + v * LANES), ints) << 24) >> 4;
#endif
        out[v] = (floats)(wide & (int32_t)0x87f00000);
    }
}

#define E4M3_ROWS 4

/* 16 outputs of `rows` rows: sums of a group in float32, each then scaled. */
INLINE void multiply_e4m3(struct panel w, const float *x, const float *bias, float *y, index_t columns, index_t group,
                          index_t stride, index_t width, const int rows) {
    floats total[E4M3_ROWS][VECTORS] = {{{0}}};
    for (index_t start = 0, at = 0; start < columns; start += group, at += PANEL) {
        floats acc[E4M3_ROWS][VECTORS] = {{{0}}};
        index_t end = start + group < columns ? start + group : columns;
        for (index_t k = start; k < end; k++) {
            floats weights[VECTORS];
            widen_numbers(w.codes + k * PANEL, weights);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < VECTORS; v++) acc[r][v] += weights[v] * x[r * columns + k];
        }
        for (int v = 0; v < VECTORS; v++) {
            floats scales = load_scales(w.scales, at + v * LANES, FLOAT) * 0x1p120f;
            for (int r = 0; r < rows; r++) total[r][v] += acc[r][v] * scales;
        }
    }
    for (int r = 0; r < rows; r++) {
        float out[PANEL];
        memcpy(out, total[r], sizeof out);
        for (index_t i = 0; i < width; i++) y[r * stride + i] = out[i] + (bias ? bias[i] : 0);
    }
}

static struct panel e4m3_panel(const struct matrix *w, index_t number) {
    return (struct panel){w->codes + number * w->codes_apart, w->scales + number * w->scales_apart, 0, 0, 0, 0};
}

/* y = x @ w.T + bias with weights that are e4m3 numbers. */
void e4m3_product(const struct matrix *w, const float *x, const float *bias, float *y, index_t m) {
    index_t n = w->rows, k = w->columns, panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (m * n * k > PARALLEL_FROM)
    for (index_t p = 0; p < panels; p++) {
        struct panel own = e4m3_panel(w, p);
        const float *own_bias = bias ? bias + p * PANEL : 0;
        index_t width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL, row = 0;
        float *out = y + p * PANEL;
        for (; row + 4 <= m; row += 4) multiply_e4m3(own, x + row * k, own_bias, out + row * n, k, w->group, n, width, 4);
        for (; row + 2 <= m; row += 2) multiply_e4m3(own, x + row * k, own_bias, out + row * n, k, w->group, n, width, 2);
        if (row < m) multiply_e4m3(own, x + row * k, own_bias, out + row * n, k, w->group, n, width, 1);
    }
}

/* Rows `start` to `stop` in float32; `start` begins a panel. */
void widen_e4m3(const struct matrix *w, float *wide, index_t start, index_t stop) {
    index_t k = w->columns;
#pragma omp parallel for schedule(static)
    for (index_t p = start / PANEL; p < (stop + PANEL - 1) / PANEL; p++) {
        struct panel own = e4m3_panel(w, p);
        for (index_t column = 0; column < k; column++) {
            floats numbers[VECTORS];
            float out[PANEL];
            widen_numbers(own.codes + column * PANEL, numbers);
            for (int v = 0; v < VECTORS; v++)
                numbers[v] *= load_scales(own.scales, column / w->group * PANEL + v * LANES, FLOAT) * 0x1p120f;
            memcpy(out, numbers, sizeof out);
            for (index_t row = p * PANEL; row < stop && row < (p + 1) * PANEL; row++)
                wide[(row - start) * k + column] = out[row % PANEL];
        }
    }
}
