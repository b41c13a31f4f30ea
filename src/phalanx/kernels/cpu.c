/* float32 kernels for CPUs. Each computes what the torch function of the same name in this folder defines. The last
 * two are none: by them ranks on the CPUs of one machine meet (fabric/host.py), and threads keep to cores (runtime/cores.py).
 * Compiled on first use by the machine's own C compiler (see cpu.py), so that it fits the machine's vector width.
 * Work is shared among OpenMP threads only where a thread's share outweighs waking it. */
#define _GNU_SOURCE
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(LANES * 4)));
typedef long long index_t;

#define PARALLEL_FROM 16384 /* multiply-adds or elements, below which one thread is quicker than two */

#define INLINE static inline __attribute__((always_inline))

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int apart = 1; apart < LANES; apart *= 2)
        for (int i = 0; i < LANES; i += 2 * apart) v[i] += v[i + apart];
    return v[0];
#endif
}

static inline float top_of(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float found = v[0];
    for (int lane = 1; lane < LANES; lane++) found = v[lane] > found ? v[lane] : found;
    return found;
#endif
}

static inline float dot(const float *a, const float *b, index_t n) {
    vec acc[4] = {{0}};
    index_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) acc[j] += load(a + i + j * LANES) * load(b + i + j * LANES);
    for (; i + LANES <= n; i += LANES) acc[0] += load(a + i) * load(b + i);
    float total = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

/* out = weight * h / sqrt(mean(h^2) + eps) with h = x + residual; h is kept in residual. Without a residual, h = x. */
void add_rms_norm(const float *x, float *residual, const float *weight, float *out, index_t rows, index_t width, float eps) {
#pragma omp parallel for if (rows > 1 && rows * width > PARALLEL_FROM)
    for (index_t row = 0; row < rows; row++) {
        const float *h = x + row * width;
        if (residual) {
            float *kept = residual + row * width;
            for (index_t i = 0; i < width; i++) kept[i] += h[i];
            h = kept;
        }
        float scale = 1.0f / sqrtf(dot(h, h, width) / width + eps);
        for (index_t i = 0; i < width; i++) out[row * width + i] = weight[i] * (h[i] * scale);
    }
}

#define AT_ONCE 4 /* vectors: one of them alone waits for each step of a long chain */

/* exp(x) to float precision: 2^n * e^r with |r| <= ln(2)/2. Added to 1.5 * 2^23, n is in the lowest bits. */
INLINE void vexp(vec *x, const int count) {
    vec whole[AT_ONCE], n[AT_ONCE], p[AT_ONCE];
#define EACH(step) \
    for (int i = 0; i < count; i++) step
    EACH(x[i] = pick(x[i] > 88.0f, splat(88.0f), x[i]));
    EACH(x[i] = pick(x[i] < -87.0f, splat(-87.0f), x[i]));
    EACH(whole[i] = x[i] * 1.44269504f + 0x1.8p23f);
    EACH(n[i] = whole[i] - 0x1.8p23f);
    EACH(x[i] = x[i] - n[i] * 0.693359375f);
    EACH(x[i] = x[i] + n[i] * 2.12194440e-4f);
    EACH(p[i] = 1.9875691500e-4f * x[i] + 1.3981999507e-3f);
    EACH(p[i] = p[i] * x[i] + 8.3334519073e-3f);
    EACH(p[i] = p[i] * x[i] + 4.1665795894e-2f);
    EACH(p[i] = p[i] * x[i] + 1.6666665459e-1f);
    EACH(p[i] = p[i] * x[i] + 5.0000001201e-1f);
    EACH(p[i] = p[i] * x[i]);
    EACH(p[i] = p[i] * x[i] + x[i]);
    EACH(p[i] = p[i] + 1.0f);
    EACH(x[i] = p[i] * (vec)(((ivec)whole[i] + 127) << 23));
#undef EACH
}

