/* float32 kernels for CPUs. Each computes what the torch function of the same name in this folder defines. The last
 * two are none: by them ranks on the CPUs of one machine meet (fabric/host.py), and threads keep to cores (runtime/cores.py).
 * Compiled on first use by the machine's own C compiler (see cpu.py), so that it fits the machine's vector width.
 * Work is shared among OpenMP threads only where a thread's share outweighs waking it. */
#define _GNU_SOURCE
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

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

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline float sum(vec v) {
    float total = v[0];
    for (int i = 1; i < LANES; i++) total += v[i];
    return total;
}

static inline float dot(const float *a, const float *b, index_t n) {
    vec acc = {0}, acc2 = {0};
    index_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        acc += load(a + i) * load(b + i);
        acc2 += load(a + i + LANES) * load(b + i + LANES);
    }
    float total = sum(acc + acc2);
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

/* exp(x) to float precision: 2^n * e^r with |r| <= ln(2)/2. */
static inline vec vexp(vec x) {
    x = pick(x > 88.0f, splat(88.0f), x);
    x = pick(x < -87.0f, splat(-87.0f), x);
    ivec whole = __builtin_convertvector(x * 1.44269504f + pick(x < 0.0f, splat(-0.5f), splat(0.5f)), ivec);
    vec n = __builtin_convertvector(whole, vec);
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((whole + 127) << 23);
}

/* out = silu(gate) * up, where a row of gate_up is [gate | up]. */
void silu_and_mul(const float *gate_up, float *out, index_t rows, index_t width) {
#pragma omp parallel for if (rows > 1 && rows * width > PARALLEL_FROM)
    for (index_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        index_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            vec g = load(gate + i);
            store(out + row * width + i, g / (1.0f + vexp(-g)) * load(up + i));
        }
        if (i < width) { /* the rest in the same way: a column is the same wherever it stands */
            float g[LANES] = {0}, rest[LANES];
            memcpy(g, gate + i, (width - i) * sizeof(float));
            store(rest, load(g) / (1.0f + vexp(-load(g))));
            for (index_t j = i; j < width; j++) out[row * width + j] = rest[j - i] * up[j];
        }
    }
}

