/* A whole decoder layer of the plainest kind (see layer.py): the kernels of cpu.c and panels.c, one after the other. */
#include <stdlib.h>
#include <time.h>

typedef long long index_t;
struct matrix;

/* In float32, with rows so far apart. As layer.py has it. */
struct dense {
    const float *weight;
    index_t rows, columns, apart;
};

void add_rms_norm(const float *x, float *residual, const float *weight, float *out, index_t rows, index_t width, float eps);
void silu_and_mul(const float *gate_up, float *out, index_t rows, index_t width);
void rotate_and_store(float *qkv, const float *cos, const float *sin, const index_t *write_to, float *cache,
                      index_t tokens, index_t heads, index_t kv_heads, index_t head_dim, index_t rotary);
void decode_attention(const float *q, const float *cache, const index_t *slots, const int *tables,
                      const index_t *positions, float *out, index_t rows, index_t q_stride, index_t table_width,
                      index_t block_size, index_t heads, index_t kv_heads, index_t head_dim, index_t window,
                      index_t chunked, const float *sinks, float scale);
void row_product(const float *x, const float *w, const float *bias, float *y, index_t n, index_t k, index_t w_apart);
void skinny_gemm(const float *x, const float *w, const float *bias, float *y, index_t m, index_t n, index_t k,
                 index_t units, index_t x_apart, index_t w_apart);
void panel_product(const struct matrix *w, const float *x, const float *bias, float *y, index_t m);

/* As layer.py has it. */
struct layer {
    const float *mixer_norm, *ffn_norm;
    const void *qkv, *output, *gate_up, *down; /* struct matrix, or struct dense */
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    float *cache;
    const float *sinks;
    index_t hidden, heads, kv_heads, head_dim, inner, block_size, window, chunked, is_dense;
    float eps, scale;
    index_t halfway;
};

static void product(const struct layer *own, const void *w, const float *x, const float *bias, float *y, index_t m) {
    const struct dense *dense = w;
    if (!own->is_dense) panel_product(w, x, bias, y, m);
    else if (m == 1) row_product(x, dense->weight, bias, y, dense->rows, dense->columns, dense->apart);
    else skinny_gemm(x, dense->weight, bias, y, m, dense->rows, dense->columns, 1, dense->columns, dense->apart);
}

/* residual += part, and `out` is what is to be added next; it may be `part`, which is missing in the first layer.
   `halfway` gets the ns of the monotonic clock between the mixer and the FFN. */
void whole_layer(struct layer *own, float *residual, const float *part, float *out, const float *cos,
                 const float *sin, const index_t *write_to, const index_t *slots, const int *tables,
                 const index_t *positions, index_t rows, index_t table_width, index_t rotary) {
    index_t heads = own->heads * own->head_dim, width = heads + 2 * own->kv_heads * own->head_dim;
    index_t mixer = width + heads, ffn = 3 * own->inner;
    float *normed = malloc(rows * (own->hidden + (mixer > ffn ? mixer : ffn)) * sizeof(float));
    float *qkv = normed + rows * own->hidden, *attended = qkv + rows * width;
    float *gate_up = qkv, *gated = gate_up + rows * 2 * own->inner;
    add_rms_norm(part ? part : residual, part ? residual : 0, own->mixer_norm, normed, rows, own->hidden, own->eps);
    product(own, own->qkv, normed, own->qkv_bias, qkv, rows);
    rotate_and_store(qkv, cos, sin, write_to, own->cache, rows, own->heads, own->kv_heads, own->head_dim, rotary);
    decode_attention(qkv, own->cache, slots, tables, positions, attended, rows, width, table_width, own->block_size,
                     own->heads, own->kv_heads, own->head_dim, own->window, own->chunked, own->sinks, own->scale);
    product(own, own->output, attended, own->output_bias, out, rows);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    own->halfway = now.tv_sec * 1000000000LL + now.tv_nsec;
    add_rms_norm(out, residual, own->ffn_norm, normed, rows, own->hidden, own->eps);
    product(own, own->gate_up, normed, own->gate_up_bias, gate_up, rows);
    silu_and_mul(gate_up, gated, rows, own->inner);
    product(own, own->down, gated, own->down_bias, out, rows);
    free(normed);
}