INLINE void load_all(vec *x, const float *from) {
    for (int i = 0; i < AT_ONCE; i++) x[i] = load(from + i * LANES);
}

/* silu(gate) * up of some vectors. */
INLINE void gated(const float *gate, const float *up, float *out, const int count) {
    vec x[AT_ONCE];
    for (int i = 0; i < count; i++) x[i] = -load(gate + i * LANES);
    vexp(x, count);
    for (int i = 0; i < count; i++) store(out + i * LANES, load(gate + i * LANES) / (1.0f + x[i]) * load(up + i * LANES));
}

/* out = silu(gate) * up, where a row of gate_up is [gate | up]. */
void silu_and_mul(const float *gate_up, float *out, index_t rows, index_t width) {
#pragma omp parallel for if (rows > 1 && rows * width > PARALLEL_FROM)
    for (index_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float *own = out + row * width;
        index_t i = 0;
        for (; i + AT_ONCE * LANES <= width; i += AT_ONCE * LANES) gated(gate + i, up + i, own + i, AT_ONCE);
        for (; i + LANES <= width; i += LANES) gated(gate + i, up + i, own + i, 1);
        if (i < width) { /* the rest in the same way: a column is the same wherever it stands */
            float of_rest[3][LANES] = {{0}};
            memcpy(of_rest[0], gate + i, (width - i) * sizeof(float));
            memcpy(of_rest[1], up + i, (width - i) * sizeof(float));
            gated(of_rest[0], of_rest[1], of_rest[2], 1);
            memcpy(own + i, of_rest[2], (width - i) * sizeof(float));
        }
    }
}

/* out = sigmoid(x), also the same wherever a number stands. */
void sigmoid(const float *x, float *out, index_t count) {
#pragma omp parallel for if (count > PARALLEL_FROM)
    for (index_t start = 0; start < count; start += LANES) {
        index_t some = count - start < LANES ? count - start : LANES;
        float given[LANES] = {0};
        memcpy(given, x + start, some * sizeof(float));
        vec own = -load(given);
        vexp(&own, 1);
        store(given, 1.0f / (1.0f + own));
        memcpy(out + start, given, some * sizeof(float));
    }
}

static inline void rotate(float *restrict left, float *restrict right, const float *restrict cos,
                          const float *restrict sin, index_t half) {
    for (index_t i = 0; i < half; i++) {
        float a = left[i], b = right[i];
        left[i] = a * cos[i] + b * sin[i];
        right[i] = b * cos[i + half] + a * sin[i + half];
    }
}

/* Rotate q and k in place (cos and sin are [tokens, rotary]), then store k and v at write_to in the flattened cache. */
void rotate_and_store(float *qkv, const float *cos, const float *sin, const index_t *write_to, float *cache,
                      index_t tokens, index_t heads, index_t kv_heads, index_t head_dim, index_t rotary) {
    index_t width = (heads + 2 * kv_heads) * head_dim, entry = 2 * kv_heads * head_dim;
#pragma omp parallel for if (tokens > 1 && tokens * width > PARALLEL_FROM)
    for (index_t token = 0; token < tokens; token++) {
        float *row = qkv + token * width;
        for (float *head = row; head < row + (heads + kv_heads) * head_dim; head += head_dim)
            rotate(head, head + rotary / 2, cos + token * rotary, sin + token * rotary, rotary / 2);
        memcpy(cache + write_to[token] * entry, row + heads * head_dim, entry * sizeof(float));
    }
}

/* Keys of a query, or several, are read in parts that threads share. How long these are depends on what the query looks at
 * alone, and each of its sums is made in one order: it has the same bits whoever is beside it. */
#define PART 256       /* positions, at least */
#define MOST_PARTS 16
#define ROOM (PART + AT_ONCE * LANES) /* for scores */
#define KEYS 4         /* at once */
#define QUERIES 32     /* of one KV head that share a reading of its keys and values */
#if defined(__AVX__) && !defined(__AVX512F__)
#define TOGETHER 2     /* of them whose sums fit into registers */
#else
#define TOGETHER 4
#endif

