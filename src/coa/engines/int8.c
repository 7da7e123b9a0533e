/* Products of a few rows with weights of 8 bits.
 *
 * A product of one row reads every weight once and computes next to nothing, so its time is that of
 * reading. Weights are stored as 8 bits with one scale for GROUP inputs of an output; the rows get 16
 * bits, which loses less than bfloat16 does. Sums over a group are exact integers, and groups are
 * added in one order: a row's result does not depend on how many others there are.
 *
 * Packed weights, for each tile of TILE outputs and in it for each group of inputs: TILE scales
 * (float), then [GROUP / 2][TILE][2] weights, so that one load has a pair of inputs of LANES outputs.
 */
#define BLOCKS (TILE / LANES)
#if LANES == 16
#define TOGETHER 4 /* rows that share a pass, as their sums fit into registers */
#define IN_TURNS 2 /* most rows whose pairs are added up in two turns, as each sum is waited for */
#else
#define TOGETHER 3
#define IN_TURNS 1
#endif

typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef int8_t vb __attribute__((vector_size(2 * LANES)));
typedef vb vb_any __attribute__((aligned(1), may_alias));
typedef int32_t pairs_any __attribute__((may_alias));
typedef struct { float scale[TILE]; int8_t weight[GROUP / 2][TILE][2]; } Part;

INLINE vs widen_bytes(const int8_t *p) {
#if LANES == 16 && defined(__AVX512BW__)
    return (vs)_mm512_cvtepi8_epi16((__m256i)*(const vb_any *)p);
#elif LANES == 8 && defined(__AVX2__)
    return (vs)_mm256_cvtepi8_epi16((__m128i)*(const vb_any *)p);
#else
    return __builtin_convertvector(*(const vb_any *)p, vs);
#endif
}

/* a + sum of two products of pairs of 16 bits */
INLINE vi dot2_int(vi a, vs x, vs y) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)a, (__m512i)x, (__m512i)y);
#elif LANES == 16 && defined(__AVX512BW__)
    return a + (vi)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif LANES == 8 && defined(__AVX2__)
    return a + (vi)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#else
    vi p = (vi)x, q = (vi)y;
    return a + (p << 16 >> 16) * (q << 16 >> 16) + (p >> 16) * (q >> 16);
#endif
}

/* Rows as 16 bits [rows][parts * GROUP], zero beyond the width, and what to multiply sums with. A row
 * with a number that is not finite gets the scale NaN. */
INLINE void round_rows(const void *x, int rows, int width, int parts, int bf16, int16_t *to, float *scales) {
    for (int row = 0; row < rows; row++, to += (size_t)parts * GROUP) {
        size_t at = (size_t)row * width;
        vf most = {0}, odd = {0};
        for (int i = 0; i < width; i += LANES) {
            vf value = read(x, at + i, bf16);
            vf size = pick(value < 0, -value, value);
            most = pick(size > most, size, most);
            odd += value * 0.0f;
        }
        float top = 0, spoilt = total(odd);
        for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
        float inverse = top > 0 && spoilt == 0 ? 32767.0f / top : 0;
        for (int i = 0; i < width; i += LANES) {
            vf value = read(x, at + i, bf16) * inverse;
            vi whole = __builtin_convertvector(value + pick(value < 0, spread(-0.5f), spread(0.5f)), vi);
            *(vh_any *)(to + i) = __builtin_convertvector(whole, vh);
        }
        memset(to + width, 0, ((size_t)parts * GROUP - width) * sizeof *to);
        scales[row] = top / 32767.0f + spoilt;
    }
}

