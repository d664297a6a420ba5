// Attention of rows to themselves, without a mask: texts of different lengths, one after another without padding.
//
// Shape letters: T tokens of all rows, n rows, L tokens of a row, H heads, D head width (a multiple of 8).
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "mixer.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

#if defined(__AVX512BF16__)
constexpr int TILE = 6;  // rows whose sums stay in registers beside four blocks of columns
constexpr int64_t MANY_BLOCKS = 4;

// Rows times B blocks of sixteen columns, two numbers of each at a time. Shapes: rows (6, 2 * pairs),
// columns (B, pairs, 16, 2), sums (6, B * 16), `stride` apart.
template <int B>
void multiply_pairs(const BFloat16* const (&rows)[TILE], const BFloat16* columns, int64_t pairs, float* sums,
                    int64_t stride) {
    __m512 local[TILE][B];
#pragma GCC unroll 6
    for (int m = 0; m < TILE; m++)
        for (int b = 0; b < B; b++) local[m][b] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh block[B];
        for (int b = 0; b < B; b++)
            block[b] = (__m512bh)_mm512_loadu_si512(columns + (b * pairs + pair) * 2 * COLUMNS);
#pragma GCC unroll 6
        for (int m = 0; m < TILE; m++) {
            int32_t both;
            std::memcpy(&both, rows[m] + 2 * pair, sizeof both);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(both);
            for (int b = 0; b < B; b++) local[m][b] = _mm512_dpbf16_ps(local[m][b], row, block[b]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < TILE; m++)
        for (int b = 0; b < B; b++) _mm512_storeu_ps(sums + m * stride + b * COLUMNS, local[m][b]);
}

void multiply_pairs(const BFloat16* const (&rows)[TILE], const BFloat16* columns, int64_t pairs, int64_t num_blocks,
                    float* sums) {
    const int64_t stride = num_blocks * COLUMNS;
    for (; num_blocks > 0; num_blocks -= MANY_BLOCKS) {
        switch (std::min(num_blocks, MANY_BLOCKS)) {
            case 1: multiply_pairs<1>(rows, columns, pairs, sums, stride); break;
            case 2: multiply_pairs<2>(rows, columns, pairs, sums, stride); break;
            case 3: multiply_pairs<3>(rows, columns, pairs, sums, stride); break;
            default: multiply_pairs<4>(rows, columns, pairs, sums, stride); break;
        }
        columns += MANY_BLOCKS * pairs * 2 * COLUMNS, sums += MANY_BLOCKS * COLUMNS;
    }
}

// A head of a row, whose weights are rounded to bfloat16 as well, and all sums are float32. Its width is a multiple of
// COLUMNS.
class PairMixer {
  public:
    PairMixer(int64_t width, int64_t num_keys)
        : width_(width), num_keys_(num_keys), num_blocks_((num_keys + COLUMNS - 1) / COLUMNS) {
        static thread_local std::vector<BFloat16> halves;
        static thread_local std::vector<float> floats;
        const int64_t padded_keys = num_blocks_ * COLUMNS;
        halves.resize(std::max<size_t>(halves.size(), (2 * width + TILE) * padded_keys));
        floats.resize(std::max<size_t>(floats.size(), TILE * std::max(padded_keys, width)));
        keys_ = halves.data(), values_ = keys_ + width * padded_keys, weights_ = values_ + width * padded_keys;
        sums_ = floats.data();
    }

    // Keys side by side, and each value beside the next one. Those that there are not are the last one: nobody sees them.
    void lay_out(const BFloat16* keys, const BFloat16* values, int64_t stride) {
        const auto place = [&](int64_t t) { return std::min(t, num_keys_ - 1) * stride; };
        const int64_t pairs = width_ / 2;
        for (int64_t first = 0; first < num_blocks_ * COLUMNS; first += 8) {
            const float* rows[8];  // a pair of numbers is moved as one
            for (int64_t r = 0; r < 8; r++) rows[r] = (const float*)(keys + place(first + r));
            float* target = (float*)keys_ + first / COLUMNS * COLUMNS * pairs + first % COLUMNS;
            for (int64_t d = 0; d < pairs; d += 8) transpose(rows, d, target + d * COLUMNS);
        }
        for (int64_t t = 0; t < num_blocks_ * COLUMNS; t += 2)
            for (int64_t d = 0; d < width_; d += COLUMNS) {
                const __m512i first = widen(values + place(t) + d), second = widen(values + place(t + 1) + d);
                _mm512_storeu_si512(values_ + (d / COLUMNS * num_blocks_ * COLUMNS + t) * COLUMNS,
                                    _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
            }
    }

    // Up to TILE queries, and where their results go.
    void attend(const BFloat16* queries, int64_t count, int64_t stride, BFloat16* out, int64_t out_stride) {
        const BFloat16* rows[TILE];
        for (int64_t m = 0; m < TILE; m++) rows[m] = queries + std::min(m, count - 1) * stride;
        multiply_pairs(rows, keys_, width_ / 2, num_blocks_, sums_);
        float totals[TILE];
        for (int64_t m = 0; m < TILE; m++) {
            totals[m] = m < count ? soften(m) : 1;
            rows[m] = weights_ + std::min(m, count - 1) * num_blocks_ * COLUMNS;
        }
        multiply_pairs(rows, values_, num_blocks_ * COLUMNS / 2, width_ / COLUMNS, sums_);
        for (int64_t m = 0; m < count; m++)
            for (int64_t d = 0; d < width_; d += COLUMNS) {
                const __m512 sums = _mm512_loadu_ps(sums_ + m * width_ + d);
                put(out + m * out_stride + d, _mm512_div_ps(sums, _mm512_set1_ps(totals[m])));
            }
    }

  private:
    static __m512i widen(const BFloat16* source) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source));
    }

    static void put(BFloat16* target, __m512 values) {
        _mm256_storeu_si256((__m256i*)target, (__m256i)_mm512_cvtneps_pbh(values));
    }

    // A query's scores to weights; returns their sum.
    float soften(int64_t m) {
        const int64_t num_scores = num_blocks_ * COLUMNS;
        float* scores = sums_ + m * num_scores;
        std::fill(scores + num_keys_, scores + num_scores, -std::numeric_limits<float>::infinity());
        __m512 most = _mm512_loadu_ps(scores);
        for (int64_t key = COLUMNS; key < num_scores; key += COLUMNS)
            most = _mm512_max_ps(most, _mm512_loadu_ps(scores + key));
        const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        const __m512 scale = _mm512_set1_ps(1.44269504f / std::sqrt((float)width_));  // of powers of two
        __m512 total = _mm512_setzero_ps();
        for (int64_t key = 0; key < num_scores; key += COLUMNS) {
            const __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(scores + key), largest);
            const __m512 weights = power_of_two(_mm512_mul_ps(shifted, scale));
            total = _mm512_add_ps(total, weights);
            put(weights_ + m * num_scores + key, weights);
        }
        return _mm512_reduce_add_ps(total);
    }

    // To 3e-6 of it, and 0 from 2^-126 on. Source: Taylor's series within half an octave.
    static __m512 power_of_two(__m512 x) {
        const __mmask16 is_any = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
        const __m512 octaves = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512 r = _mm512_sub_ps(x, octaves);
        __m512 series = _mm512_set1_ps(1.33335581e-3f);
        for (const float factor : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
            series = _mm512_fmadd_ps(series, r, _mm512_set1_ps(factor));
        return _mm512_maskz_scalef_ps(is_any, series, octaves);
    }

    const int64_t width_, num_keys_, num_blocks_;
    BFloat16 *keys_, *values_, *weights_;  // a thread's room
    float* sums_;
};

