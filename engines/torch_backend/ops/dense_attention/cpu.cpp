// Attention without a mask over packed sequences of different lengths.
//
// Shape letters: N queries, T keys and values, H heads, D head width (a multiple of 8).
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "mixer.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

#if defined(__AVX512F__)
constexpr int TILE = 6;  // rows whose sums for four blocks of columns fit the registers
constexpr int64_t MANY_BLOCKS = 4;

// Numbers in a 32-bit lane: one float32, or two bfloat16, whose products are summed in float32.
template <class T>
constexpr int64_t PER_LANE = sizeof(float) / sizeof(T);

inline __m512 add_products(const float*, __m512 sums, __m512i a, __m512i b) {
    return _mm512_fmadd_ps((__m512)a, (__m512)b, sums);
}

inline void put(float* target, __m512 values) { _mm512_storeu_ps(target, values); }

// The value of each column, or two values in one lane for bfloat16.
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
// (B, K, 16), sums (6, B * 16), `stride` apart.
template <class T, int B>
void multiply_wide(const T* const (&rows)[TILE], const T* columns, int64_t lanes, float* sums, int64_t stride) {
    __m512 local[TILE][B];
#pragma GCC unroll 6
    for (int m = 0; m < TILE; m++)
        for (int b = 0; b < B; b++) local[m][b] = _mm512_setzero_ps();
    for (int64_t k = 0; k < lanes; k++) {
        __m512i block[B];
        for (int b = 0; b < B; b++)
            block[b] = _mm512_loadu_si512(columns + (b * lanes + k) * PER_LANE<T> * COLUMNS);
#pragma GCC unroll 6
        for (int m = 0; m < TILE; m++) {
            int32_t lane;
            std::memcpy(&lane, rows[m] + PER_LANE<T> * k, sizeof lane);
            const __m512i row = _mm512_set1_epi32(lane);
            for (int b = 0; b < B; b++) local[m][b] = add_products(columns, local[m][b], row, block[b]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < TILE; m++)
        for (int b = 0; b < B; b++) _mm512_storeu_ps(sums + m * stride + b * COLUMNS, local[m][b]);
}

template <class T>
void multiply_wide(const T* const (&rows)[TILE], const T* columns, int64_t lanes, int64_t num_blocks, float* sums) {
    const int64_t stride = num_blocks * COLUMNS;
    for (; num_blocks > 0; num_blocks -= MANY_BLOCKS) {
        switch (std::min(num_blocks, MANY_BLOCKS)) {
            case 1: multiply_wide<T, 1>(rows, columns, lanes, sums, stride); break;
            case 2: multiply_wide<T, 2>(rows, columns, lanes, sums, stride); break;
            case 3: multiply_wide<T, 3>(rows, columns, lanes, sums, stride); break;
            default: multiply_wide<T, 4>(rows, columns, lanes, sums, stride); break;
        }
        columns += MANY_BLOCKS * lanes * PER_LANE<T> * COLUMNS, sums += MANY_BLOCKS * COLUMNS;
    }
}

// Attention of one head, with weights rounded to the type of the values and float32 sums. The width is a multiple of
// COLUMNS.
template <class T>
class WideMixer {
  public:
    WideMixer(int64_t width, int64_t num_keys)
        : width_(width), num_keys_(num_keys), num_blocks_((num_keys + COLUMNS - 1) / COLUMNS) {
        static thread_local std::vector<T> numbers;
        static thread_local std::vector<float> sums;
        const int64_t padded_keys = num_blocks_ * COLUMNS;
        numbers.resize(std::max<size_t>(numbers.size(), (2 * width + TILE) * padded_keys));
        sums.resize(std::max<size_t>(sums.size(), TILE * std::max(padded_keys, width)));
        keys_ = numbers.data(), values_ = keys_ + width * padded_keys, weights_ = values_ + width * padded_keys;
        sums_ = sums.data();
    }

    // Packs keys as columns, and values as rows, or pairs of rows for bfloat16. The last key pads incomplete blocks.
    void lay_out(const T* keys, const T* values, int64_t stride) {
        const auto place = [&](int64_t t) { return std::min(t, num_keys_ - 1) * stride; };
        const int64_t lanes = width_ / PER_LANE<T>;
        for (int64_t first = 0; first < num_blocks_ * COLUMNS; first += 8) {
            const float* rows[8];  // lanes are moved as float32, whatever their type
            for (int64_t r = 0; r < 8; r++) rows[r] = (const float*)(keys + place(first + r));
            float* target = (float*)keys_ + first / COLUMNS * COLUMNS * lanes + first % COLUMNS;
            for (int64_t d = 0; d < lanes; d += 8) transpose(rows, d, target + d * COLUMNS);
        }
        for (int64_t t = 0; t < num_blocks_ * COLUMNS; t += PER_LANE<T>)
            for (int64_t d = 0; d < width_; d += COLUMNS) {
                const __m512i lanes = join(values + place(t) + d, values + place(t + PER_LANE<T> - 1) + d);
                _mm512_storeu_si512(values_ + (d / COLUMNS * num_blocks_ * COLUMNS + t) * COLUMNS, lanes);
            }
    }

    // Computes up to TILE queries.
    void attend(const T* queries, int64_t count, int64_t stride, T* out, int64_t out_stride) {
        const int64_t num_scores = num_blocks_ * COLUMNS;
        const T* rows[TILE];
        for (int64_t m = 0; m < TILE; m++) rows[m] = queries + std::min(m, count - 1) * stride;
        multiply_wide(rows, keys_, width_ / PER_LANE<T>, num_blocks_, sums_);
        float totals[TILE];
        for (int64_t m = 0; m < TILE; m++) {
            totals[m] = m < count ? soften(m) : 1;
            rows[m] = weights_ + std::min(m, count - 1) * num_scores;
        }
        multiply_wide(rows, values_, num_scores / PER_LANE<T>, width_ / COLUMNS, sums_);
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < width_; d += COLUMNS) {
                const __m512 sums = _mm512_loadu_ps(sums_ + m * width_ + d);
                put(out + m * out_stride + d, _mm512_div_ps(sums, _mm512_set1_ps(totals[m])));
            }
    }

  private:
    // Converts a query's scores to weights; returns their sum.
    float soften(int64_t m) {
        const int64_t num_scores = num_blocks_ * COLUMNS;
        float* scores = sums_ + m * num_scores;
        std::fill(scores + num_keys_, scores + num_scores, -std::numeric_limits<float>::infinity());
        __m512 most = _mm512_loadu_ps(scores);
        for (int64_t key = COLUMNS; key < num_scores; key += COLUMNS)
            most = _mm512_max_ps(most, _mm512_loadu_ps(scores + key));
        const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        const __m512 scale = _mm512_set1_ps(1.44269504f / std::sqrt((float)width_));  // for powers of two
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

    const int64_t width_, num_keys_, num_blocks_;
    T *keys_, *values_, *weights_;  // scratch memory of the thread
    float* sums_;
};

#endif

// Whether the processor has WideMixer's instructions for this type.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool IS_WIDE = true;
#elif defined(__AVX512F__)
template <class T>
constexpr bool IS_WIDE = std::is_same<T, float>::value;
#endif

template <class T>
void attend(const DenseAttention& step, int64_t sequence, int64_t head) {
    const int64_t width = step.head_dim, stride = step.query_stride, out_stride = step.num_heads * width;
    const int64_t begin = step.query_offsets[sequence], count = step.query_offsets[sequence + 1] - begin;
    const int64_t key_begin = step.key_offsets[sequence], num_keys = step.key_offsets[sequence + 1] - key_begin;
    const T* queries = (const T*)step.queries + begin * stride + head * width;
    const T* keys = (const T*)step.keys + key_begin * step.key_stride + head * width;
    const T* values = (const T*)step.values + key_begin * step.key_stride + head * width;
    T* out = (T*)step.out + begin * out_stride + head * width;
#if defined(__AVX512F__)
    if constexpr (IS_WIDE<T>)
        if (width % COLUMNS == 0) {
            WideMixer<T> mixer(width, num_keys);
            mixer.lay_out(keys, values, step.key_stride);
            for (int64_t first = 0; first < count; first += TILE)
                mixer.attend(queries + first * stride, std::min<int64_t>(TILE, count - first), stride,
                             out + first * out_stride, out_stride);
            return;
        }
#endif
    Mixer mixer(width, num_keys, 1.0f / std::sqrt((float)width));
    mixer.lay_out(keys, values, [&](int64_t t) { return t * step.key_stride; });
    constexpr bool is_stored = std::is_same<T, float>::value;
    static thread_local std::vector<float> room;
    if (!is_stored && (int64_t)room.size() < Mixer::QUERIES * width) room.resize(Mixer::QUERIES * width);
    for (int64_t first = 0; first < count; first += Mixer::QUERIES) {
        const int64_t num_asked = std::min(Mixer::QUERIES, count - first);
        Query asked[Mixer::QUERIES];
        for (int64_t i = 0; i < num_asked; i++) {
            const T* source = queries + (first + i) * stride;
            if constexpr (is_stored) {
                asked[i] = {source, num_keys, out + (first + i) * out_stride};
            } else {  // the query is read before the result overwrites it
                float* place = room.data() + i * width;
                for (int64_t d = 0; d < width; d += LANES) store(place + d, load(source + d));
                asked[i] = {place, num_keys, place};
            }
        }
        mixer.attend(asked, num_asked);
        if constexpr (!is_stored)
            for (int64_t i = 0; i < num_asked; i++)
                for (int64_t d = 0; d < width; d += LANES)
                    store(out + (first + i) * out_stride + d, load(asked[i].out + d));
    }
}

}  // namespace

extern "C" void vlm_dense_attention(const DenseAttention* step) {
    const int64_t num_items = step->num_sequences * step->num_heads;
    const int64_t num_queries = step->query_offsets[step->num_sequences], num_keys = step->key_offsets[step->num_sequences];
    const int64_t work = num_queries * num_keys / step->num_sequences * step->num_heads * step->head_dim;
#pragma omp parallel num_threads(work < MIN_PARALLEL_PRODUCTS ? 1 : step->num_threads)
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_items; item++) {
        const int64_t sequence = item / step->num_heads, head = item % step->num_heads;
        if (step->kind == FLOAT32) attend<float>(*step, sequence, head);
        else attend<BFloat16>(*step, sequence, head);
    }
}
