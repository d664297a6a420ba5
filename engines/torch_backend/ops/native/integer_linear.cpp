// Products of 8- or 16-bit activations with int8 or int4 weights, summed in integers within a group of inputs.
//
// Weights are stored in tiles of 16 outputs, group after group, in the order of `packing.py`:
//
//   int4 block:  scale[16] zero[16]   then for every 8 inputs 64 bytes
//   int8 block:                            for every 4 inputs 64 bytes
//
// 64 bytes have 4 inputs of output 0, 4 of output 1, ...; for int4, four inputs in the low nibbles and the next four in
// the high ones. So 32-bit lanes are outputs, sums need no shuffling, and memory is read as one stream. Sums of a
// group are exact, and groups are added in order, so a token's result does not depend on other tokens.
#include <algorithm>
#include <utility>

#include "linear.h"
#include "vectors.h"

namespace {

// PARTS: number of vectors that hold the outputs of a tile. Tokens: numbers of tokens whose sums fit the registers.
#if defined(__AVX512VNNI__)
constexpr int PARTS = 1;
using Int8Tokens = std::integer_sequence<int, 12, 8, 4, 3, 2, 1>;  // for int8 weights and activations
using Tokens = std::integer_sequence<int, 8, 4, 3, 2, 1>;
#else
constexpr int PARTS = 2;
using Tokens = std::integer_sequence<int, 4, 3, 2, 1>;
using Int8Tokens = Tokens;
#endif
constexpr int PART_BYTES = 64 / PARTS, PART_LANES = 16 / PARTS;
using Part = int32_t __attribute__((vector_size(PART_BYTES)));
using PartWords = int16_t __attribute__((vector_size(PART_BYTES)));
using PartFloats = float __attribute__((vector_size(PART_BYTES)));

template <class T>
inline T load_as(const void* source) {
    T value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

// Four activations that all lanes share.
inline Part broadcast(const void* four_bytes) { return load_as<int32_t>(four_bytes) - Part{}; }

// Adds products of bytes, four per lane, to sums. Words are multiplied two per lane.
#if defined(__AVX512VNNI__)
#define VLM_DOT_BYTES(sums, a, b) (Part)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(a), (__m512i)(b))
inline Part multiply_words(PartWords a, Part b) { return (Part)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
#define VLM_DOT_BYTES(sums, a, b) (Part)_mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(a), (__m256i)(b))
#endif
inline Part multiply_words(PartWords a, Part b) { return (Part)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif
#if defined(VLM_DOT_BYTES)
constexpr float ADDED_TO_BYTES = 128;  // makes int8 weights unsigned, as the instruction requires
#else
constexpr float ADDED_TO_BYTES = 0;
#endif

// Adds the products of int4 weights and 8-bit activations of one group.
template <int M>
inline void add_int4(const uint8_t* w, int64_t group, const int8_t* const (&x)[M], Part (&sums)[M][PARTS]) {
#if defined(VLM_DOT_BYTES)
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int part = 0; part < PARTS; part++) {
            const Part both = load_as<Part>(w + PART_BYTES * part);
            const Part first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
            for (int m = 0; m < M; m++) {
                Part sum = VLM_DOT_BYTES(M > 1 ? sums[m][part] : Part{}, first, broadcast(x[m] + k));
                sum = VLM_DOT_BYTES(sum, second, broadcast(x[m] + k + 4));
                sums[m][part] = M > 1 ? sum : sums[m][part] + sum;  // a shorter dependency chain
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
            const __m256i a = load_as<__m256i>(w), b = load_as<__m256i>(w + 32);
            const __m256i first_a = _mm256_and_si256(a, low), first_b = _mm256_and_si256(b, low);
            for (int m = 0; m < M; m++) {
                const __m256i first = (__m256i)broadcast(x[m] + k);
                pairs[m][0] = _mm256_add_epi16(pairs[m][0], _mm256_maddubs_epi16(first_a, first));
                pairs[m][1] = _mm256_add_epi16(pairs[m][1], _mm256_maddubs_epi16(first_b, first));
            }
            const __m256i second_a = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
            const __m256i second_b = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
            for (int m = 0; m < M; m++) {
                const __m256i second = (__m256i)broadcast(x[m] + k + 4);
                pairs[m][0] = _mm256_add_epi16(pairs[m][0], _mm256_maddubs_epi16(second_a, second));
                pairs[m][1] = _mm256_add_epi16(pairs[m][1], _mm256_maddubs_epi16(second_b, second));
            }
        }
        for (int m = 0; m < M; m++)
            for (int part = 0; part < PARTS; part++)
                sums[m][part] += (Part)_mm256_madd_epi16(pairs[m][part], one);
    }
#else
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++) {
                    const uint8_t both = w[4 * lane + i];
                    sums[m][lane / 8][lane % 8] += (both & 15) * x[m][k + i] + (both >> 4) * x[m][k + 4 + i];
                }
#endif
}

// The same for 16-bit activations; the middle two of every four activations are exchanged.
template <int M>
inline void add_int4(const uint8_t* w, int64_t group, const int16_t* const (&x)[M], Part (&sums)[M][PARTS]) {
#if defined(__AVX2__)
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int part = 0; part < PARTS; part++) {
            const Part both = load_as<Part>(w + PART_BYTES * part);
            const Part words[4] = {both, both >> 8, both >> 4, both >> 12};
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 4; i++)
                    sums[m][part] += multiply_words((PartWords)(words[i] & 0x000f000f), broadcast(x[m] + k + 2 * i));
        }
#else
    for (int64_t k = 0; k < group; k += 8, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++) {
                    const uint8_t both = w[4 * lane + (i == 1 ? 2 : i == 2 ? 1 : i)];
                    sums[m][lane / 8][lane % 8] += (both & 15) * x[m][k + i] + (both >> 4) * x[m][k + 4 + i];
                }
#endif
}