void attend_pairs(const RowAttention& rows, int64_t row, int64_t head) {
    const int64_t width = rows.head_dim, out_stride = rows.num_heads * width, stride = 3 * out_stride;
    const int64_t begin = rows.begins[row], length = rows.begins[row + 1] - begin;
    const BFloat16* queries = (const BFloat16*)rows.joined + begin * stride + head * width;
    BFloat16* out = (BFloat16*)rows.out + begin * out_stride + head * width;
    PairMixer mixer(width, length);
    mixer.lay_out(queries + out_stride, queries + 2 * out_stride, stride);
    for (int64_t first = 0; first < length; first += TILE)
        mixer.attend(queries + first * stride, std::min<int64_t>(TILE, length - first), stride,
                     out + first * out_stride, out_stride);
}
#endif

template <class T>
void attend(const RowAttention& rows, int64_t row, int64_t head) {
#if defined(__AVX512BF16__)
    if (std::is_same<T, BFloat16>::value && rows.head_dim % COLUMNS == 0) return attend_pairs(rows, row, head);
#endif
    const int64_t width = rows.head_dim, out_stride = rows.num_heads * width, stride = 3 * out_stride;
    const int64_t begin = rows.begins[row], length = rows.begins[row + 1] - begin;
    const T* queries = (const T*)rows.joined + begin * stride + head * width;
    T* out = (T*)rows.out + begin * out_stride + head * width;
    Mixer mixer(width, length);
    mixer.lay_out(queries + out_stride, queries + 2 * out_stride, [&](int64_t t) { return t * stride; });
    constexpr bool is_stored = std::is_same<T, float>::value;
    static thread_local std::vector<float> room;
    if (!is_stored && (int64_t)room.size() < Mixer::QUERIES * width) room.resize(Mixer::QUERIES * width);
    for (int64_t first = 0; first < length; first += Mixer::QUERIES) {
        const int64_t count = std::min(Mixer::QUERIES, length - first);
        Query asked[Mixer::QUERIES];
        for (int64_t i = 0; i < count; i++) {
            const T* source = queries + (first + i) * stride;
            if constexpr (is_stored) {
                asked[i] = {source, length, out + (first + i) * out_stride};
            } else {  // read before the result is written over it
                float* place = room.data() + i * width;
                for (int64_t d = 0; d < width; d += LANES) store(place + d, load(source + d));
                asked[i] = {place, length, place};
            }
        }
        mixer.attend(asked, count);
        if constexpr (!is_stored)
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = 0; d < width; d += LANES)
                    store(out + (first + i) * out_stride + d, load(asked[i].out + d));
    }
}

}  // namespace

extern "C" void vlm_row_attention(const RowAttention* rows) {
    const int64_t num_items = rows->num_rows * rows->num_heads, num_tokens = rows->begins[rows->num_rows];
    const int64_t work = num_tokens * num_tokens / rows->num_rows * rows->num_heads * rows->head_dim;
#pragma omp parallel num_threads(work < MIN_PARALLEL_PRODUCTS ? 1 : rows->num_threads)
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_items; item++) {
        const int64_t row = item / rows->num_heads, head = item % rows->num_heads;
        if (rows->kind == FLOAT32) attend<float>(*rows, row, head);
        else attend<BFloat16>(*rows, row, head);
    }
}
