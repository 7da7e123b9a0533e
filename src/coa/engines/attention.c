/* Attention over ragged caches: each run adds some tokens to one slot of the cache and sees what that
 * slot holds. One thread computes one (few tokens, key-value head) alone and in a fixed order, so the
 * result of a run does not depend on who shares the batch.
 *
 * The cache is laid out for its reader. Keys stand in blocks of LANES, dimension by dimension, so that
 * as many scores grow in one register and no sum goes across lanes. In bfloat16 two neighbours (two
 * dimensions of a key, two keys of a dimension of the values) share 32 bits, as the processor's
 * dot-product instruction wants them. Head dimensions are padded to a multiple of PADDING with zeros.
 * The first PAGE tokens of all slots come first, then the next ones: memory that nobody has reached
 * is never touched.
 */
#define WIDE (PADDING / LANES)
#define QUERIES 6   /* computed together, so that each key is loaded once for all of them */
#define PART 8      /* tokens of a run that one thread takes at a time */
#if LANES == 16     /* vectors that each of n queries sums up at a time: AVX512 has 32 registers */
#define BLOCKS_AT_ONCE(n) ((n) <= 3 ? 2 : 1)
#define WIDTH_AT_ONCE(n) WIDE
#else               /* AVX2 has 16, of half the size */
#define BLOCKS_AT_ONCE(n) ((n) <= 3 ? 4 : 2)
#define WIDTH_AT_ONCE(n) ((n) <= 3 ? 4 : 2)
#endif

typedef struct {
    int32_t heads, kv_heads, head_dim, padded, slots, bf16;
    float scale, eps;
    const float *cos, *sin;              /* [context, head_dim / 2] */
    const void *q_norm, *k_norm;         /* [head_dim] or null */
} Geometry;

typedef struct {
    int32_t slot, start, size, first;    /* first: its place among all tokens of the step */
} Run;

static __thread char *scratch;
static __thread size_t scratch_size;

static void *room(size_t bytes) {
    if (bytes > scratch_size) {
        free(scratch);
        scratch_size = (bytes + 65535) / 65536 * 65536;
        scratch = aligned_alloc(64, scratch_size);
    }
    return scratch;
}

/* Where a slot's head has the page of a position, in numbers from the start of a cache. */
INLINE size_t page(const Geometry *g, int slot, int head, int position) {
    size_t row = ((size_t)(position / PAGE) * g->slots + slot) * g->kv_heads + head;
    return row * PAGE * g->padded;
}

/* One head of one token: normalise (Qwen3), turn by its position, and give padded floats. */
static void prepare(const Geometry *g, const void *from, const void *norm, int position, float *restrict to) {
    int dim = g->head_dim, half = dim / 2;
    const float *restrict cos = g->cos + (size_t)position * half;
    const float *restrict sin = g->sin + (size_t)position * half;
    float plain[dim];
    vf squares = {0};
    for (int d = 0; d < dim; d += LANES) {
        vf x = read(from, d, g->bf16);
        squares += x * x;
        store(plain + d, x);
    }
    if (norm) {
        float inverse = 1.0f / sqrtf(total(squares) / dim + g->eps);
        for (int d = 0; d < dim; d += LANES)
            store(plain + d, load(plain + d) * inverse * read(norm, d, g->bf16));
    }
    for (int d = 0; d < half; d++) {
        to[d] = plain[d] * cos[d] - plain[d + half] * sin[d];
        to[d + half] = plain[d + half] * cos[d] + plain[d] * sin[d];
    }
    for (int d = dim; d < g->padded; d++) to[d] = 0;
}

/* Put the new keys and values of a token where its slot expects them, and its queries beside. */
static void place(const Geometry *g, const void *qkv, void *keys, void *values, void *queries,
                  int slot, int position) {
    int width = g->bf16 ? 2 : 4, dim = g->head_dim, padded = g->padded;
    const char *from = qkv;
    float turned[padded];
    for (int h = 0; h < g->heads; h++, from += dim * width) {
        prepare(g, from, g->q_norm, position, turned);
        for (int d = 0; d < padded; d += LANES) write(queries, h * padded + d, load(turned + d), g->bf16);
    }
    int block = position % PAGE / LANES, lane = position % LANES;
    for (int h = 0; h < g->kv_heads; h++, from += dim * width) {
        prepare(g, from, g->k_norm, position, turned);
        size_t to = page(g, slot, h, position) + (size_t)block * LANES * padded;
        if (g->bf16) {
            uint32_t *column = (uint32_t *)((uint16_t *)keys + to) + lane, pairs[padded / 2];
            for (int d = 0; d < padded; d += LANES) write(pairs, d, load(turned + d), 1);
            for (int d = 0; d < padded / 2; d++) column[d * LANES] = pairs[d];
        } else
            for (int d = 0; d < padded; d++) ((float *)keys)[to + d * LANES + lane] = turned[d];
    }
    for (int h = 0; h < g->kv_heads; h++, from += dim * width) {
        size_t to = page(g, slot, h, position);
        if (!g->bf16) {
            memcpy((float *)values + to + (size_t)(position % PAGE) * padded, from, dim * 4);
            continue;
        }
        uint16_t *pairs = (uint16_t *)values + to + (size_t)(position % PAGE / 2) * 2 * padded;
        for (int d = 0; d < dim; d += LANES) { /* this key's half of each pair; the other stays */
            vu_any *pair = (vu_any *)(pairs + 2 * d);
            vu x = __builtin_convertvector(*(const vh_any *)((const uint16_t *)from + d), vu);
            *pair = position % 2 ? (*pair & 0xffff) | x << 16 : (*pair & 0xffff0000u) | x;
        }
    }
}

