// Products of 8- or 16-bit activations with int8 or int4 weights, summed in integers within a group of inputs.
//
// Weights are stored in tiles of 16 outputs, group after group, in the order of `packing.py`:
//
//   int4 block:  scale[16] zero[16]   then for every 8 inputs 64 bytes
//   int8 block:                            for every 4 inputs 64 bytes
//
// 64 bytes have 4 inputs of output 0, 4 of output 1, ...; for int4, four inputs in the low nibbles and the next four in
// the high ones. So 32-bit lanes are outputs, sums need no shuffling, and memory is read as one stream. Sums of a
// group are exact, and groups are added in order: a token's result does not depend on other tokens.
#include <algorithm>

#include "linear.h"
#include "vectors.h"

namespace {

constexpr int MAX_TOKENS = 4;  // their sums fit 16 registers
#if defined(__AVX512VL__)
constexpr int MANY_TOKENS = 8;  // their sums fit 32 registers
#else
constexpr int MANY_TOKENS = MAX_TOKENS;
#endif

struct Sums {
    Integers lanes[2];  // outputs 0-7 and 8-15
};

// Eight 32-bit lanes of four bytes each, times four activations that all lanes share.
#if defined(__AVX2__)
inline __m256i broadcast(const void* four_bytes) {
    int32_t word;
    std::memcpy(&word, four_bytes, sizeof word);
    return _mm256_set1_epi32(word);
}
inline __m256i load_bytes(const uint8_t* source) { return _mm256_loadu_si256((const __m256i*)source); }
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define VLM_DOT_BYTES(sums, unsigned_bytes, signed_bytes) _mm256_dpbusd_epi32(sums, unsigned_bytes, signed_bytes)
#elif defined(__AVXVNNI__)
#define VLM_DOT_BYTES(sums, unsigned_bytes, signed_bytes) _mm256_dpbusd_avx_epi32(sums, unsigned_bytes, signed_bytes)
#endif
#endif

// int4 weights and 8-bit activations of one group.
template <int M>
inline void add_int4_bytes(const uint8_t* w, int64_t group, const int8_t* const (&x)[M], Sums (&sums)[M]) {
#if defined(VLM_DOT_BYTES)
    const __m256i low = _mm256_set1_epi8(15);
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int half = 0; half < 2; half++) {
            const __m256i both = load_bytes(w + 32 * half);
            const __m256i first = _mm256_and_si256(both, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            for (int m = 0; m < M; m++) {
                __m256i total = (__m256i)sums[m].lanes[half];
                total = VLM_DOT_BYTES(total, first, broadcast(x[m] + k));
                sums[m].lanes[half] = (Integers)VLM_DOT_BYTES(total, second, broadcast(x[m] + k + 4));
            }
        }
#elif defined(__AVX2__)
    // pairs are summed in 16 bits: 8 products of at most 2 * 15 * 127 stay below 2^15
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    for (int64_t start = 0; start < group; start += 32) {
        __m256i pairs[M][2];
        for (int m = 0; m < M; m++) pairs[m][0] = pairs[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int64_t k = start; k < start + 32; k += 8, w += 64) {
            const __m256i a = load_bytes(w), b = load_bytes(w + 32);
            const __m256i first_a = _mm256_and_si256(a, low), first_b = _mm256_and_si256(b, low);
            for (int m = 0; m < M; m++) {
                const __m256i first = broadcast(x[m] + k);
                pairs[m][0] = _mm256_add_epi16(pairs[m][0], _mm256_maddubs_epi16(first_a, first));
                pairs[m][1] = _mm256_add_epi16(pairs[m][1], _mm256_maddubs_epi16(first_b, first));
            }
            const __m256i second_a = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
            const __m256i second_b = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
            for (int m = 0; m < M; m++) {
                const __m256i second = broadcast(x[m] + k + 4);
                pairs[m][0] = _mm256_add_epi16(pairs[m][0], _mm256_maddubs_epi16(second_a, second));
                pairs[m][1] = _mm256_add_epi16(pairs[m][1], _mm256_maddubs_epi16(second_b, second));
            }
        }
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++)
                sums[m].lanes[half] += (Integers)_mm256_madd_epi16(pairs[m][half], one);
    }
#else
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++) {
                    const uint8_t both = w[4 * lane + i];
                    sums[m].lanes[lane / 8][lane % 8] += (both & 15) * x[m][k + i] + (both >> 4) * x[m][k + 4 + i];
                }
