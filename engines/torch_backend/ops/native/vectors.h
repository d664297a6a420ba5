// Vectors of eight float32 lanes, and conversions of stored weights to them. The vector types of GCC and clang compile
// to AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

using Floats = float __attribute__((vector_size(32)));
using Integers = int32_t __attribute__((vector_size(32)));

constexpr int64_t LANES = 8;

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline Floats load(const float* source) {
    Floats values;
    std::memcpy(&values, source, sizeof values);
    return values;
}

inline Floats load(const BFloat16* source) {  // the upper half of a float32
#if defined(__AVX2__)
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source));
    return (Floats)_mm256_slli_epi32(words, 16);
#else
    using Halves = uint16_t __attribute__((vector_size(16)));
    using Words = uint32_t __attribute__((vector_size(32)));
    Halves halves;
    std::memcpy(&halves, source, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline Floats load(const Float16* source) {
#if defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#elif defined(__ARM_FP16_FORMAT_IEEE)
    __fp16 halves[LANES];
    std::memcpy(halves, source, sizeof halves);
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = halves[i];
    return values;
#else
#error "this instruction set has no conversion from half precision"
#endif
}

inline void store(float* target, Floats values) { std::memcpy(target, &values, sizeof values); }

inline Floats all(float value) { return value - Floats{}; }  // not +: compilers cannot remove + 0, as -0 + 0 is 0

inline float scalar(float value) { return value; }

inline float scalar(BFloat16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline float scalar(Float16 value) {
    Float16 padded[LANES] = {value};
    return load(padded)[0];
}

inline void store(BFloat16* target, float value) {  // rounds to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_number = value == value;
    target->bits = (uint16_t)(is_number ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
}

inline void store(BFloat16* target, Floats values) {
#if defined(__AVX2__)
    const __m256i bits = (__m256i)values, one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i nearest = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i is_number = _mm256_castps_si256(_mm256_cmp_ps((__m256)values, (__m256)values, _CMP_ORD_Q));
    const __m256i words = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc0), nearest, is_number);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128((__m128i*)target, _mm256_castsi256_si128(packed));
#else
    for (int i = 0; i < LANES; i++) store(target + i, values[i]);
#endif
}

inline void store(Float16* target, float value) {
#if defined(__F16C__)
    target->bits = (uint16_t)_cvtss_sh(value, 0);
#else
    const __fp16 half = (__fp16)value;
    std::memcpy(target, &half, sizeof half);
#endif
}

inline void store(float* target, float value) { *target = value; }

// e to the x, to float32's precision. Source: Cody and Waite's reduction; Taylor's series within half an octave.
inline Floats exp(Floats x) {
    const Floats low = all(-87.0f), high = all(88.0f);
    x = x < low ? low : x > high ? high : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
    const Floats shifted = x * 1.44269504f + magic, octaves = shifted - magic;
    const Floats r = (x - octaves * 0.693359375f) + octaves * 2.12194440e-4f;
    Floats series = r * (1.0f / 5040) + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    return (Floats)((Integers)series + (((Integers)shifted - (Integers)all(magic)) << 23));
}

inline float sum(Floats v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The sums of eight vectors.
inline Floats sum_each(const Floats (&v)[8]) {
#if defined(__AVX2__)
    __m256 halves[2];
    for (int i = 0; i < 2; i++) {
        const __m256 first = _mm256_hadd_ps((__m256)v[4 * i], (__m256)v[4 * i + 1]);
        halves[i] = _mm256_hadd_ps(first, _mm256_hadd_ps((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]));
    }
    return (Floats)_mm256_permute2f128_ps(halves[0], halves[1], 0x20) +
           (Floats)_mm256_permute2f128_ps(halves[0], halves[1], 0x31);
#else
    Floats sums;
    for (int i = 0; i < 8; i++) sums[i] = sum(v[i]);
    return sums;
#endif
}

// The range of units that a thread computes, in whole steps. All threads together compute `count` units.
struct Share {
    int64_t start, stop;
};

inline Share share_of(int64_t count, int64_t step, int thread, int num_threads) {
    const int64_t steps = (count + step - 1) / step;
    const int64_t start = steps * thread / num_threads * step;
    const int64_t stop = steps * (thread + 1) / num_threads * step;
    return {start < count ? start : count, stop < count ? stop : count};
}
