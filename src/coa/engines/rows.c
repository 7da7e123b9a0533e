/* What is done row by row: norms, the gate of the MLP, and the draw of a token. */

INLINE void add_norm(void *x, const void *delta, const void *weight, void *out, int rows, int width,
                     float eps, int bf16) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int row = 0; row < rows; row++) {
        size_t at = (size_t)row * width;
        vf squares = {0};
        for (int i = 0; i < width; i += LANES) {
            vf value = read(x, at + i, bf16);
            if (delta) {
                write(x, at + i, value + read(delta, at + i, bf16), bf16);
                value = read(x, at + i, bf16);
            }
            squares += value * value;
        }
        float inverse = 1.0f / sqrtf(total(squares) / width + eps);
        for (int i = 0; i < width; i += LANES)
            write(out, at + i, read(x, at + i, bf16) * inverse * read(weight, i, bf16), bf16);
    }
}

/* x += delta (when there is one), out = x / rms(x) * weight; rows of `width` numbers. */
void coa_add_norm(void *x, const void *delta, const void *weight, void *out, int rows, int width, float eps,
                  int bf16) {
    if (bf16)
        add_norm(x, delta, weight, out, rows, width, eps, 1);
    else
        add_norm(x, delta, weight, out, rows, width, eps, 0);
}

INLINE void gate(const void *gate_up, void *out, int rows, int width, int bf16) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int row = 0; row < rows; row++) {
        size_t from = (size_t)row * 2 * width, to = (size_t)row * width;
        for (int i = 0; i < width; i += LANES) {
            vf x = read(gate_up, from + i, bf16);
            vf e = exp_negative(pick(x < 0, x, -x)); /* of minus |x|: it cannot overflow */
            vf share = pick(x < 0, e, spread(1.0f)) / (1.0f + e);
            write(out, to + i, x * share * read(gate_up, from + width + i, bf16), bf16);
        }
    }
}

/* Give up this thread's team. OpenMP counts the teams of all threads together: when there are more
 * members than cores, each waits asleep instead of awake, and every step costs a third more. */
void coa_release_threads(void) {
#ifdef _OPENMP
    omp_pause_resource_all(omp_pause_soft);
#endif
}

/* out = silu(gate) * up, of rows [gate, up] of 2 x width numbers. */
void coa_gate(const void *gate_up, void *out, int rows, int width, int bf16) {
    if (bf16)
        gate(gate_up, out, rows, width, 1);
    else
        gate(gate_up, out, rows, width, 0);
}

#define BLOCK 256
#define FAINT -87.0f /* below it a token has no mass */

/* exp((x - most) * inverse) of up to BLOCK logits, and its sum */
INLINE float masses(const void *logits, size_t at, int count, float most, float inverse, int bf16, float *to) {
    vf sum = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf x = (read(logits, at + i, bf16) - most) * inverse;
        vf mass = pick(x < FAINT, (vf){0}, exp_negative(x));
        sum += mass;
        if (to) store(to + i, mass);
    }
    float rest = 0;
    for (; i < count; i++) { /* a vocabulary that is no multiple of LANES */
        float x = (number(logits, at + i, bf16) - most) * inverse, mass = x < FAINT ? 0 : expf(x);
        rest += mass;
        if (to) to[i] = mass;
    }
    return total(sum) + rest;
}

/* The token at which the cumulative mass passes the point: first its block, then the token. */
INLINE int invert(const void *logits, size_t at, int vocab, float most, float inverse, int bf16,
                  const float *sums, double wanted) {
    float mass[BLOCK];
    int block = 0, last = (vocab - 1) / BLOCK, chosen = 0;
    double before = 0;
    while (block < last && before + sums[block] <= wanted) before += sums[block++];
    int first = block * BLOCK, count = vocab - first < BLOCK ? vocab - first : BLOCK;
    masses(logits, at + first, count, most, inverse, bf16, mass);
    for (int i = 0; i < count; i++) {
        if (mass[i] > 0) chosen = i; /* rounding must not find a token without mass */
        before += mass[i];
        if (before > wanted && mass[i] > 0) break;
    }
    return first + chosen;
}

INLINE void draw(const void *logits, int rows, int vocab, const float *temperatures, const double *points,
                 int64_t *tokens, float *logprobs, int bf16) {
#pragma omp parallel for schedule(dynamic)
    for (int row = 0; row < rows; row++) {
        size_t at = (size_t)row * vocab;
        int i = 0, blocks = (vocab + BLOCK - 1) / BLOCK;
        vf high = spread(-INFINITY);
        for (; i + LANES <= vocab; i += LANES) {
            vf x = read(logits, at + i, bf16);
            high = pick(x > high, x, high);
        }
        float most = high[0], inverse = temperatures[row] > 0 ? 1 / temperatures[row] : 1, sums[blocks];
        for (int l = 1; l < LANES; l++) most = high[l] > most ? high[l] : most;
        for (; i < vocab; i++) most = fmaxf(most, number(logits, at + i, bf16));
        double all = 0;
        for (int b = 0; b < blocks; b++) {
            int first = b * BLOCK, count = vocab - first < BLOCK ? vocab - first : BLOCK;
            all += sums[b] = masses(logits, at + first, count, most, inverse, bf16, NULL);
        }
        int token = 0;
        if (temperatures[row] > 0)
            token = invert(logits, at, vocab, most, inverse, bf16, sums, points[row] * all);
        else
            while (token < vocab - 1 && number(logits, at + token, bf16) < most) token++;
        tokens[row] = token;
        logprobs[row] = (number(logits, at + token, bf16) - most) * inverse - (float)log(all);
    }
}

/* One token of each row of logits [rows, vocab]: the most likely at temperature 0, otherwise the one
 * at the row's point in [0, 1) of the cumulative distribution. */
void coa_draw(const void *logits, int rows, int vocab, const float *temperatures, const double *points,
              int64_t *tokens, float *logprobs, int bf16) {
    if (bf16)
        draw(logits, rows, vocab, temperatures, points, tokens, logprobs, 1);
    else
        draw(logits, rows, vocab, temperatures, points, tokens, logprobs, 0);
}