/* sums[r][TILE] of n rows */
INLINE void multiply_tile(const Part *tile, int parts, const int16_t *x, int n, float (*sums)[TILE]) {
    int turns = n <= IN_TURNS ? 2 : 1;
    for (int part = 0; part < parts; part++, tile++) {
        vi sum[2 * TOGETHER * BLOCKS];
        for (int i = 0; i < turns * n * BLOCKS; i++) sum[i] = (vi){0};
        for (int pair = 0; pair < GROUP / 2; pair += turns)
            for (int turn = 0; turn < turns; turn++) {
                vs weights[BLOCKS];
                for (int b = 0; b < BLOCKS; b++)
                    weights[b] = widen_bytes(tile->weight[pair + turn][b * LANES]);
                for (int r = 0; r < n; r++) {
                    vs both = (vs)(((const pairs_any *)(x + (r * parts + part) * GROUP))[pair + turn] - (vi){0});
                    vi *to = sum + (turn * n + r) * BLOCKS;
                    for (int b = 0; b < BLOCKS; b++) to[b] = dot2_int(to[b], weights[b], both);
                }
            }
        for (int r = 0; r < n; r++)
            for (int b = 0; b < BLOCKS; b++) {
                vi whole = sum[r * BLOCKS + b];
                if (turns == 2) whole += sum[(n + r) * BLOCKS + b];
                vf value = __builtin_convertvector(whole, vf) * load(tile->scale + b * LANES);
                store(sums[r] + b * LANES, load(sums[r] + b * LANES) + value);
            }
    }
}

INLINE void finish_tile(const float *sums, float scale, const void *bias, int first, int outputs, int row,
                        void *out, int bf16) {
    for (int i = 0; i < TILE && first + i < outputs; i++) {
        float value = sums[i] * scale + (bias ? number(bias, first + i, bf16) : 0);
        put(out, (size_t)row * outputs + first + i, value, bf16);
    }
}

/* out [rows, outputs] = x [rows, width] times the packed weights, plus a bias when there is one */
INLINE void multiply(const void *x, int rows, int width, const Part *packed, int outputs, const void *bias,
                     void *out, int bf16) {
    int parts = (width + GROUP - 1) / GROUP, tiles = (outputs + TILE - 1) / TILE;
    int passes = (rows + TOGETHER - 1) / TOGETHER, each = (rows + passes - 1) / passes;
    int16_t *rounded = malloc((size_t)rows * parts * GROUP * sizeof *rounded);
    float *scales = malloc(rows * sizeof *scales);
    round_rows(x, rows, width, parts, bf16, rounded, scales);
#pragma omp parallel for schedule(dynamic, (tiles + 63) / 64)
    for (int t = 0; t < tiles; t++)
        for (int first = 0; first < rows; first += each) {
            const int16_t *from = rounded + (size_t)first * parts * GROUP;
            const Part *tile = packed + (size_t)t * parts;
            int n = rows - first < each ? rows - first : each;
            float sums[TOGETHER][TILE] = {0};
            switch (n) { /* constants, so that sums stay in registers */
            case 1: multiply_tile(tile, parts, from, 1, sums); break;
            case 2: multiply_tile(tile, parts, from, 2, sums); break;
            case 3: multiply_tile(tile, parts, from, 3, sums); break;
            default: multiply_tile(tile, parts, from, TOGETHER, sums);
            }
            for (int r = 0; r < n; r++)
                finish_tile(sums[r], scales[first + r], bias, t * TILE, outputs, first + r, out, bf16);
        }
    free(scales);
    free(rounded);
}

void coa_multiply_int8(const void *x, int rows, int width, const void *packed, int outputs, const void *bias,
                       void *out, int bf16) {
    if (bf16)
        multiply(x, rows, width, packed, outputs, bias, out, 1);
    else
        multiply(x, rows, width, packed, outputs, bias, out, 0);
}

/* weight [outputs, width] into tiles; outputs and inputs that fill up the last are 0 */
void coa_pack_int8(const void *weight, int outputs, int width, void *packed, int bf16) {
    int parts = (width + GROUP - 1) / GROUP, tiles = (outputs + TILE - 1) / TILE;
#pragma omp parallel for schedule(dynamic)
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < parts; p++) {
            Part *part = (Part *)packed + (size_t)t * parts + p;
            for (int i = 0; i < TILE; i++) {
                int output = t * TILE + i, count = width - p * GROUP < GROUP ? width - p * GROUP : GROUP;
                size_t at = (size_t)output * width + p * GROUP;
                float most = 0;
                if (output >= outputs) count = 0;
                for (int j = 0; j < count; j++) most = fmaxf(most, fabsf(number(weight, at + j, bf16)));
                float inverse = most > 0 ? 127.0f / most : 0;
                part->scale[i] = most / 127.0f;
                for (int j = 0; j < GROUP; j++) {
                    float value = j < count ? number(weight, at + j, bf16) * inverse : 0;
                    part->weight[j / 2][i][j % 2] = (int8_t)rintf(value);
                }
            }
        }
}