/* A query head of one row: it looks at positions from `start` up to `stop`, and leaves what it found in `found`: the
 * largest score, the sum of weights, and the sum of weighted values. */
struct query {
    const float *q;
    float *found;
    index_t start, stop;
};

INLINE void put_sums(const vec *of_keys, float *out) {
#if defined(__aarch64__)
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    *(four *)out = (four)vpaddq_f32(vpaddq_f32((float32x4_t)of_keys[0], (float32x4_t)of_keys[1]),
                                    vpaddq_f32((float32x4_t)of_keys[2], (float32x4_t)of_keys[3]));
#elif defined(__AVX__)
    __m256 half[KEYS];
    for (int key = 0; key < KEYS; key++) {
#if defined(__AVX512F__)
        __m512d own = (__m512d)of_keys[key];
        half[key] = (__m256)_mm512_castpd512_pd256(own) + (__m256)_mm512_extractf64x4_pd(own, 1);
#else
        half[key] = (__m256)of_keys[key];
#endif
    }
    half[0] = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm256_castps256_ps128(half[0]) + _mm256_extractf128_ps(half[0], 1));
#else
    for (int key = 0; key < KEYS; key++) out[key] = sum(of_keys[key]);
#endif
}

/* scores[query][i] = query . keys[i] for some keys, `apart` from each other: each part of a key is loaded once for several
 * queries. */
INLINE void score_keys(const struct query *queries, const float *keys, index_t apart, float *sums, index_t sums_apart,
                       index_t head_dim, const int together) {
    vec acc[TOGETHER][KEYS] = {{{0}}};
    index_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) {
        vec parts[KEYS];
        for (int k = 0; k < KEYS; k++) parts[k] = load(keys + k * apart + d);
        for (int q = 0; q < together; q++)
            for (int k = 0; k < KEYS; k++) acc[q][k] += load(queries[q].q + d) * parts[k];
    }
    for (int q = 0; q < together; q++) put_sums(acc[q], sums + q * sums_apart);
    for (; d < head_dim; d++)
        for (int q = 0; q < together; q++)
            for (int k = 0; k < KEYS; k++) sums[q * sums_apart + k] += queries[q].q[d] * keys[k * apart + d];
}

INLINE void score(const struct query *queries, const float *keys, float (*scores)[ROOM], index_t count,
                  index_t entry, index_t head_dim, const int together) {
    index_t i = 0;
    for (; i + KEYS <= count; i += KEYS)
        score_keys(queries, keys + i * entry, entry, scores[0] + i, ROOM, head_dim, together);
    for (; i < count; i++) { /* in the same way, for the same bits */
        float sums[TOGETHER * KEYS];
        score_keys(queries, keys + i * entry, 0, sums, KEYS, head_dim, together);
        for (int q = 0; q < together; q++) scores[q][i] = sums[q * KEYS];
    }
}