#endif
}

// int4 weights and 16-bit activations; the middle two of every four activations are exchanged.
template <int M>
inline void add_int4_words(const uint8_t* w, int64_t group, const int16_t* const (&x)[M], Sums (&sums)[M]) {
#if defined(__AVX2__)
    const __m256i low = _mm256_set1_epi16(15);
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int half = 0; half < 2; half++) {
            const __m256i both = load_bytes(w + 32 * half);
            const __m256i words[4] = {_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 8), low),
                                      _mm256_and_si256(_mm256_srli_epi16(both, 4), low), _mm256_srli_epi16(both, 12)};
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 4; i++)
                    sums[m].lanes[half] += (Integers)_mm256_madd_epi16(words[i], broadcast(x[m] + k + 2 * i));
        }
#else
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++) {
                    const uint8_t both = w[4 * lane + (i == 1 ? 2 : i == 2 ? 1 : i)];
                    sums[m].lanes[lane / 8][lane % 8] += (both & 15) * x[m][k + i] + (both >> 4) * x[m][k + 4 + i];
                }
#endif
}

// int8 weights and 8-bit activations; `totals` are the sums of the activations.
template <int M>
inline void add_int8_bytes(const uint8_t* w, int64_t group, const int8_t* const (&x)[M],
                           [[maybe_unused]] const float (&totals)[M], Sums (&sums)[M]) {
#if defined(VLM_DOT_BYTES)
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    for (int m = 0; m < M; m++) {  // 128 is added to weights to make them unsigned, so subtract its products
        const int32_t total = (int32_t)totals[m];
        sums[m].lanes[0] -= 128 * total;
        sums[m].lanes[1] -= 128 * total;
    }
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int half = 0; half < 2; half++) {
            const __m256i bytes = _mm256_xor_si256(load_bytes(w + 32 * half), sign);
            for (int m = 0; m < M; m++)
                sums[m].lanes[half] =
                    (Integers)VLM_DOT_BYTES((__m256i)sums[m].lanes[half], bytes, broadcast(x[m] + k));
        }
#elif defined(__AVX2__)
    // maddubs needs unsigned weights, so their sign moves to the activations; 2 * 127 * 127 fits 16 bits
    const __m256i one = _mm256_set1_epi16(1);
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int half = 0; half < 2; half++) {
            const __m256i bytes = load_bytes(w + 32 * half), size = _mm256_abs_epi8(bytes);
            for (int m = 0; m < M; m++) {
                const __m256i input = _mm256_sign_epi8(broadcast(x[m] + k), bytes);
                sums[m].lanes[half] += (Integers)_mm256_madd_epi16(_mm256_maddubs_epi16(size, input), one);
            }
        }
#else
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++)
                    sums[m].lanes[lane / 8][lane % 8] += (int8_t)w[4 * lane + i] * x[m][k + i];
#endif
}

// int8 weights and 16-bit activations; the middle two of every four activations are exchanged.
template <int M>
inline void add_int8_words(const uint8_t* w, int64_t group, const int16_t* const (&x)[M], Sums (&sums)[M]) {
#if defined(__AVX2__)
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int half = 0; half < 2; half++) {
            const __m256i bytes = load_bytes(w + 32 * half);
            const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
            const __m256i odd = _mm256_srai_epi16(bytes, 8);
            for (int m = 0; m < M; m++) {
                sums[m].lanes[half] += (Integers)_mm256_madd_epi16(even, broadcast(x[m] + k));
                sums[m].lanes[half] += (Integers)_mm256_madd_epi16(odd, broadcast(x[m] + k + 2));
            }
        }