/* scores[r][LANES of each block ...] of n queries, `at` blocks of keys at once */
INLINE void score(const Geometry *g, const void *cache, int slot, int head, const void *const *q, int n,
                  int at, int block, float *const *scores) {
    vf sum[QUERIES * 2];
    int pairs = g->padded / 2, position = block * LANES;
    size_t keys = page(g, slot, head, position) + (size_t)(position % PAGE) * g->padded;
    for (int i = 0; i < n * at; i++) sum[i] = (vf){0};
    if (g->bf16) {
        const vu *k = (const vu *)((const uint16_t *)cache + keys);
        for (int d = 0; d < pairs; d++)
            for (int b = 0; b < at; b++) {
                vu x = k[b * pairs + d];
                for (int r = 0; r < n; r++) {
                    vu y = ((const uint32_t *)q[r])[d] - (vu){0};
                    sum[b * n + r] = dot2(sum[b * n + r], y, x);
                }
            }
    } else {
        const vf *k = (const vf *)((const float *)cache + keys);
        for (int d = 0; d < g->padded; d++)
            for (int b = 0; b < at; b++) {
                vf x = k[b * g->padded + d];
                for (int r = 0; r < n; r++)
                    sum[b * n + r] += spread(((const float *)q[r])[d]) * x;
            }
    }
    for (int b = 0; b < at; b++)
        for (int r = 0; r < n; r++) store(scores[r] + (block + b) * LANES, sum[b * n + r] * g->scale);
}

/* Scores of one query become weights, in place; in bfloat16 they are rounded and packed. Returns
 * the sum of what is used. Beyond `seen` keys everything gets weight 0. */
static float weigh(float *scores, int seen, int blocks, int bf16) {
    vf top = spread(-INFINITY), sum = {0};
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int b = 0; b < blocks; b++) {
        vf x = load(scores + b * LANES);
        x = pick(lane + b * LANES < seen, x, spread(-INFINITY));
        store(scores + b * LANES, x);
        top = pick(x > top, x, top);
    }
    float most = top[0];
    for (int i = 1; i < LANES; i++) most = top[i] > most ? top[i] : most;
    for (int b = 0; b < blocks; b++) {
        vf x = exp_negative(load(scores + b * LANES) - most);
        x = pick(lane + b * LANES < seen, x, (vf){0});
        if (bf16) {
            vu bits = round_bits(x);
            sum += (vf)(bits << 16);
            *(vh_any *)((uint16_t *)scores + b * LANES) = __builtin_convertvector(bits, vh);
        } else {
            sum += x;
            store(scores + b * LANES, x);
        }
    }
    return total(sum);
}

/* `many` vectors of the weighted values of n queries, from vector `w` of 64 dimensions on */
INLINE void mix_slice(const Geometry *g, const void *cache, int slot, int head, float *const *weights, int n,
                      int blocks, int from, int w, int many, vf (*sum)[WIDE]) {
    int padded = g->padded, end = blocks * LANES;
    vf part[QUERIES * WIDE];
    for (int i = 0; i < n * many; i++) part[i] = (vf){0};
    for (int first = 0; first < end; first += PAGE) {
        int count = end - first < PAGE ? end - first : PAGE;
        size_t at = page(g, slot, head, first);
        if (g->bf16) {
            const uint16_t *values = (const uint16_t *)cache + at + 2 * (from + w * LANES);
            for (int p = 0; p < count / 2; p++) {
                const vu_any *v = (const vu_any *)(values + (size_t)p * 2 * padded);
                for (int r = 0; r < n; r++) {
                    vu y = ((const uint32_t *)weights[r])[first / 2 + p] - (vu){0};
                    for (int i = 0; i < many; i++) part[r * many + i] = dot2(part[r * many + i], y, v[i]);
                }
            }
        } else {
            const float *values = (const float *)cache + at + from + w * LANES;
            for (int p = 0; p < count; p++) {
                const float *v = values + (size_t)p * padded;
                for (int r = 0; r < n; r++)
                    for (int i = 0; i < many; i++)
                        part[r * many + i] += spread(weights[r][first + p]) * load(v + i * LANES);
            }
        }
    }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < many; i++) sum[r][w + i] = part[r * many + i];
}

/* 64 dimensions of the weighted values of n queries, as many at a time as registers hold */
INLINE void mix(const Geometry *g, const void *cache, int slot, int head, float *const *weights, int n,
                int blocks, int from, vf (*sum)[WIDE]) {
    for (int w = 0; w < WIDE; w += WIDTH_AT_ONCE(n))
        mix_slice(g, cache, slot, head, weights, n, blocks, from, w, WIDTH_AT_ONCE(n), sum);
}

