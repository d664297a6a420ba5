// Products of six rows and sixteen columns, in assembly for AVX2, because GCC does not keep all sums in registers.
#pragma once

#include "vectors.h"

constexpr int64_t COLUMNS = 16;

// Transposes eight numbers of eight rows, from index `place` on. Shapes: target (8, COLUMNS).
template <class W>
inline void transpose(const W* const (&sources)[8], int64_t place, float* target) {
    Floats rows[8];
    for (int r = 0; r < 8; r++) rows[r] = load(sources[r] + place);
#if defined(__AVX2__)
    __m256 pairs[8], fours[8];
    for (int r = 0; r < 8; r += 2) {
        pairs[r] = _mm256_unpacklo_ps((__m256)rows[r], (__m256)rows[r + 1]);
        pairs[r + 1] = _mm256_unpackhi_ps((__m256)rows[r], (__m256)rows[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
        for (int i = 0; i < 2; i++) {
            fours[r + 2 * i] = _mm256_shuffle_ps(pairs[r + i], pairs[r + 2 + i], 0x44);
            fours[r + 2 * i + 1] = _mm256_shuffle_ps(pairs[r + i], pairs[r + 2 + i], 0xee);
        }
    for (int k = 0; k < 4; k++) {
        store(target + k * COLUMNS, (Floats)_mm256_permute2f128_ps(fours[k], fours[k + 4], 0x20));
        store(target + (k + 4) * COLUMNS, (Floats)_mm256_permute2f128_ps(fours[k], fours[k + 4], 0x31));
    }
#else
    for (int r = 0; r < 8; r++)
        for (int k = 0; k < 8; k++) target[k * COLUMNS + r] = rows[r][k];
#endif
}

// The same for rows `stride` numbers apart.
template <class W>
inline void transpose(const W* source, int64_t stride, float* target) {
    const W* rows[8];
    for (int r = 0; r < 8; r++) rows[r] = source + r * stride;
    transpose(rows, 0, target);
}

// Adds to sums (M, 16) the product of rows (M, count), `stride` numbers apart, and columns (count, 16).
template <int M>
inline void multiply_rows(const float* rows, int64_t stride, const float* columns, int64_t count, float* sums) {
    Floats local[M][2];
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) local[m][half] = load(sums + m * COLUMNS + 8 * half);
    for (int64_t k = 0; k < count; k++) {
        const Floats first = load(columns + k * COLUMNS), second = load(columns + k * COLUMNS + 8);
        for (int m = 0; m < M; m++) {
            local[m][0] += first * rows[m * stride + k];
            local[m][1] += second * rows[m * stride + k];
        }
    }
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) store(sums + m * COLUMNS + 8 * half, local[m][half]);
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__x86_64__)
#define VLM_HAS_TILES

// Multiplies a number of a row by both halves of the columns (ymm12, ymm13), and adds to the row's sums.
#define VLM_ROW(PLACE, FIRST, SECOND)                        \
    "vbroadcastss " PLACE ", %%ymm14\n\t"                    \
    "vfmadd231ps %%ymm14, %%ymm12, %%" FIRST "\n\t"          \
    "vfmadd231ps %%ymm14, %%ymm13, %%" SECOND "\n\t"

// Multiplies the numbers of six rows at X by the columns at W.
#define VLM_ROWS(W, X)                                       \
    "vmovups " W "(%[w]), %%ymm12\n\t"                       \
    "vmovups " W "+32(%[w]), %%ymm13\n\t"                    \
    VLM_ROW(X "(%[a])", "ymm0", "ymm1")                      \
    VLM_ROW(X "(%[a],%[stride])", "ymm2", "ymm3")            \
    VLM_ROW(X "(%[a],%[stride],2)", "ymm4", "ymm5")          \
    VLM_ROW(X "(%[b])", "ymm6", "ymm7")                      \
    VLM_ROW(X "(%[b],%[stride])", "ymm8", "ymm9")            \
    VLM_ROW(X "(%[b],%[stride],2)", "ymm10", "ymm11")

#define VLM_EACH_SUM(DO)                                                       \
    DO("0", "ymm0") DO("32", "ymm1") DO("64", "ymm2") DO("96", "ymm3")         \
    DO("128", "ymm4") DO("160", "ymm5") DO("192", "ymm6") DO("224", "ymm7")    \
    DO("256", "ymm8") DO("288", "ymm9") DO("320", "ymm10") DO("352", "ymm11")
#define VLM_LOAD(OFFSET, SUM) "vmovups " OFFSET "(%[sums]), %%" SUM "\n\t"
#define VLM_STORE(OFFSET, SUM) "vmovups %%" SUM ", " OFFSET "(%[sums])\n\t"

// Adds to sums (6, 16) the product of rows (6, 2 * pairs), `stride` numbers apart, and columns (2 * pairs, 16).
inline void multiply_tile(const float* rows, int64_t stride, const float* columns, int64_t pairs, float* sums) {
    const float* lower = rows + 3 * stride;
    asm volatile(VLM_EACH_SUM(VLM_LOAD)
                 "1:\n\t"
                 VLM_ROWS("0", "0") VLM_ROWS("64", "4")
                 "addq $128, %[w]\n\taddq $8, %[a]\n\taddq $8, %[b]\n\tdecq %[count]\n\tjnz 1b\n\t"
                 VLM_EACH_SUM(VLM_STORE)
                 : [w] "+r"(columns), [a] "+r"(rows), [b] "+r"(lower), [count] "+r"(pairs)
                 : [stride] "r"(stride * (int64_t)sizeof(float)), [sums] "r"(sums)
                 : "memory", "cc", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9",
                   "ymm10", "ymm11", "ymm12", "ymm13", "ymm14");
}
#endif

// `multiply_rows` for six rows.
inline void multiply_six(const float* rows, int64_t stride, const float* columns, int64_t count, float* sums) {
#if defined(VLM_HAS_TILES)
    if (count % 2 == 0) return multiply_tile(rows, stride, columns, count / 2, sums);
#endif
    multiply_rows<6>(rows, stride, columns, count, sums);
}