#else
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++) {
                    const int8_t weight = (int8_t)w[4 * lane + (i == 1 ? 2 : i == 2 ? 1 : i)];
                    sums[m].lanes[lane / 8][lane % 8] += weight * x[m][k + i];
                }
#endif
}

inline Floats widen(Integers lanes) { return __builtin_convertvector(lanes, Floats); }

template <int KIND>
constexpr int64_t scale_bytes = KIND == INT8 ? 0 : KIND == INT4 ? 8 * TILE : 4 * TILE;

inline Floats load_scale(const uint8_t* source, int kind, int64_t place) {
    return kind == INT4 ? load((const float*)source + place) : load((const BFloat16*)source + place);
}

// Multiplies M tokens by one tile. Shapes: y (M, TILE).
template <int KIND, class X, int M>
void multiply_tile(const uint8_t* block, const Activations& x, int64_t first_token, Floats (&y)[M][2]) {
    const int64_t group = x.group, block_bytes = scale_bytes<KIND> + TILE * group / (KIND == INT8 ? 1 : 2);
    for (int64_t g = 0; g < x.num_groups; g++, block += block_bytes) {
        const X* inputs[M];
        for (int m = 0; m < M; m++)
            inputs[m] = (const X*)x.integers + ((first_token + m) * x.num_groups + g) * group;
        Sums sums[M] = {};
        const uint8_t* weights = block + scale_bytes<KIND>;
        if constexpr (KIND == INT8) {
            float totals[M];
            for (int m = 0; m < M; m++) totals[m] = x.sum[(first_token + m) * x.num_groups + g];
            if constexpr (sizeof(X) == 1) add_int8_bytes<M>(weights, group, inputs, totals, sums);
            else add_int8_words<M>(weights, group, inputs, sums);
        } else {
            if constexpr (sizeof(X) == 1) add_int4_bytes<M>(weights, group, inputs, sums);
            else add_int4_words<M>(weights, group, inputs, sums);
        }
        for (int half = 0; half < 2; half++) {
            Floats scale, zero;
            if constexpr (KIND != INT8) {
                scale = load_scale(block, KIND, 8 * half);
                zero = load_scale(block, KIND, TILE + 8 * half) - 8.0f * scale;
            }
            for (int m = 0; m < M; m++) {
                const int64_t place = (first_token + m) * x.num_groups + g;
                Floats value = widen(sums[m].lanes[half]);
                if constexpr (KIND != INT8) value = value * scale + zero * x.sum[place];
                y[m][half] += value * x.scale[place];
            }
        }
    }
}

template <int KIND, class X, int M>
void multiply_and_store(const Linear& linear, const uint8_t* tile, const Activations& x, int64_t first_token,
                        int64_t n, const Target& target) {
    Floats sums[M][2] = {};
    multiply_tile<KIND, X, M>(tile, x, first_token, sums);
    for (int m = 0; m < M; m++) put_tile(linear, target, first_token + m, n, sums[m]);
}

constexpr int64_t BLOCK_BYTES = 128 << 10;  // of weights, which stay in the L2 cache for all tokens

