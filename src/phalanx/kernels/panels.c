/* Products with weights of 4, 5 and 8 bits, as panels.py lays them out: panels of 16 outputs, blocks of 32 columns.
 *
 * x is brought to whole numbers by blocks of 32 columns of a row: 16 bits each, as two planes of signed bytes (256 * high
 * + low), or where many rows meet codes of 16 bits (WIDE) as they are. So all sums within a block are exact. A block's sum
 * is then scaled in float32. */
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
#define FOUR 4                   /* rows that are rounded at once */
#define LARGEST (127 * BASE + 127)
#if defined(__AVX512VNNI__)
#define ROWS 12                  /* whose sums fit into registers at once */
#define FEW 6                    /* the same of both planes */
#define PACKED ROWS              /* rows for which weights are unpacked in registers */
#define UNROLLED WORDS           /* words one after the other */
#else
#define ROWS 4
#define FEW 3
#define PACKED FEW
#define UNROLLED (WORDS / 2)
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define ASKED_BLOCKS 8           /* ahead of one row */
#define ASKED_LINES(bits) 2      /* of each of them; the processor asks for others itself */
#else
#define ASKED_BLOCKS 16
#define ASKED_LINES(bits) (bits)
#endif
#if defined(__ARM_FEATURE_DOTPROD) || defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define WIDE 8                   /* bits of the codes that are multiplied by more rows than PACKED */
#else
#define WIDE 16
#endif
#define PARALLEL_FROM 16384      /* multiply-adds, below which one thread is quicker than two */

typedef long long index_t;
typedef int8_t bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef uint8_t ubytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int16_t shorts __attribute__((vector_size(WIDTH), aligned(2), may_alias));
typedef int32_t ints __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef float floats __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

enum scale_kind { FLOAT, HALF, BFLOAT };

/* acc[i] += the sum over 4 bytes of (w[4i + b] + TURN) * x[4 * word + b]; without TURN if `small`, which says that no
 * weight is negative. Where it NEGATES what is in x, that must not be -128. The same over pairs of 16 bits as they are. */
#if defined(__ARM_FEATURE_DOTPROD)
#define TURN 0
#define NEGATES 0
typedef int8x16_t quad; /* 4 words */
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
typedef int32_t four_bytes __attribute__((aligned(1), may_alias));
INLINE quad load_quad(const int8_t *x) { return x; }
INLINE four_bytes word_of(quad x, const int word) { return *(const four_bytes *)(x + 4 * word); }
#if defined(__AVX512VNNI__)
#define TURN 128
#define NEGATES 0
/* Compilers load a word first, which takes half of what the processor can begin in a cycle. */
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    __m512i weights = small ? (__m512i)w : _mm512_xor_si512((__m512i)w, _mm512_set1_epi8(-TURN));
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*(const four_bytes *)(x + 4 * word)));
    return acc;
}
#elif defined(__AVX512BW__)
#define TURN 0
#define NEGATES 1
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    __m512i weights = (__m512i)w, inputs = _mm512_set1_epi32(word_of(x, word));
    if (!small) {
        inputs = _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), inputs);
        weights = _mm512_abs_epi8(weights);
    }
    __m512i pairs = _mm512_maddubs_epi16(weights, inputs);
    return acc + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