/* Scores to weights, for a running softmax; what was found before shrinks where there is a new largest score. */
static void soften(float *scores, index_t count, float scale, float *found, index_t head_dim) {
    vec tops[AT_ONCE], sums[AT_ONCE] = {{0}}, some[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) tops[i] = splat(-INFINITY);
    for (index_t i = 0; i < AT_ONCE * LANES; i++) scores[count + i] = -INFINITY;
    for (index_t at = 0; at < count; at += AT_ONCE * LANES) {
        load_all(some, scores + at);
        for (int i = 0; i < AT_ONCE; i++) tops[i] = pick(some[i] > tops[i], some[i], tops[i]);
    }
    for (int i = 1; i < AT_ONCE; i++) tops[0] = pick(tops[i] > tops[0], tops[i], tops[0]);
    float before = found[0], top = top_of(tops[0]) * scale, best = top > before ? top : before;
    for (index_t at = 0; at < count; at += AT_ONCE * LANES) {
        load_all(some, scores + at);
        for (int i = 0; i < AT_ONCE; i++) some[i] = some[i] * scale - best;
        vexp(some, AT_ONCE);
        for (int i = 0; i < AT_ONCE; i++) store(scores + at + i * LANES, some[i]);
        if (at + AT_ONCE * LANES > count) {
            for (index_t i = count; i < at + AT_ONCE * LANES; i++) scores[i] = 0;
            load_all(some, scores + at);
        }
        for (int i = 0; i < AT_ONCE; i++) sums[i] += some[i];
    }
    float shrink = expf(before - best);
    found[0] = best;
    found[1] = found[1] * shrink + sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (index_t d = 0; d < head_dim; d++) found[2 + d] *= shrink;
}

/* found += sum of weights[i] * values[i], `vectors` vectors of a head from `d` on. */
INLINE void blend_some(const struct query *queries, const float *values, float (*weights)[ROOM], index_t count,
                       index_t entry, index_t d, const int together, const int vectors) {
    vec acc[TOGETHER][4];
    for (int q = 0; q < together; q++)
        for (int v = 0; v < vectors; v++) acc[q][v] = load(queries[q].found + 2 + d + v * LANES);
    for (index_t i = 0; i < count; i++)
        for (int v = 0; v < vectors; v++) {
            vec value = load(values + i * entry + d + v * LANES);
            for (int q = 0; q < together; q++) acc[q][v] += weights[q][i] * value;
        }
    for (int q = 0; q < together; q++)
        for (int v = 0; v < vectors; v++) store(queries[q].found + 2 + d + v * LANES, acc[q][v]);
}

INLINE void blend(const struct query *queries, const float *values, float (*weights)[ROOM], index_t count,
                  index_t entry, index_t head_dim, const int together) {
    index_t d = 0;
    if (count <= 0) return;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES)
        blend_some(queries, values, weights, count, entry, d, together, 4);
    for (; d + LANES <= head_dim; d += LANES) blend_some(queries, values, weights, count, entry, d, together, 1);
    for (; d < head_dim; d++)
        for (int q = 0; q < together; q++)
            for (index_t i = 0; i < count; i++) queries[q].found[2 + d] += weights[q][i] * values[i * entry + d];
}

/* Some queries, the first of which sees least ahead and the last least back: what all see at once, the rest one by one. */
INLINE void blend_block(const struct query *queries, const float *values, float (*weights)[ROOM], index_t from,
                        index_t to, index_t entry, index_t head_dim, const int together) {
#define BETWEEN(x, low, high) ((x) < (low) ? (low) : (x) > (high) ? (high) : (x))
#define SOME(which, many, begin, end) \
    blend(queries + which, values + ((begin) - from) * entry, (float(*)[ROOM])(weights[which] + (begin) - from), \
          (end) - (begin), entry, head_dim, many)
    index_t start = BETWEEN(queries[together - 1].start, from, to), stop = BETWEEN(queries[0].stop, start, to);
    for (int q = 0; q < together; q++) SOME(q, 1, BETWEEN(queries[q].start, from, start), BETWEEN(queries[q].stop, from, start));
    SOME(0, together, start, stop);
    for (int q = 0; q < together; q++) SOME(q, 1, stop, BETWEEN(queries[q].stop, stop, to));
#undef SOME
#undef BETWEEN
}

/* Ask for keys or values of a block before they are needed. */
static void prefetch_block(const float *entries, index_t count, index_t entry, index_t head_dim) {
    for (index_t i = 0; i < count; i++)
        for (index_t d = 0; d < head_dim; d += 16) __builtin_prefetch(entries + i * entry + d);
}

/* What a layer's queries look at. */
struct sight {
    const float *cache;
    index_t block_size, heads, kv_heads, head_dim, window, chunked;
    float scale;
};

