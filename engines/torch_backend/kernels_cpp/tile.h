// Six rows of numbers times sixteen columns with all sums in registers: AVX2 has just enough, and GCC does not find them.
#pragma once

#include "vectors.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__x86_64__)
#define VLM_HAS_TILES

// A number of a row, times both halves of the columns (ymm12, ymm13), added to the row's sums.
#define VLM_ROW(PLACE, FIRST, SECOND)                        \
    "vbroadcastss " PLACE ", %%ymm14\n\t"                    \
    "vfmadd231ps %%ymm14, %%ymm12, %%" FIRST "\n\t"          \
    "vfmadd231ps %%ymm14, %%ymm13, %%" SECOND "\n\t"

// The numbers of six rows at X, times the line of columns at W.
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
