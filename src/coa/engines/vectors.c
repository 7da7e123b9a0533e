/* Vectors of LANES floats, in the extensions of GCC and Clang: 16 where the processor has AVX512, as
 * many as AVX2 holds elsewhere. What is wider than a register goes through memory, which took attention
 * 2.6 times as long. kernels.py compiles this file, attention.c, rows.c and int8.c as one, at
 * first use, and gives LANES, PAGE, PADDING, TILE and GROUP.
 *
 * Arithmetic is float32, and sums of products of bfloat16 are float32.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef vf vf_any __attribute__((aligned(4), may_alias)); /* numbers are also read as pairs */
typedef vu vu_any __attribute__((aligned(4), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf spread(float x) { return x - (vf){0}; }
INLINE vf pick(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }
INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf widen(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vh_any *)p, vu) << 16);
}
INLINE vu round_bits(vf x) { /* to bfloat16, to nearest even, in the low half */
    vu u = (vu)x;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
INLINE void narrow(uint16_t *p, vf x) {
    *(vh_any *)p = __builtin_convertvector(round_bits(x), vh);
}
INLINE vf read(const void *from, size_t at, int bf16) {
    return bf16 ? widen((const uint16_t *)from + at) : load((const float *)from + at);
}
INLINE float number(const void *from, size_t at, int bf16) {
    if (!bf16) return ((const float *)from)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)from)[at] << 16};
    return wide.value;
}
INLINE void write(void *to, size_t at, vf x, int bf16) {
    if (bf16)
        narrow((uint16_t *)to + at, x);
    else
        store((float *)to + at, x);
}

INLINE void put(void *to, size_t at, float x, int bf16) { /* one number */
    union { float value; uint32_t bits; } wide = {x};
    if (bf16)
        ((uint16_t *)to)[at] = (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
    else
        ((float *)to)[at] = x;
}

INLINE float total(vf x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* exp of x <= 0 to about 1e-7 relative; below -87 it is 0 or nearly so. */
INLINE vf exp_negative(vf x) {
    const vf magic = spread(12582912.0f);
    vf low = spread(-87.0f);
    x = pick(x < low, low, x);
    vf shifted = x * 1.44269504f + magic, n = shifted - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = ((vi)shifted - 0x4b400000 + 127) << 23;
    return p * (vf)power;
}

/* a + sum of two products of bfloat16 pairs */
INLINE vf dot2(vf a, vu x, vu y) {
#if LANES == 16 && defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)a, (__m512bh)x, (__m512bh)y);
#else
    a += (vf)(x << 16) * (vf)(y << 16);
    return a + (vf)(x & 0xffff0000u) * (vf)(y & 0xffff0000u);
#endif
}