INLINE void attend_queries(const Geometry *g, const void *keys, const void *values, int slot, int head,
                           const void *const *q, const int *seen, int n, void *const *out) {
    int most = 0;
    for (int r = 0; r < n; r++) most = seen[r] > most ? seen[r] : most;
    int blocks = (most + LANES - 1) / LANES, together = BLOCKS_AT_ONCE(n), b = 0;
    float *base = room((size_t)n * blocks * LANES * 4), *scores[QUERIES], sums[QUERIES];
    for (int r = 0; r < n; r++) scores[r] = base + (size_t)r * blocks * LANES;
    for (; b + together <= blocks; b += together) score(g, keys, slot, head, q, n, together, b, scores);
    for (; b < blocks; b++) score(g, keys, slot, head, q, n, 1, b, scores);
    for (int r = 0; r < n; r++) sums[r] = weigh(scores[r], seen[r], blocks, g->bf16);
    for (int from = 0; from < g->head_dim; from += WIDE * LANES) {
        vf sum[QUERIES][WIDE];
        mix(g, values, slot, head, scores, n, blocks, from, sum);
        for (int r = 0; r < n; r++) {
            float inverse = 1.0f / sums[r];
            for (int w = 0; w < WIDE && from + w * LANES < g->head_dim; w++)
                write(out[r], from + w * LANES, sum[r][w] * inverse, g->bf16);
        }
    }
}

/* A few tokens of a run under one key-value head: tokens x group queries, QUERIES at a time. */
static void attend_part(const Geometry *g, const void *keys, const void *values, const void *queries,
                        void *out, const Run *run, int first, int count, int head) {
    int group = g->heads / g->kv_heads, width = g->bf16 ? 2 : 4;
    for (int i = 0; i < count * group; i += QUERIES) {
        const void *q[QUERIES];
        void *to[QUERIES];
        int seen[QUERIES], n = count * group - i < QUERIES ? count * group - i : QUERIES;
        for (int r = 0; r < n; r++) {
            int token = first + (i + r) / group, which = head * group + (i + r) % group;
            size_t row = (size_t)(run->first + token) * g->heads + which;
            q[r] = (const char *)queries + row * g->padded * width;
            to[r] = (char *)out + row * g->head_dim * width;
            seen[r] = run->start + token + 1;
        }
        switch (n) { /* constants, so that sums stay in registers */
        case 1: attend_queries(g, keys, values, run->slot, head, q, seen, 1, to); break;
        case 2: attend_queries(g, keys, values, run->slot, head, q, seen, 2, to); break;
        case 3: attend_queries(g, keys, values, run->slot, head, q, seen, 3, to); break;
        case 4: attend_queries(g, keys, values, run->slot, head, q, seen, 4, to); break;
        case 5: attend_queries(g, keys, values, run->slot, head, q, seen, 5, to); break;
        default: attend_queries(g, keys, values, run->slot, head, q, seen, 6, to);
        }
    }
}

/* One layer: store the keys and values of all tokens, then give what each token sees.
 * qkv [tokens, (heads + 2 kv_heads) head_dim], queries [tokens, heads, padded] is room to work in,
 * out [tokens, heads head_dim]. A thread takes up to PART tokens of a run at a time; parts end at
 * multiples of PART, so that the two keys of a pair are never two threads' work. */
void coa_attend(const Geometry *g, const Run *runs, int n_runs, const void *qkv, void *keys, void *values,
                void *queries, void *out) {
    int width = g->bf16 ? 2 : 4, parts = 0;
    for (int i = 0; i < n_runs; i++) parts += runs[i].size / PART + 2;
    struct { int32_t run, first, count; } *part = malloc(parts * sizeof *part);
    parts = 0;
    for (int i = 0; i < n_runs; i++)
        for (int t = 0, count; t < runs[i].size; t += count, parts++) {
            count = PART - (runs[i].start + t) % PART;
            if (count > runs[i].size - t) count = runs[i].size - t;
            part[parts].run = i, part[parts].first = t, part[parts].count = count;
        }
    size_t row_in = (size_t)(g->heads + 2 * g->kv_heads) * g->head_dim * width;
    size_t row_q = (size_t)g->heads * g->padded * width;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int p = 0; p < parts; p++) {
            const Run *run = runs + part[p].run;
            for (int t = part[p].first; t < part[p].first + part[p].count; t++) {
                size_t row = run->first + t;
                place(g, (const char *)qkv + row * row_in, keys, values, (char *)queries + row * row_q,
                      run->slot, run->start + t);
            }
        }
#pragma omp for schedule(dynamic)
        for (int i = 0; i < parts * g->kv_heads; i++) {
            int p = i / g->kv_heads;
            attend_part(g, keys, values, queries, out, runs + part[p].run, part[p].first, part[p].count,
                        i % g->kv_heads);
        }
        free(scratch); /* the thread may be given up before the next step */
        scratch = NULL, scratch_size = 0;
    }
    free(part);
}