// The same for int8 weights and 8-bit activations. For instructions with unsigned bytes, 128 is added to the weights.
template <int M>
inline void add_int8(const uint8_t* w, int64_t group, const int8_t* const (&x)[M], Part (&sums)[M][PARTS]) {
#if defined(VLM_DOT_BYTES)
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int part = 0; part < PARTS; part++) {
            const Part bytes = load_as<Part>(w + PART_BYTES * part) ^ (int32_t)0x80808080;
            for (int m = 0; m < M; m++) sums[m][part] = VLM_DOT_BYTES(sums[m][part], bytes, broadcast(x[m] + k));
        }
#elif defined(__AVX2__)
    // maddubs needs unsigned weights, so their sign moves to the activations; 2 * 127 * 127 fits 16 bits
    const __m256i one = _mm256_set1_epi16(1);
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int part = 0; part < PARTS; part++) {
            const __m256i bytes = load_as<__m256i>(w + PART_BYTES * part), size = _mm256_abs_epi8(bytes);
            for (int m = 0; m < M; m++) {
                const __m256i input = _mm256_sign_epi8((__m256i)broadcast(x[m] + k), bytes);
                sums[m][part] += (Part)_mm256_madd_epi16(_mm256_maddubs_epi16(size, input), one);
            }
        }
#else
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++)
                    sums[m][lane / 8][lane % 8] += (int8_t)w[4 * lane + i] * x[m][k + i];
#endif
}

// The same for int8 weights and 16-bit activations; the middle two of every four activations are exchanged.
template <int M>
inline void add_int8(const uint8_t* w, int64_t group, const int16_t* const (&x)[M], Part (&sums)[M][PARTS]) {
#if defined(__AVX2__)
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int part = 0; part < PARTS; part++) {
            const PartWords bytes = load_as<PartWords>(w + PART_BYTES * part), even = bytes << 8 >> 8, odd = bytes >> 8;
            for (int m = 0; m < M; m++) {
                sums[m][part] += multiply_words(even, broadcast(x[m] + k));
                sums[m][part] += multiply_words(odd, broadcast(x[m] + k + 2));
            }
        }
#else
    for (int64_t k = 0; k < group; k += 4, w += 64)
        for (int m = 0; m < M; m++)
            for (int lane = 0; lane < TILE; lane++)
                for (int i = 0; i < 4; i++) {
                    const int8_t weight = (int8_t)w[4 * lane + (i == 1 ? 2 : i == 2 ? 1 : i)];
                    sums[m][lane / 8][lane % 8] += weight * x[m][k + i];
                }
#endif
}

template <int KIND>
constexpr int64_t scale_bytes = KIND == INT8 ? 0 : KIND == INT4 ? 8 * TILE : 4 * TILE;

inline PartFloats load_scale(const uint8_t* source, int kind, int64_t place) {
    PartFloats scale;
    for (int64_t i = 0; i < PART_LANES; i += LANES, place += LANES)
        store((float*)&scale + i,
              kind == INT4 ? load((const float*)source + place) : load((const BFloat16*)source + place));
    return scale;
}

// Multiplies M tokens by one tile. Shapes: y (M, TILE).
template <int KIND, class X, int M>
void multiply_tile(const uint8_t* block, const Activations& x, int64_t first_token, PartFloats (&y)[M][PARTS]) {
    const int64_t group = x.group, block_bytes = scale_bytes<KIND> + TILE * group / (KIND == INT8 ? 1 : 2);
    constexpr bool is_offset = KIND == INT8 && sizeof(X) == 1 && ADDED_TO_BYTES != 0;
    for (int m = 0; m < M; m++)
        for (int part = 0; part < PARTS; part++)
            y[m][part] = PartFloats{} - (is_offset ? ADDED_TO_BYTES * x.total[first_token + m] : 0.0f);
    for (int64_t g = 0; g < x.num_groups; g++, block += block_bytes) {
        const X* inputs[M];
        const int64_t place = g * x.num_tokens + first_token;
        for (int m = 0; m < M; m++) inputs[m] = (const X*)x.integers + (place + m) * group;
        Part sums[M][PARTS] = {};
        if constexpr (KIND == INT8) add_int8(block, group, inputs, sums);
        else add_int4(block + scale_bytes<KIND>, group, inputs, sums);
        for (int part = 0; part < PARTS; part++) {
            PartFloats scale, zero;
            if constexpr (KIND != INT8) {
                scale = load_scale(block, KIND, PART_LANES * part);
                zero = load_scale(block, KIND, TILE + PART_LANES * part) - 8.0f * scale;
            }
            for (int m = 0; m < M; m++) {
                PartFloats value = __builtin_convertvector(sums[m][part], PartFloats);
                if constexpr (KIND != INT8) value = value * scale + zero * x.sum[place + m];
                y[m][part] += value * x.scale[place + m];
            }
        }
    }
}