/* The keys or values of one head, from a position on. */
static const float *entries_at(const struct sight *own, const int *blocks, index_t position, index_t head) {
    index_t place = blocks[position / own->block_size] * own->block_size + position % own->block_size;
    return own->cache + (2 * own->kv_heads * place + head) * own->head_dim;
}

/* Queries of one KV head, in the order of their positions, against those from `from` up to `to`, no more than PART. */
static void attend(const struct sight *own, struct query *queries, index_t count, const int *blocks, index_t kv,
                   index_t from, index_t to) {
    float scores[QUERIES][ROOM];
    index_t entry = 2 * own->kv_heads * own->head_dim, size = own->block_size, head_dim = own->head_dim;
    for (int part = 0; part < 2; part++) {
        for (index_t at = from, end; at < to; at = end) {
            end = (at / size + 1) * size < to ? (at / size + 1) * size : to;
            const float *entries = entries_at(own, blocks, at, kv + part * own->kv_heads);
            if (end < to)
                prefetch_block(entries_at(own, blocks, end, kv + part * own->kv_heads), size, entry, head_dim);
            index_t q = 0;
#define TAKE(together) \
    for (; q + together <= count; q += together) { \
        float(*of_block)[ROOM] = (float(*)[ROOM])(scores[q] + at - from); \
        if (part) blend_block(queries + q, entries, of_block, at, end, entry, head_dim, together); \
        else score(queries + q, entries, of_block, end - at, entry, head_dim, together); \
    }
            TAKE(TOGETHER);
#if TOGETHER > 2
            TAKE(3);
            TAKE(2);
#endif
            TAKE(1);
#undef TAKE
        }
        for (index_t q = 0; q < count && !part; q++) {
            index_t start = queries[q].start > from ? queries[q].start : from;
            index_t stop = queries[q].stop < to ? queries[q].stop : to;
            if (start < stop) soften(scores[q] + start - from, stop - start, own->scale, queries[q].found, head_dim);
        }
    }
}

/* Rows of one sequence that follow each other, and the parts that what they look at is cut into. */
struct run {
    index_t first, rows, length, first_part, parts;
};

static index_t first_seen(const struct sight *own, index_t position) {
    if (own->chunked) return position / own->window * own->window;
    return own->window && position >= own->window ? position - own->window + 1 : 0;
}

static index_t part_length(const struct sight *own, index_t position) {
    index_t length = PART;
    while (length * MOST_PARTS <= position - first_seen(own, position)) length *= 2;
    return length;
}

static struct run run_from(const struct sight *own, const index_t *slots, const index_t *positions, index_t first,
                           index_t rows) {
    index_t last = first, group = own->heads / own->kv_heads, length = part_length(own, positions[first]);
    while (last + 1 < rows && slots[last + 1] == slots[first] && positions[last + 1] == positions[last] + 1 &&
           (last + 2 - first) * group <= QUERIES && part_length(own, positions[last + 1]) == length)
        last++;
    index_t first_part = first_seen(own, positions[first]) / length;
    return (struct run){first, last + 1 - first, length, first_part, positions[last] / length + 1 - first_part};
}