template <int KIND, class X>
void multiply(const Linear& linear, const Activations& x, const Target& target, int64_t start, int64_t stop) {
    const int64_t block_bytes = scale_bytes<KIND> + TILE * x.group / (KIND == INT8 ? 1 : 2);
    const int64_t tile_bytes = x.num_groups * block_bytes;
    const int64_t step = std::max<int64_t>(1, BLOCK_BYTES / tile_bytes) * TILE;
    for (int64_t first = start; first < stop; first += step)
        for (int64_t m = 0, count; m < x.num_tokens; m += count) {
            const int64_t left = x.num_tokens - m;
            count = left >= MANY_TOKENS ? MANY_TOKENS : std::min<int64_t>(MAX_TOKENS, left);
            for (int64_t n = first; n < std::min(first + step, stop); n += TILE) {
                const uint8_t* tile = (const uint8_t*)linear.weights + n / TILE * tile_bytes;
                switch (count) {
                    case 1: multiply_and_store<KIND, X, 1>(linear, tile, x, m, n, target); break;
                    case 2: multiply_and_store<KIND, X, 2>(linear, tile, x, m, n, target); break;
                    case 3: multiply_and_store<KIND, X, 3>(linear, tile, x, m, n, target); break;
                    case 4: multiply_and_store<KIND, X, 4>(linear, tile, x, m, n, target); break;
                    default: multiply_and_store<KIND, X, MANY_TOKENS>(linear, tile, x, m, n, target);
                }
            }
        }
}

template <class X>
void multiply_kind(const Linear& linear, const Activations& x, const Target& target, int64_t start,
                   int64_t stop) {
    switch (linear.kind) {
        case INT8: return multiply<INT8, X>(linear, x, target, start, stop);
        case INT4: return multiply<INT4, X>(linear, x, target, start, stop);
        default: return multiply<INT4_BFLOAT16_SCALES, X>(linear, x, target, start, stop);
    }
}

// Dequantizes a tile. Shapes: out (P, G * group), outputs padded to whole tiles.
template <int KIND>
void dequantize(const Linear& linear, BFloat16* out, int64_t num_groups, int64_t tile) {
    constexpr int64_t word_inputs = KIND == INT8 ? 4 : 8;
    const int64_t group = linear.group, block_bytes = scale_bytes<KIND> + TILE * group * 4 / word_inputs;
    const Integers bytes = {24, 16, 8, 0, 24, 16, 8, 0}, nibbles = {0, 8, 16, 24, 4, 12, 20, 28};
    const uint8_t* block = (const uint8_t*)linear.weights + tile * num_groups * block_bytes;
    for (int64_t g = 0; g < num_groups; g++, block += block_bytes)
        for (int64_t i = 0; i < TILE; i++) {
            const int64_t n = std::min(tile * TILE + i, linear.num_outputs - 1);
            const float scale = KIND == INT8 ? linear.scale[n] : load_scale(block, KIND, i / 8 * 8)[i % 8];
            const float zero = KIND == INT8 ? 0 : load_scale(block, KIND, TILE + i / 8 * 8)[i % 8] - 8 * scale;
            const int32_t* words = (const int32_t*)(block + scale_bytes<KIND>) + i;
            BFloat16* row = out + ((tile * TILE + i) * num_groups + g) * group;
            for (int64_t k = 0; k < group; k += 8) {
                const int32_t a = words[k / word_inputs * TILE], b = words[(k + 4) / word_inputs * TILE];
                const Integers pair = {a, a, a, a, b, b, b, b};
                const Integers numbers = KIND == INT8 ? (pair << bytes) >> 24 : (pair >> nibbles) & 15;
                store(row + k, widen(numbers) * scale + zero);
            }
        }
}

}  // namespace

extern "C" void vlm_dequantize(const Linear* linear, BFloat16* out, int32_t num_threads) {
    const int64_t num_groups = (linear->num_inputs + linear->group - 1) / linear->group;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t tile = 0; tile < (linear->num_outputs + TILE - 1) / TILE; tile++)
        switch (linear->kind) {
            case INT8: dequantize<INT8>(*linear, out, num_groups, tile); break;
            case INT4: dequantize<INT4>(*linear, out, num_groups, tile); break;
            default: dequantize<INT4_BFLOAT16_SCALES>(*linear, out, num_groups, tile);
        }
}

void multiply_integers(const Linear& linear, const Activations& x, Target target, int64_t start, int64_t stop) {
    if (x.bits == 8) multiply_kind<int8_t>(linear, x, target, start, stop);
    else multiply_kind<int16_t>(linear, x, target, start, stop);
}