// Stores M tokens' results of a tile, from output n on.
template <int M>
void put_tile(const Linear& linear, const Target& target, int64_t first_token, int64_t n,
              const PartFloats (&sums)[M][PARTS]) {
    for (int m = 0; m < M; m++)
        for (int64_t part = 0, o = n; part < PARTS; part++, o += PART_LANES) {
            PartFloats value = sums[m][part];
            if (o + PART_LANES > linear.num_outputs) {
                for (int64_t i = 0; o + i < linear.num_outputs; i++) {
                    const float scaled = linear.scale ? value[i] * linear.scale[o + i] : value[i];
                    target.put(first_token + m, o + i, linear.bias ? scaled + linear.bias[o + i] : scaled);
                }
                continue;
            }
            float* place = target.y + (first_token + m) * target.stride + o;
            if (linear.scale) value *= load_as<PartFloats>(linear.scale + o);
            if (linear.bias) value += load_as<PartFloats>(linear.bias + o);
            if (target.adds) value += load_as<PartFloats>(place);
            std::memcpy(place, &value, sizeof value);
        }
}

// Multiplies M tokens by the outputs start..stop. Returns: M.
template <int KIND, class X, int M>
int64_t multiply_tiles(const Linear& linear, const uint8_t* tile, int64_t tile_bytes, const Activations& x,
                       int64_t first_token, int64_t start, int64_t stop, const Target& target) {
    for (int64_t n = start; n < stop; n += TILE, tile += tile_bytes) {
        PartFloats sums[M][PARTS];
        multiply_tile<KIND, X, M>(tile, x, first_token, sums);
        put_tile<M>(linear, target, first_token, n, sums);
    }
    return M;
}

constexpr int64_t BLOCK_BYTES = 128 << 10;  // weights that stay in the L2 cache for all tokens

template <int KIND, class X, int... M>
void multiply(const Linear& linear, const Activations& x, const Target& target, int64_t start, int64_t stop,
              std::integer_sequence<int, M...>) {
    const int64_t block_bytes = scale_bytes<KIND> + TILE * x.group / (KIND == INT8 ? 1 : 2);
    const int64_t tile_bytes = x.num_groups * block_bytes;
    const int64_t step = std::max<int64_t>(1, BLOCK_BYTES / tile_bytes) * TILE;
    for (int64_t n = start; n < stop; n += step) {
        const uint8_t* tile = (const uint8_t*)linear.weights + n / TILE * tile_bytes;
        const int64_t last = std::min(n + step, stop);
        for (int64_t m = 0, count = 0; m < x.num_tokens; m += count)  // the largest possible M first
            (void)((x.num_tokens - m >= M &&
                    (count = multiply_tiles<KIND, X, M>(linear, tile, tile_bytes, x, m, n, last, target))) ||
                   ...);
    }
}

template <class X, class Int8Tokens>
void multiply_kind(const Linear& linear, const Activations& x, const Target& target, int64_t start, int64_t stop) {
    switch (linear.kind) {
        case INT8: return multiply<INT8, X>(linear, x, target, start, stop, Int8Tokens());
        case INT4: return multiply<INT4, X>(linear, x, target, start, stop, Tokens());
        default: return multiply<INT4_BFLOAT16_SCALES, X>(linear, x, target, start, stop, Tokens());
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
            const int64_t lane = i % PART_LANES;
            const float scale = KIND == INT8 ? linear.scale[n] : load_scale(block, KIND, i - lane)[lane];
            const float zero = KIND == INT8 ? 0 : load_scale(block, KIND, TILE + i - lane)[lane] - 8 * scale;
            const int32_t* words = (const int32_t*)(block + scale_bytes<KIND>) + i;
            BFloat16* row = out + ((tile * TILE + i) * num_groups + g) * group;
            for (int64_t k = 0; k < group; k += 8) {
                const int32_t a = words[k / word_inputs * TILE], b = words[(k + 4) / word_inputs * TILE];
                const Integers pair = {a, a, a, a, b, b, b, b};
                const Integers numbers = KIND == INT8 ? (pair << bytes) >> 24 : (pair >> nibbles) & 15;
                store(row + k, __builtin_convertvector(numbers, Floats) * scale + zero);
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
    if (x.bits == 8) multiply_kind<int8_t, Int8Tokens>(linear, x, target, start, stop);
    else multiply_kind<int16_t, Tokens>(linear, x, target, start, stop);
}