static inline void rotate(float *head, const float *cos, const float *sin, index_t half) {
    for (index_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] + b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* Rotate q and k in place (cos and sin are [tokens, rotary]), then store k and v at write_to in the flattened cache. */
void rotate_and_store(float *qkv, const float *cos, const float *sin, const index_t *write_to, float *cache,
                      index_t tokens, index_t heads, index_t kv_heads, index_t head_dim, index_t rotary) {
    index_t width = (heads + 2 * kv_heads) * head_dim, entry = 2 * kv_heads * head_dim;
#pragma omp parallel for if (tokens > 1 && tokens * width > PARALLEL_FROM)
    for (index_t token = 0; token < tokens; token++) {
        float *row = qkv + token * width;
        for (index_t head = 0; head < heads + kv_heads; head++)
            rotate(row + head * head_dim, cos + token * rotary, sin + token * rotary, rotary / 2);
        memcpy(cache + write_to[token] * entry, row + heads * head_dim, entry * sizeof(float));
    }
}

/* scores[i] = q . keys[i] for the keys of one block, four keys at a time: each part of q is loaded once for all four. */
static void score(const float *q, const float *keys, float *scores, index_t count, index_t entry, index_t head_dim) {
    index_t i = 0;
    for (; i + 4 <= count; i += 4) {
        vec acc[4] = {{0}, {0}, {0}, {0}};
        index_t d = 0;
        for (; d + LANES <= head_dim; d += LANES)
            for (int key = 0; key < 4; key++) acc[key] += load(q + d) * load(keys + (i + key) * entry + d);
        for (int key = 0; key < 4; key++) {
            scores[i + key] = sum(acc[key]);
            for (index_t rest = d; rest < head_dim; rest++) scores[i + key] += q[rest] * keys[(i + key) * entry + rest];
        }
    }
    for (; i < count; i++) scores[i] = dot(q, keys + i * entry, head_dim);
}

/* out = out * shrink + sum of weights[i] * values[i]: eight vectors of the head stay in registers over all positions. */
static void blend(const float *weights, const float *values, float *out, float shrink, index_t count, index_t entry,
                  index_t head_dim) {
    index_t d = 0;
    for (; d + 8 * LANES <= head_dim; d += 8 * LANES) {
        vec acc[8];
        for (int j = 0; j < 8; j++) acc[j] = load(out + d + j * LANES) * shrink;
        for (index_t i = 0; i < count; i++)
            for (int j = 0; j < 8; j++) acc[j] += weights[i] * load(values + i * entry + d + j * LANES);
        for (int j = 0; j < 8; j++) store(out + d + j * LANES, acc[j]);
    }
    for (; d < head_dim; d++) {
        float total = out[d] * shrink;
        for (index_t i = 0; i < count; i++) total += weights[i] * values[i * entry + d];
        out[d] = total;
    }
}

/* The query heads of one group against a stretch of cached positions: a running softmax, the same keys for all heads. */
static void attend(const float *q, const float *keys, const float *values, float *out, float *best, float *total,
                   index_t group, index_t count, index_t entry, index_t head_dim, float scale) {
    float scores[count + LANES];
    for (index_t head = 0; head < group; head++) {
        score(q + head * head_dim, keys, scores, count, entry, head_dim);
        float top = best[head];
        for (index_t i = 0; i < count; i++) {
            scores[i] *= scale;
            if (scores[i] > top) top = scores[i];
        }
        float shrink = expf(best[head] - top);
        for (index_t i = 0; i < count; i += LANES) store(scores + i, vexp(load(scores + i) - top));
        total[head] *= shrink;
        for (index_t i = 0; i < count; i++) total[head] += scores[i];
        best[head] = top;
        blend(scores, values, out + head * head_dim, shrink, count, entry, head_dim);
    }
}

/* Ask for the keys and values of a block before they are needed. */
static void prefetch_block(const float *keys, index_t block_size, index_t entry, index_t value, index_t head_dim) {
    for (index_t i = 0; i < block_size; i++)
        for (index_t d = 0; d < head_dim; d += 16) {
            __builtin_prefetch(keys + i * entry + d);
            __builtin_prefetch(keys + i * entry + value + d);
        }
}

/* Attention of one new token a sequence. q and out rows are q_stride and heads * head_dim apart; window 0 means none. */
void decode_attention(const float *q, const float *cache, const index_t *table, const index_t *positions, float *out,
                      index_t rows, index_t q_stride, index_t table_width, index_t block_size, index_t heads,
                      index_t kv_heads, index_t head_dim, index_t window, index_t chunked, const float *sinks,
                      float scale) {
    index_t entry = 2 * kv_heads * head_dim, value = kv_heads * head_dim, group = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (index_t row = 0; row < rows; row++)
        for (index_t kv = 0; kv < kv_heads; kv++) {
            const index_t *blocks = table + row * table_width;
            index_t last = positions[row], at = window && last >= window ? last - window + 1 : 0;
            if (chunked) at = last / window * window;
            float *o = out + (row * heads + kv * group) * head_dim, best[group], total[group];
            for (index_t head = 0; head < group; head++)
                best[head] = sinks ? sinks[kv * group + head] : -INFINITY, total[head] = sinks ? 1 : 0;
            memset(o, 0, group * head_dim * sizeof(float));
            while (at <= last) {
                index_t block = at / block_size, end = (block + 1) * block_size;
                const float *keys = cache + (blocks[block] * block_size + at % block_size) * entry + kv * head_dim;
                if (end <= last)
                    prefetch_block(cache + blocks[block + 1] * block_size * entry + kv * head_dim, block_size, entry,
                                   value, head_dim);
                attend(q + row * q_stride + kv * group * head_dim, keys, keys + value, o, best, total, group,
                       (end <= last ? end : last + 1) - at, entry, head_dim, scale);
                at = end;
            }
            for (index_t head = 0; head < group; head++)
                for (index_t i = 0; i < head_dim; i++) o[head * head_dim + i] /= total[head];
        }
}

#define ROWS_AT_ONCE 64 /* whose inputs stay near while all weights pass by */
#define STRETCH 512     /* of the inner dimension, in which inputs and weights of a tile stay nearer still */

/* Sums of `rows` inputs and `columns` outputs at once, over a stretch of the inner dimension: every weight is loaded once
 * for all rows, every input once for all columns. */
static inline __attribute__((always_inline)) void tile(const float *x, const float *w, vec (*sums)[4], index_t x_apart,
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

static inline __attribute__((always_inline)) void stretch(const float *x, const float *w, vec (*sums)[4], index_t m,
                                                          index_t x_apart, index_t w_apart, index_t from, index_t to,
                                                          const int columns) {
    for (; m >= 4; m -= 4, x += 4 * x_apart, sums += 4) tile(x, w, sums, x_apart, w_apart, from, to, 4, columns);
    if (m == 3) tile(x, w, sums, x_apart, w_apart, from, to, 3, columns);
    if (m == 2) tile(x, w, sums, x_apart, w_apart, from, to, 2, columns);
    if (m == 1) tile(x, w, sums, x_apart, w_apart, from, to, 1, columns);
}

/* Some columns of a product. The inner dimension is summed in `units`, a power of two, and these as a balanced tree. Each
 * output is computed in one and the same order whatever the rows and columns beside it. */
static inline __attribute__((always_inline)) void columns_of(const float *x, const float *w, const float *bias, float *y,
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
