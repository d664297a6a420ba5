// Attention with 512-bit vectors, and the selection between WideMixer and Mixer.
#pragma once

#include <type_traits>

#include "mixer.h"

#if defined(__AVX512F__)
#include <immintrin.h>

constexpr int WIDE_ROWS = 6;  // rows whose sums for four blocks of columns fit the registers
constexpr int64_t MANY_BLOCKS = 4;

// Numbers in a 32-bit lane: one float32, or two bfloat16, whose products are summed in float32.
template <class T>
constexpr int64_t PER_LANE = sizeof(float) / sizeof(T);

inline __m512 add_products(const float*, __m512 sums, __m512i a, __m512i b) {
    return _mm512_fmadd_ps((__m512)a, (__m512)b, sums);
}

inline void put(float* target, __m512 values) { _mm512_storeu_ps(target, values); }

// A lane for each column, with one float32 value or two bfloat16 values.
inline __m512i join(const float* first, const float*) { return (__m512i)_mm512_loadu_ps(first); }

#if defined(__AVX512BF16__)
inline __m512 add_products(const BFloat16*, __m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

inline void put(BFloat16* target, __m512 values) {
    _mm256_storeu_si256((__m256i*)target, (__m256i)_mm512_cvtneps_pbh(values));
}

inline __m512i join(const BFloat16* first, const BFloat16* second) {
    const __m512i lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
    const __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
    return _mm512_or_si512(lower, _mm512_slli_epi32(upper, 16));
}
#endif

// Multiplies rows by B blocks of sixteen columns, a lane of each at a time. Shapes in lanes: rows (6, K), columns
// (B, K, 16) with blocks `block_stride` lanes apart, sums (6, B * 16) with rows `stride` apart.
template <class T, int B>
void multiply_wide(const T* const (&rows)[WIDE_ROWS], const T* columns, int64_t lanes, int64_t block_stride, float* sums, int64_t stride) {
    __m512 local[WIDE_ROWS][B];
#pragma GCC unroll 6
    for (int m = 0; m < WIDE_ROWS; m++)
        for (int b = 0; b < B; b++) local[m][b] = _mm512_setzero_ps();
    for (int64_t k = 0; k < lanes; k++) {
        __m512i block[B];
        for (int b = 0; b < B; b++)
            block[b] = _mm512_loadu_si512(columns + (b * block_stride + k) * PER_LANE<T> * COLUMNS);
#pragma GCC unroll 6
        for (int m = 0; m < WIDE_ROWS; m++) {
            int32_t lane;
            std::memcpy(&lane, rows[m] + PER_LANE<T> * k, sizeof lane);
            const __m512i row = _mm512_set1_epi32(lane);
            for (int b = 0; b < B; b++) local[m][b] = add_products(columns, local[m][b], row, block[b]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < WIDE_ROWS; m++)
        for (int b = 0; b < B; b++) _mm512_storeu_ps(sums + m * stride + b * COLUMNS, local[m][b]);
}

template <class T>
void multiply_wide(const T* const (&rows)[WIDE_ROWS], const T* columns, int64_t lanes, int64_t block_stride, int64_t num_blocks, float* sums) {
    const int64_t stride = num_blocks * COLUMNS;
    for (; num_blocks > 0; num_blocks -= MANY_BLOCKS) {
        switch (std::min(num_blocks, MANY_BLOCKS)) {
            case 1: multiply_wide<T, 1>(rows, columns, lanes, block_stride, sums, stride); break;
            case 2: multiply_wide<T, 2>(rows, columns, lanes, block_stride, sums, stride); break;
            case 3: multiply_wide<T, 3>(rows, columns, lanes, block_stride, sums, stride); break;
            default: multiply_wide<T, 4>(rows, columns, lanes, block_stride, sums, stride); break;
        }
        columns += MANY_BLOCKS * block_stride * PER_LANE<T> * COLUMNS, sums += MANY_BLOCKS * COLUMNS;
    }
}

// A Mixer that rounds queries and weights to the type of keys and values, and sums in float32. The width is a multiple
// of COLUMNS.
template <class T>
class WideMixer {
  public:
    static constexpr int64_t QUERIES = WIDE_ROWS;

    WideMixer(int64_t width, int64_t num_keys, float scale)
        : width_(width), num_keys_(num_keys), padded_keys_((num_keys + COLUMNS - 1) / COLUMNS * COLUMNS), scale_(scale) {
        static thread_local std::vector<T> numbers;
        static thread_local std::vector<float> sums;
        numbers.resize(std::max<size_t>(numbers.size(), (2 * width + WIDE_ROWS) * padded_keys_ + WIDE_ROWS * width));
        sums.resize(std::max<size_t>(sums.size(), WIDE_ROWS * std::max(padded_keys_, width)));
        keys_ = numbers.data(), values_ = keys_ + width * padded_keys_, weights_ = values_ + width * padded_keys_;
        queries_ = weights_ + WIDE_ROWS * padded_keys_, sums_ = sums.data();
    }

    // Packs keys as columns, and values as rows, or pairs of rows for bfloat16. The last key pads incomplete blocks.
    template <class Place>
    void lay_out(const T* keys, const T* values, Place place_of) {
        const auto place = [&](int64_t t) { return place_of(std::min(t, num_keys_ - 1)); };
        const int64_t lanes = width_ / PER_LANE<T>;
        for (int64_t first = 0; first < padded_keys_; first += 8) {
            const float* rows[8];  // lanes of both types are moved as float32
            for (int64_t r = 0; r < 8; r++) rows[r] = (const float*)(keys + place(first + r));
            float* target = (float*)keys_ + first / COLUMNS * COLUMNS * lanes + first % COLUMNS;
            for (int64_t d = 0; d < lanes; d += 8) transpose(rows, d, target + d * COLUMNS);
        }
        for (int64_t t = 0; t < padded_keys_; t += PER_LANE<T>)
            for (int64_t d = 0; d < width_; d += COLUMNS) {
                const __m512i lanes = join(values + place(t) + d, values + place(t + PER_LANE<T> - 1) + d);
                _mm512_storeu_si512(values_ + (d / COLUMNS * padded_keys_ + t) * COLUMNS, lanes);
            }
    }

    // Computes up to QUERIES queries.
    template <class S>
    void attend(const Query<S>* queries, int64_t count) {
        const T* rows[WIDE_ROWS];
        int64_t most = 0;
        for (int64_t m = 0; m < WIDE_ROWS; m++) {
            const Query<S>& query = queries[std::min(m, count - 1)];
            most = std::max(most, query.num_keys);
            if constexpr (std::is_same<S, T>::value) rows[m] = query.source;
            else {
                rows[m] = queries_ + m * width_;
                for (int64_t d = 0; d < width_; d += COLUMNS) put(queries_ + m * width_ + d, _mm512_loadu_ps(query.source + d));
            }
        }
        const int64_t num_scores = (most + COLUMNS - 1) / COLUMNS * COLUMNS, lanes = width_ / PER_LANE<T>;
        multiply_wide(rows, keys_, lanes, lanes, num_scores / COLUMNS, sums_);
        float totals[WIDE_ROWS];
        for (int64_t m = 0; m < WIDE_ROWS; m++) {
            totals[m] = m < count ? soften(m, queries[m].first, queries[m].num_keys, num_scores) : 1;
            rows[m] = weights_ + std::min(m, count - 1) * num_scores;
        }
        multiply_wide(rows, values_, num_scores / PER_LANE<T>, padded_keys_ / PER_LANE<T>, width_ / COLUMNS, sums_);
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < width_; d += COLUMNS) {
                const __m512 sums = _mm512_loadu_ps(sums_ + m * width_ + d);
                put(queries[m].out + d, _mm512_div_ps(sums, _mm512_set1_ps(totals[m])));
            }
    }

  private:
    // Converts a query's scores to weights; returns their sum.
    float soften(int64_t m, int64_t first, int64_t num_seen, int64_t num_scores) {
        float* scores = sums_ + m * num_scores;
        std::fill(scores, scores + first, -std::numeric_limits<float>::infinity());
        std::fill(scores + num_seen, scores + num_scores, -std::numeric_limits<float>::infinity());
        __m512 most = _mm512_loadu_ps(scores);
        for (int64_t key = COLUMNS; key < num_scores; key += COLUMNS)
            most = _mm512_max_ps(most, _mm512_loadu_ps(scores + key));
        const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        const __m512 scale = _mm512_set1_ps(1.44269504f * scale_);  // log2(e), for powers of two instead of exp
        __m512 total = _mm512_setzero_ps();
        for (int64_t key = 0; key < num_scores; key += COLUMNS) {
            const __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(scores + key), largest);
            const __m512 weights = power_of_two(_mm512_mul_ps(shifted, scale));
            total = _mm512_add_ps(total, weights);
            put(weights_ + m * num_scores + key, weights);
        }
        return _mm512_reduce_add_ps(total);
    }

    // 2^x with a relative error of 2e-7, or 3e-6 for bfloat16; 0 below 2^-126. Source: Taylor series.
    static __m512 power_of_two(__m512 x) {
        const __mmask16 is_any = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
        const __m512 octaves = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512 r = _mm512_sub_ps(x, octaves);
        __m512 series = _mm512_set1_ps(std::is_same<T, float>::value ? 1.54035304e-4f : 0.0f);
        for (const float factor :
             {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
            series = _mm512_fmadd_ps(series, r, _mm512_set1_ps(factor));
        return _mm512_maskz_scalef_ps(is_any, series, octaves);
    }

    const int64_t width_, num_keys_, padded_keys_;
    const float scale_;
    T *keys_, *values_, *weights_, *queries_;  // scratch memory of the thread
    float* sums_;
};

#if defined(__AVX512BF16__)
template <class T>
constexpr bool IS_WIDE = !std::is_same<T, Float16>::value;
#else
template <class T>
constexpr bool IS_WIDE = std::is_same<T, float>::value;
#endif
#endif

// Calls `compute` with a mixer for keys and values of this type.
template <class T, class Compute>
void with_mixer(int64_t width, int64_t num_keys, float scale, Compute compute) {
#if defined(__AVX512F__)
    if constexpr (IS_WIDE<T>)
        if (width % COLUMNS == 0) {
            WideMixer<T> mixer(width, num_keys, scale);
            return compute(mixer);
        }
#endif
    Mixer mixer(width, num_keys, scale);
    compute(mixer);
}