INLINE ints dot_pairs(ints acc, bytes w, quad x, const int word) {
    return acc + (ints)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(word_of(x, word)));
}
#elif defined(__AVXVNNI__)
#define TURN 128
#define NEGATES 0
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    __m256i weights = small ? (__m256i)w : _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-TURN));
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, weights, _mm256_set1_epi32(word_of(x, word)));
}
#elif defined(__AVX2__)
#define TURN 0
#define NEGATES 1
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    __m256i weights = (__m256i)w, inputs = _mm256_set1_epi32(word_of(x, word));
    if (!small) {
        inputs = _mm256_sign_epi8(inputs, weights);
        weights = _mm256_abs_epi8(weights);
    }
    __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
    return acc + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE ints dot_pairs(ints acc, bytes w, quad x, const int word) {
    return acc + (ints)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(word_of(x, word)));
}
#else
#define TURN 0
#define NEGATES 0
INLINE ints dot(ints acc, bytes w, quad x, const int word, const int small) {
    (void)small;
    for (int b = 0; b < 4; b++) acc += (((ints)w << (24 - 8 * b)) >> 24) * x[4 * word + b];
    return acc;
}
INLINE ints dot_pairs(ints acc, bytes w, quad x, const int word) {
    four_bytes both = word_of(x, word);
    return acc + (((ints)w << 16) >> 16) * (int16_t)both + ((ints)w >> 16) * (both >> 16);
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
    if (bits >= 8) return load_bytes(block + word * STEP + vector * WIDTH);
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

/* Rows of x in whole numbers, some side by side: [blocks][planes][words][rows][4] bytes, the words of both planes in
 * place of the planes where numbers are as they are. For each block of each row the scale, the sum of its numbers times it, and what makes up for weights that are not what is multiplied. */
struct input {
    int8_t *codes;
    float *scales, *shares;
    int32_t *starts;
};

INLINE struct input input_at(struct input x, index_t block, index_t beside, index_t row) {
    index_t at = block * beside + row;
    return (struct input){x.codes + block * beside * PLANES * BLOCK + 4 * row, x.scales + at, x.shares + at, x.starts + at};
}

/* 4 words of 4 rows, row by row, to be word by word. */
INLINE void put_four(int8_t (*codes)[PLANES * BLOCK], int8_t *out, index_t apart) {
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t row[FOUR];
    for (int r = 0; r < FOUR; r++) row[r] = vreinterpretq_s32_s8(vld1q_s8(codes[r]));
    for (int odd = 0; odd < 2; odd++) {
        int64x2_t low = vreinterpretq_s64_s32(odd ? vtrn2q_s32(row[0], row[1]) : vtrn1q_s32(row[0], row[1]));
        int64x2_t high = vreinterpretq_s64_s32(odd ? vtrn2q_s32(row[2], row[3]) : vtrn1q_s32(row[2], row[3]));
        vst1q_s8(out + odd * apart, vreinterpretq_s8_s64(vtrn1q_s64(low, high)));
        vst1q_s8(out + (2 + odd) * apart, vreinterpretq_s8_s64(vtrn2q_s64(low, high)));
    }
#elif defined(__AVX2__)
    __m128i row[FOUR];
    for (int r = 0; r < FOUR; r++) row[r] = _mm_loadu_si128((const __m128i *)codes[r]);
    for (int half = 0; half < 2; half++) {
        __m128i low = half ? _mm_unpackhi_epi32(row[0], row[1]) : _mm_unpacklo_epi32(row[0], row[1]);
        __m128i high = half ? _mm_unpackhi_epi32(row[2], row[3]) : _mm_unpacklo_epi32(row[2], row[3]);
        _mm_storeu_si128((__m128i *)(out + 2 * half * apart), _mm_unpacklo_epi64(low, high));
        _mm_storeu_si128((__m128i *)(out + (2 * half + 1) * apart), _mm_unpackhi_epi64(low, high));
    }
#else
    for (int word = 0; word < 4; word++)
        for (int r = 0; r < FOUR; r++) memcpy(out + word * apart + 4 * r, codes[r] + 4 * word, 4);
#endif
}

/* A block of one row, or of four that lie side by side, of so many that do. One row alone waits for each step of a long
 * chain. A number added to 1.5 * 2^23 is rounded, and in the lowest bits. */
INLINE void round_blocks(const float *x, index_t columns, struct input out, index_t beside, int shift, const int rows,
                         const int bits) {
    int8_t codes[FOUR][PLANES * BLOCK];
    float largest[FOUR], inverse[FOUR];
#define EACH_ROW _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)
    EACH_ROW {
        int32_t sizes[BLOCK], most = 0;
        memcpy(sizes, x + r * columns, sizeof sizes);
        for (int i = 0; i < BLOCK; i++) most = most > (sizes[i] & INT32_MAX) ? most : sizes[i] & INT32_MAX;
        memcpy(largest + r, &most, sizeof most);
    }
    EACH_ROW inverse[r] = largest[r] > 0x1p-100f ? LARGEST / largest[r] : 0;
    EACH_ROW out.scales[r] = largest[r] / LARGEST;
    EACH_ROW {
        int32_t whole[BLOCK], sum = 0;
        int16_t as_they_are[BLOCK];
        float biased[BLOCK];
        for (int i = 0; i < BLOCK; i++) biased[i] = x[r * columns + i] * inverse[r] + 0x1.8p23f;
        memcpy(whole, biased, sizeof whole);
        for (int i = 0; i < BLOCK; i++) {
            whole[i] -= 0x4b400000;
            if (NEGATES && (whole[i] & 255) == 128) whole[i]++;
            as_they_are[i] = whole[i];
            sum += whole[i];
        }
        if (bits == 16) memcpy(codes[r], as_they_are, sizeof as_they_are);
        for (int i = 0; i < BLOCK && bits == 8; i++) {
            codes[r][i] = (whole[i] + BASE / 2) >> 8;
            codes[r][BLOCK + i] = whole[i];
        }
        out.shares[r] = out.scales[r] * sum;
        out.starts[r] = (int32_t)(-(uint32_t)shift * (uint32_t)sum);
    }
#undef EACH_ROW
    for (int word = 0; word < PLANES * WORDS; word++) {
        int8_t *own = out.codes + 4 * beside * word;
        if (rows == 1) memcpy(own, codes[0] + 4 * word, 4);
        else if (word % 4 == 0) put_four((int8_t(*)[PLANES * BLOCK])(codes[0] + 4 * word), own, 4 * beside);
    }
}

INLINE void round_some(const float *x, index_t columns, struct input out, index_t beside, int shift, const int rows,
                       const int bits) {
    float rest[FOUR * BLOCK] = {0};
    index_t done = 0;
    for (; done + BLOCK <= columns; done += BLOCK, out = input_at(out, 1, beside, 0))
        round_blocks(x + done, columns, out, beside, shift, rows, bits);
    if (done == columns) return;
    for (int r = 0; r < rows; r++) memcpy(rest + r * BLOCK, x + r * columns + done, (columns - done) * sizeof(float));
    round_blocks(rest, BLOCK, out, beside, shift, rows, bits);
}

static void round_rows(const float *x, index_t columns, struct input out, index_t beside, int shift, index_t rows, int bits) {
    if (rows == FOUR && bits == 8) round_some(x, columns, out, beside, shift, FOUR, 8);
    if (rows == 1 && bits == 8) round_some(x, columns, out, beside, shift, 1, 8);
#if WIDE == 16
    if (rows == FOUR && bits == 16) round_some(x, columns, out, beside, shift, FOUR, 16);
    if (rows == 1 && bits == 16) round_some(x, columns, out, beside, shift, 1, 16);
#endif
}

/* A panel: codes of `bits`, and for each group of blocks the scales and, where there are any, minimums of 16 outputs. */
struct panel {
    const uint8_t *codes;
    const void *scales, *minimums;
    index_t blocks, group;
};

INLINE void put(const floats *total, const float *bias, float *y, index_t width) {
    float out[PANEL];
    memcpy(out, total, sizeof out);
    for (index_t i = 0; i < width; i++) y[i] = out[i] + (bias ? bias[i] : 0);
}

/* Of unsigned codes with minimums, no number is shifted. */
INLINE int adds_starts(const int small, const int has_minimums) { return small ? !has_minimums : TURN != 0; }

/* `some` vectors of outputs, from `first` on, of a few rows: both planes at once, so that each weight is unpacked once. */
INLINE void multiply(struct panel w, const struct input *x, floats (*out)[VECTORS], const int first, const int some,
                     const int rows, const int bits, const int small, const enum scale_kind kind, const int has_minimums) {
    floats total[FEW][VECTORS] = {{{0}}};
    index_t at = first * LANES, left = w.group;
    for (index_t block = 0; block < w.blocks; block++) {
        ints acc[PLANES][FEW][VECTORS] = {{{{0}}}};
        const uint8_t *codes = w.codes + block * block_bytes(bits);
        for (int line = 0; line < ASKED_LINES(bits); line++)
            __builtin_prefetch(codes + ASKED_BLOCKS * block_bytes(bits) + line * STEP);
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
                if (adds_starts(small, has_minimums)) sum += x[r].starts[block];
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

INLINE ints dot_of(ints acc, bytes w, quad x, const int word, const int bits, const int small) {
#if WIDE == 16
    if (bits == 16) return dot_pairs(acc, w, x, word);
#endif
    return dot(acc, w, x, word, small);
}

/* The same for as many rows as lie side by side, with scales in float32. One plane comes after the other: then a sum has
 * one register, and there are enough for more rows. */
INLINE void multiply_rows(struct panel w, struct input x, floats (*out)[VECTORS], const int rows, const int bits,
                          const int small, const int has_minimums) {
    floats total[ROWS][VECTORS] = {{{0}}};
    index_t at = 0, left = w.group;
    for (index_t block = 0; block < w.blocks; block++, x = input_at(x, 1, rows, 0)) {
        ints acc[ROWS][VECTORS] = {{{0}}};
        const uint8_t *codes = w.codes + block * block_bytes(bits);
#pragma GCC unroll 1
        for (int first = 0; first < PLANES * WORDS; first += UNROLLED) {
            if (first == WORDS && bits != 16)
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < VECTORS; v++) {
                        acc[r][v] <<= 8;
                        if (adds_starts(small, has_minimums)) acc[r][v] += x.starts[r];
                    }
#pragma GCC unroll 8
            for (int word = first; word < first + UNROLLED; word++) {
                quad inputs = load_quad(x.codes + word * rows * 4);
                for (int v = 0; v < VECTORS; v++) {
                    bytes weights = unpack(codes, bits == 16 ? word : word % WORDS, v, bits);
                    for (int r = 0; r < rows; r++) acc[r][v] = dot_of(acc[r][v], weights, inputs, r, bits, small);
                }
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            floats scales = load_scales(w.scales, at + v * LANES, FLOAT);
            for (int r = 0; r < rows; r++)
                total[r][v] += __builtin_convertvector(acc[r][v], floats) * (scales * x.scales[r]);
            if (has_minimums) {
                floats minimums = load_scales(w.minimums, at + v * LANES, FLOAT);
                for (int r = 0; r < rows; r++) total[r][v] += minimums * x.shares[r];
            }
        }
        if (--left == 0) at += PANEL, left = w.group;
    }
    memcpy(out, total, rows * sizeof total[0]);
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

/* Bytes 2 * half and 2 * half + 1 of each word, less `shift`, in 16 bits each. */
INLINE bytes widen_pair(bytes w, const int half, int shift) {
#if defined(__AVX2__)
    __m128i lane = _mm_set_epi8(13, -1, 12, -1, 9, -1, 8, -1, 5, -1, 4, -1, 1, -1, 0, -1);
    lane = _mm_add_epi8(lane, _mm_set1_epi16(2 * half << 8));
#if defined(__AVX512BW__)
    shorts high = (shorts)_mm512_shuffle_epi8((__m512i)w, _mm512_broadcast_i32x4(lane));
#else
    shorts high = (shorts)_mm256_shuffle_epi8((__m256i)w, _mm256_broadcastsi128_si256(lane));
#endif
#else
    ints own = (ints)w >> 16 * half;
    shorts high = (shorts)(((own & 0xff) << 8) | ((own & 0xff00) << 16));
#endif
    return (bytes)((high >> 8) - (int16_t)shift);
}

/* The same panel with WIDE bits a code and scales in float32, for many rows. */
INLINE void widen_codes(struct panel w, uint8_t *codes, int shift, const int bits) {
    for (index_t block = 0; block < w.blocks; block++) {
        uint8_t *wide = codes + block * block_bytes(WIDE);
        for (int line = 0; line < bits; line++) __builtin_prefetch(w.codes + (block + 8) * block_bytes(bits) + line * STEP);
        for (int word = 0; word < WORDS; word++)
            for (int v = 0; v < VECTORS; v++) {
                bytes own = unpack(w.codes + block * block_bytes(bits), word, v, bits);
                for (int half = 0; half < WIDE / 8; half++)
                    *(bytes *)(wide + (word * WIDE / 8 + half) * STEP + v * WIDTH) =
                        WIDE == 8 ? own : widen_pair(own, half, shift);
            }
    }
}

INLINE void widen_scales(const void *scales, float *wide, index_t count, const enum scale_kind kind) {
    for (index_t i = 0; i < count; i += LANES) *(floats *)(wide + i) = load_scales(scales, i, kind);
}

static struct panel with_wide_codes(struct panel w, uint8_t *codes, int shift, int bits) {
    if (bits == WIDE) return w;
    if (bits == 4) widen_codes(w, codes, shift, 4);
    if (bits == 5) widen_codes(w, codes, shift, 5);
    if (bits == 8) widen_codes(w, codes, shift, 8);
    w.codes = codes;
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

/* A few rows of weights that are packed: as many outputs at once as have their sums in registers. */
static void few_rows(struct panel w, const struct input *x, const float *bias, float *y, index_t rows, index_t stride,
                     index_t width, int bits) {
    floats out[FEW][VECTORS];
#define CASE(r, some, b, has_minimums) \
    if (rows == r && bits == b && !w.minimums == !has_minimums) \
        for (int first = 0; first < VECTORS; first += some) \
            multiply(w, x, out, first, some, r, b, 1, FLOAT, has_minimums)
#define CASES(r, some) \
    CASE(r, some, 4, 0); \
    CASE(r, some, 4, 1); \
    CASE(r, some, 5, 0); \
    CASE(r, some, 5, 1)
    CASES(2, VECTORS);
    CASES(3, HALF_PANEL);
#if FEW > 3
    CASES(4, VECTORS);
    CASES(5, VECTORS);
    CASES(6, VECTORS);
#endif
#undef CASES
#undef CASE
    for (index_t r = 0; r < rows; r++) put(out[r], bias, y + r * stride, width);
}

/* All rows of x. One, or a few that meet packed weights, lie one after the other; else as many side by side as are
 * multiplied at once, with zeros for those that are missing. Numbers have `bits`: 8 in planes, 16 as they are. */
struct inputs {
    struct input all;
    index_t rows, blocks;
    int in_turn, bits;
};

static index_t beside(const struct inputs *x, index_t row) {
    index_t left = x->rows - row / ROWS * ROWS;
    if (x->in_turn) return 1;
    return left > 8 && ROWS > 8 ? ROWS : left > 4 && ROWS > 4 ? 8 : left > 2 ? 4 : left;
}

/* Where a block of one of the rows is. */
static struct input input_of(const struct inputs *x, index_t row, index_t block) {
    index_t ahead = x->in_turn ? row : row / ROWS * ROWS;
    return input_at(input_at(x->all, ahead * x->blocks, 1, 0), block, beside(x, row), row - ahead);
}

static void many_rows(struct panel w, const struct inputs *x, index_t block, const float *bias, float *y, index_t stride,
                      index_t width, int bits, int small) {
    for (index_t row = 0; row < x->rows; row += ROWS) {
        struct input own = input_of(x, row, block);
        index_t places = beside(x, row);
        floats out[ROWS][VECTORS];
        for (index_t r = row; r < row + ROWS && r < x->rows; r++) __builtin_prefetch(y + r * stride, 1);
#define CASE(p, b, s, has_minimums) \
    if (places == p && bits == b && small == s && !w.minimums == !has_minimums) \
        multiply_rows(w, own, out, p, b, s, has_minimums)
#define CASES(p, b, s) \
    CASE(p, b, s, 0); \
    CASE(p, b, s, 1)
        CASES(2, 8, 0);
        CASES(4, 8, 0);
#if WIDE == 8
        CASES(1, 8, 0);
        CASES(1, 8, 1);
        CASES(2, 8, 1);
        CASES(4, 8, 1);
#else
        CASES(1, 16, 0);
        CASES(2, 16, 0);
        CASES(4, 16, 0);
#endif
#if ROWS > 4
        CASES(8, 4, 1);
        CASES(8, 5, 1);
        CASES(8, 8, 0);
        CASES(8, 8, 1);
        CASES(ROWS, 4, 1);
        CASES(ROWS, 5, 1);
        CASES(ROWS, 8, 0);
        CASES(ROWS, 8, 1);
#endif
#undef CASES
#undef CASE
        for (index_t r = row; r < row + ROWS && r < x->rows; r++) put(out[r - row], bias, y + r * stride, width);
    }
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
                          (w->columns + BLOCK - 1) / BLOCK, w->group / BLOCK};
}

/* One of equal parts of a panel's columns. */
static struct panel unit_of(struct panel w, index_t unit, index_t units, int bits, int scale_bytes) {
    index_t blocks = w.blocks / units, at = unit * blocks / w.group * PANEL * scale_bytes;
    return (struct panel){w.codes + unit * blocks * block_bytes(bits), (const char *)w.scales + at,
                          w.minimums ? (const char *)w.minimums + at : 0, blocks, w.group};
}

/* With x from some block on. Each sum over the columns is made in one order, block by block, however many rows there
 * are. */
INLINE void multiply_panel(struct panel w, const struct inputs *x, index_t block, const float *bias, float *y,
                           index_t stride, index_t width, int bits, int kind, int small) {
    struct input few[FEW];
    if (!x->in_turn) {
        many_rows(w, x, block, bias, y, stride, width, bits, small);
        return;
    }
    for (index_t row = 0; row < x->rows; row++) few[row] = input_of(x, row, block);
    if (x->rows == 1) one_row(w, few, bias, y, width, bits, kind);
    else few_rows(w, few, bias, y, x->rows, stride, width, bits);
}

/* The same by units, a power of two, whose sums are added up as a balanced tree: as many of its branches wait as the
 * number of the unit has ones. */
static void multiply_units(struct panel w, const struct inputs *x, const float *bias, float *y, index_t stride,
                           index_t width, int bits, int kind, int small, index_t units, float *branches) {
    index_t size = x->rows * width, blocks = x->blocks / units;
    int scale_bytes = kind == FLOAT ? 4 : 2;
    for (index_t unit = 0; unit < units; unit++) {
        float *own = branches + __builtin_popcountll(unit) * size;
        struct panel part = unit_of(w, unit, units, bits, scale_bytes);
        multiply_panel(part, x, unit * blocks, unit ? 0 : bias, own, width, width, bits, kind, small);
        for (index_t left = unit; left & 1; left >>= 1, own -= size)
            for (index_t i = 0; i < size; i++) own[i - size] += own[i];
    }
    for (index_t row = 0; row < x->rows; row++) memcpy(y + row * stride, branches + row * width, width * sizeof(float));
}

#define MOST_BRANCHES 4 /* of 8 units */
#define INPUT_BYTES (PLANES * BLOCK + 3 * 4) /* of a block of a row */

/* In fresh memory, with nothing in it but zeros where rows are missing. */
static struct inputs room_for(index_t rows, index_t blocks, int bits) {
    index_t places = (rows + ROWS - 1) / ROWS * ROWS * blocks, full = rows / ROWS * ROWS * blocks;
    int8_t *codes = aligned_alloc(64, (places * INPUT_BYTES + 63) & ~63);
    float *scales = (float *)(codes + places * PLANES * BLOCK);
    struct input all = {codes, scales, scales + places, (int32_t *)(scales + 2 * places)}, last = input_at(all, full, 1, 0);
    memset(last.codes, 0, (places - full) * PLANES * BLOCK);
    memset(last.scales, 0, (places - full) * sizeof(float));
    memset(last.shares, 0, (places - full) * sizeof(float));
    memset(last.starts, 0, (places - full) * sizeof(int32_t));
    return (struct inputs){all, rows, blocks, rows == 1 || (rows <= FEW && bits < 8), rows > PACKED ? WIDE : 8};
}

/* y = x @ w.T + bias: x is [m, columns] in float32, y [m, rows]. */
void panel_product(const struct matrix *w, const float *x, const float *bias, float *y, index_t m) {
    index_t n = w->rows, k = w->columns, panels = (n + PANEL - 1) / PANEL, units = w->units;
    struct inputs inputs = room_for(m, (k + BLOCK - 1) / BLOCK, w->bits);
    int shift = w->bits < 8 ? w->shift : TURN;
    if (m == 1) round_rows(x, k, inputs.all, 1, shift, 1, inputs.bits);
#pragma omp parallel if (m * n * k > PARALLEL_FROM)
    {
        uint8_t *wide = m > PACKED ? aligned_alloc(64, inputs.blocks * block_bytes(WIDE)) : 0;
        float *wide_scales = m > 1 ? aligned_alloc(64, inputs.blocks * PANEL * 2 * sizeof(float)) : 0;
        float *branches = units > 1 ? malloc(MOST_BRANCHES * m * PANEL * sizeof(float)) : 0;
        if (m > 1) {
#pragma omp for schedule(static)
            for (index_t first = 0; first < m; first += FOUR) {
                index_t places = beside(&inputs, first), row = first;
                if (places % FOUR == 0 && m - first >= FOUR)
                    round_rows(x + first * k, k, input_of(&inputs, first, 0), places, shift, FOUR, inputs.bits), row += FOUR;
                for (; row < first + FOUR && row < m; row++)
                    round_rows(x + row * k, k, input_of(&inputs, row, 0), places, shift, 1, inputs.bits);
            }
        }
#pragma omp for schedule(static)
        for (index_t p = 0; p < panels; p++) {
            struct panel own = panel_of(w, p);
            const float *own_bias = bias ? bias + p * PANEL : 0;
            index_t width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
            int bits = w->bits, kind = w->scale_kind, small = bits < 8;
            if (m > 1) own = with_wide_scales(own, wide_scales, kind), kind = FLOAT;
            if (m > PACKED) {
                own = with_wide_codes(own, wide, own.minimums || bits == 8 ? 0 : w->shift, bits);
                bits = WIDE, small &= WIDE == 8;
            }
            if (units > 1)
                multiply_units(own, &inputs, own_bias, y + p * PANEL, n, width, bits, kind, small, units, branches);
            else multiply_panel(own, &inputs, 0, own_bias, y + p * PANEL, n, width, bits, kind, small);
        }
        free(wide);
        free(wide_scales);
        free(branches);
    }
    free(inputs.all.codes);
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
    return (struct panel){w->codes + number * w->codes_apart, w->scales + number * w->scales_apart, 0, 0, 0};
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