/* One part of a run, for the query heads of one KV head. */
static void attend_part(const struct sight *own, struct run run, index_t part, index_t kv, const float *q, index_t q_stride,
                        const int *blocks, const index_t *positions, float *found, index_t found_parts) {
    struct query queries[QUERIES];
    index_t group = own->heads / own->kv_heads, head_dim = own->head_dim, last = run.first + run.rows - 1, count = 0;
    index_t from = (run.first_part + part) * run.length, to = from + run.length;
    if (from < first_seen(own, positions[run.first])) from = first_seen(own, positions[run.first]);
    if (to > positions[last] + 1) to = positions[last] + 1;
    for (index_t done = 0; done < run.rows * group; done += count) {
        for (count = 0; count < QUERIES && done + count < run.rows * group; count++) {
            index_t row = run.first + (done + count) / group, head = kv * group + (done + count) % group;
            float *own_found = found + ((row * own->heads + head) * found_parts + part) * (2 + head_dim);
            queries[count] = (struct query){q + row * q_stride + head * head_dim, own_found,
                                            first_seen(own, positions[row]), positions[row] + 1};
            memset(own_found, 0, (2 + head_dim) * sizeof(float));
            own_found[0] = -INFINITY;
        }
        for (index_t at = from, end; at < to; at = end) {
            end = (at / PART + 1) * PART < to ? (at / PART + 1) * PART : to;
            attend(own, queries, count, blocks, kv, at, end);
        }
    }
}

/* What the parts of a query have found, as one. A sink is a score without a value. */
static void join(const float *found, index_t parts, const float *sink, float *out, index_t head_dim) {
    float best = sink ? *sink : -INFINITY, total = 0;
    for (index_t part = 0; part < parts; part++) {
        float own = found[part * (2 + head_dim)];
        best = own > best ? own : best;
    }
    if (sink) total = expf(*sink - best);
    memset(out, 0, head_dim * sizeof(float));
    for (index_t part = 0; part < parts; part++, found += 2 + head_dim) {
        float weight = expf(found[0] - best);
        total += weight * found[1];
        for (index_t d = 0; d < head_dim; d++) out[d] += weight * found[2 + d];
    }
    for (index_t d = 0; d < head_dim; d++) out[d] /= total;
}

/* Attention of rows of one token, of which some that follow each other may be of one slot. q and out rows are q_stride and
 * heads * head_dim apart, tables of slots table_width; window 0 means none. */
void decode_attention(const float *q, const float *cache, const index_t *slots, const int *tables,
                      const index_t *positions, float *out, index_t rows, index_t q_stride, index_t table_width,
                      index_t block_size, index_t heads, index_t kv_heads, index_t head_dim, index_t window,
                      index_t chunked, const float *sinks, float scale) {
    struct sight own = {cache, block_size, heads, kv_heads, head_dim, window, chunked, scale};
    struct run *runs = malloc(rows * sizeof(struct run));
    index_t count = 0, parts = 0;
    for (index_t row = 0; row < rows; row += runs[count++].rows) {
        runs[count] = run_from(&own, slots, positions, row, rows);
        parts = runs[count].parts > parts ? runs[count].parts : parts;
    }
    float *found = malloc(rows * heads * parts * (2 + head_dim) * sizeof(float));
#pragma omp parallel
    {
#pragma omp for collapse(3) schedule(dynamic, 1)
        for (index_t number = 0; number < count; number++)
            for (index_t part = 0; part < parts; part++)
                for (index_t kv = 0; kv < kv_heads; kv++)
                    if (part < runs[number].parts)
                        attend_part(&own, runs[number], part, kv, q, q_stride,
                                    tables + slots[runs[number].first] * table_width, positions, found, parts);
#pragma omp for collapse(2) schedule(static)
        for (index_t number = 0; number < count; number++)
            for (index_t head = 0; head < heads; head++)
                for (index_t row = runs[number].first; row < runs[number].first + runs[number].rows; row++)
                    join(found + (row * heads + head) * parts * (2 + head_dim), runs[number].parts,
                         sinks ? sinks + head : 0, out + (row * heads + head) * head_dim, head_dim);
    }
    free(runs);
    free(found);
}

#define ROWS_AT_ONCE 64 /* whose inputs stay near while all weights pass by */
#define STRETCH 512     /* of the inner dimension, in which inputs and weights of a tile stay nearer still */

/* Sums of `rows` inputs and `columns` outputs at once, over a stretch of the inner dimension: every weight is loaded once
 * for all rows, every input once for all columns. */
INLINE void tile(const float *x, const float *w, vec (*sums)[4], index_t x_apart,
                                                       index_t w_apart, index_t from, index_t to, const int rows,
                                                       const int columns) {
    vec acc[4][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) acc[r][c] = sums[r][c];
    for (index_t i = from; i < to; i += LANES) {
        vec weights[4];
        __builtin_prefetch(w + (columns + ((i / LANES) & 3)) * w_apart + i); /* the next tile's weights, a column in turn */
        for (int c = 0; c < columns; c++) weights[c] = load(w + c * w_apart + i);
        for (int r = 0; r < rows; r++) {
            vec input = load(x + r * x_apart + i);
            for (int c = 0; c < columns; c++) acc[r][c] += input * weights[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = acc[r][c];
}

INLINE void stretch(const float *x, const float *w, vec (*sums)[4], index_t m,
                                                          index_t x_apart, index_t w_apart, index_t from, index_t to,
                                                          const int columns) {
    for (; m >= 4; m -= 4, x += 4 * x_apart, sums += 4) tile(x, w, sums, x_apart, w_apart, from, to, 4, columns);
    if (m == 3) tile(x, w, sums, x_apart, w_apart, from, to, 3, columns);
    if (m == 2) tile(x, w, sums, x_apart, w_apart, from, to, 2, columns);
    if (m == 1) tile(x, w, sums, x_apart, w_apart, from, to, 1, columns);
}

/* Some columns of a product. The inner dimension is summed in `units`, a power of two, and these as a balanced tree. Each
 * output is computed in one and the same order whatever the rows and columns beside it. */
INLINE void columns_of(const float *x, const float *w, const float *bias, float *y,
                                                             index_t m, index_t k, index_t n, index_t units,
                                                             index_t x_apart, index_t w_apart, const int columns) {
    vec sums[ROWS_AT_ONCE][4];
    float tree[8][ROWS_AT_ONCE][4];
    index_t width = k / units, whole = width / LANES * LANES, level = 0;
    for (index_t unit = 0; unit < units; unit++, x += width, w += width) {
        memset(sums, 0, m * sizeof(sums[0]));
        for (index_t from = 0; from < whole; from += STRETCH)
            stretch(x, w, sums, m, x_apart, w_apart, from, from + STRETCH < whole ? from + STRETCH : whole, columns);
        for (index_t r = 0; r < m; r++) {
            float part[4];
            for (int c = 0; c < columns; c++) part[c] = sum(sums[r][c]);
            for (index_t j = whole; j < width; j++)
                for (int c = 0; c < columns; c++) part[c] += x[r * x_apart + j] * w[c * w_apart + j];
            if (bias && unit == 0)
                for (int c = 0; c < columns; c++) part[c] += bias[c];
            level = 0;
            for (index_t left = unit; left & 1; left >>= 1, level++)
                for (int c = 0; c < columns; c++) part[c] = tree[level][r][c] + part[c];
            for (int c = 0; c < columns; c++) tree[level][r][c] = part[c];
        }
    }
    for (index_t r = 0; r < m; r++)
        for (int c = 0; c < columns; c++) y[r * n + c] = tree[level][r][c];
}

/* y = x @ w.T + bias for few rows: x is [m, k], w [n, k], both with rows so far apart, y [m, n]. */
void skinny_gemm(const float *x, const float *w, const float *bias, float *y, index_t m, index_t n, index_t k,
                 index_t units, index_t x_apart, index_t w_apart) {
    for (; m > 0; m -= ROWS_AT_ONCE, x += ROWS_AT_ONCE * x_apart, y += ROWS_AT_ONCE * n) {
        index_t rows = m < ROWS_AT_ONCE ? m : ROWS_AT_ONCE;
#pragma omp parallel for schedule(static) if (n * k > PARALLEL_FROM)
        for (index_t column = 0; column < n / 4; column++)
            columns_of(x, w + column * 4 * w_apart, bias ? bias + column * 4 : 0, y + column * 4, rows, k, n, units,
                       x_apart, w_apart, 4);
        for (index_t c = n / 4 * 4; c < n; c++)
            columns_of(x, w + c * w_apart, bias ? bias + c : 0, y + c, rows, k, n, units, x_apart, w_apart, 1);
    }
}

/* y = w @ x + bias for one row: the weight, whose n rows are so far apart, is read from its beginning to its end. */
void row_product(const float *x, const float *w, const float *bias, float *y, index_t n, index_t k, index_t w_apart) {
#pragma omp parallel for schedule(static) if (n * k > PARALLEL_FROM)
    for (index_t i = 0; i < n; i++) y[i] = dot(x, w + i * w_apart, k) + (bias ? bias[i] : 0);
}

/* The column of a row's largest number, the first of equals, or of its first NaN. */
static index_t largest(const float *x, index_t width) {
    vec tops = splat(-INFINITY);
    ivec broken = {0};
    index_t i = 0, found = 0;
    for (; i + LANES <= width; i += LANES) {
        vec some = load(x + i);
        tops = pick(some > tops, some, tops);
        broken |= some != some;
    }
    float top = -INFINITY;
    int is_broken = 0;
    for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top, is_broken |= broken[lane];
    for (; i < width; i++) top = x[i] > top ? x[i] : top, is_broken |= x[i] != x[i];
    while (is_broken ? x[found] == x[found] : x[found] != top) found++;
    return found;
}

void likeliest(const float *scores, int *out, index_t rows, index_t width) {
#pragma omp parallel for if (rows > 1 && rows * width > PARALLEL_FROM)
    for (index_t row = 0; row < rows; row++) out[row] = largest(scores + row * width, width);
}

#define DIGEST_COLUMNS 8

/* out = sum over words of word * (2 * column + 1), modulo 2^64: rows are added up first, some columns at once. */
void row_digest(const unsigned long long *words, unsigned long long *out, index_t rows, index_t width) {
    unsigned long long total = 0;
    index_t first = 0;
    for (; first + DIGEST_COLUMNS <= width; first += DIGEST_COLUMNS) {
        unsigned long long sums[DIGEST_COLUMNS] = {0};
        for (const unsigned long long *row = words + first; row < words + rows * width; row += width)
            for (index_t i = 0; i < DIGEST_COLUMNS; i++) sums[i] += row[i];
        for (index_t i = 0; i < DIGEST_COLUMNS; i++) total += sums[i] * (2 * (unsigned long long)(first + i) + 1);
    }
    for (; first < width; first++)
        for (index_t row = 0; row < rows; row++)
            total += words[row * width + first] * (2 * (unsigned long long)first + 1);
    *out = total;
}

#define FLAGS_APART 8 /* each rank's flag on a cache line of its own */

/* Ranks that share memory: says that this one has come to `round` and looks whether all have, `looks` times at most.
 * A rank that is late may wait for this very core, so it is given away soon, and later left alone for a while. */
int meet(long long *flags, index_t rank, index_t ranks, index_t round, index_t looks) {
    __atomic_store_n(&flags[rank * FLAGS_APART], round, __ATOMIC_RELEASE);
    index_t looked = 0;
    for (index_t other = 0; other < ranks; other++)
        while (__atomic_load_n(&flags[other * FLAGS_APART], __ATOMIC_ACQUIRE) < round) {
            if (++looked == looks) return 0;
            if (looked > 4000) usleep(50);
            else if (looked > 500) sched_yield();
        }
    return 1;
}

/* Keeps each thread of the caller's pool to one core; the caller is the first. */
void own_cores(const long long *cores, index_t threads) {
#pragma omp parallel num_threads(threads)
    {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cores[omp_get_thread_num()], &own);
        sched_setaffinity(0, sizeof own, &own);
    }
}
