// Products of activations rounded to bfloat16 with bfloat16 weights in the order of checkpoints, summed in float32.
//
// A lane has two inputs. One or two tokens are multiplied by four rows that are far apart, because four adjacent rows
// are read from memory at half the rate. More tokens are packed by `RoundedTokens`, because rows a power of two apart
// would share sets of the L1 cache. The order of a token's sums is fixed, so its result does not depend on other tokens.
#include <algorithm>
#include <type_traits>

#include "linear.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t WIDTH = ROUNDED_WIDTH;
constexpr int64_t MAX_ROW_TOKENS = 2;
constexpr int64_t INPUTS = 2048;              // inputs of a pass; for six tokens, they fit the L1 cache
constexpr int64_t PANEL_WEIGHTS = 64 * 2048;  // weights that stay in the L2 cache for many tokens
constexpr int64_t MANY_TOKENS = 48, MANY_OUTPUTS = 64, FEW_OUTPUTS = 16;

using Lanes = float __attribute__((vector_size(64)));
using Quad = float __attribute__((vector_size(16)));

#if defined(__AVX512BF16__)
using Pairs = __m512bh;

inline Pairs load_pairs(const BFloat16* source) { return (Pairs)_mm512_loadu_si512(source); }

inline Lanes add_products(Lanes sums, Pairs a, Pairs b) { return (Lanes)_mm512_dpbf16_ps((__m512)sums, a, b); }

// The sums of four vectors.
inline Quad sum_each(Lanes a, Lanes b, Lanes c, Lanes d) {
    const __m512 p = (__m512)a, q = (__m512)b, r = (__m512)c, s = (__m512)d;
    const __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(p, q), _mm512_unpackhi_ps(p, q));
    const __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(r, s), _mm512_unpackhi_ps(r, s));
    const __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return (Quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline void round_inputs(const float* x, BFloat16* target) {
    const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#else
using Pairs = uint32_t __attribute__((vector_size(64)));

inline Pairs load_pairs(const BFloat16* source) {
    Pairs pairs;
    std::memcpy(&pairs, source, sizeof pairs);
    return pairs;
}

inline Lanes add_products(Lanes sums, Pairs a, Pairs b) {
    const Lanes second = (Lanes)(a & 0xffff0000u) * (Lanes)(b & 0xffff0000u);
    return sums + second + (Lanes)(a << 16) * (Lanes)(b << 16);
}

inline Quad sum_each(Lanes a, Lanes b, Lanes c, Lanes d) {
    Quad sums = {};
    for (int lane = 0; lane < 16; lane++) sums += Quad{a[lane], b[lane], c[lane], d[lane]};
    return sums;
}

inline void round_inputs(const float* x, BFloat16* target) {
    for (int64_t i = 0; i < WIDTH; i++) store(target + i, x[i]);
}
#endif

inline Pairs load_pairs(const BFloat16* source, int64_t count) {
    if (count >= WIDTH) return load_pairs(source);
    BFloat16 padded[WIDTH] = {};
    std::memcpy(padded, source, count * sizeof *source);
    return load_pairs(padded);
}

// The destination of the sums of a pass.
struct Sums {
    const Linear& linear;
    Target target;
    bool is_first;
    int64_t apart = 1;  // rows between the outputs of a pass

    void put(int64_t m, int64_t n, float value) const {
        float& place = target.y[m * target.stride + n];
        if (is_first && linear.bias) value += linear.bias[n];
        place = is_first && !target.adds ? value : place + value;
    }

    void put(int64_t m, int64_t n, Quad value) const {
        if (apart > 1) {
            for (int64_t r = 0; r < 4; r++) put(m, n + r * apart, value[r]);
            return;
        }
        float* place = target.y + m * target.stride + n;
        Quad other;
        if (is_first && linear.bias) {
            std::memcpy(&other, linear.bias + n, sizeof other);
            value += other;
        }
        if (!is_first || target.adds) {
            std::memcpy(&other, place, sizeof other);
            value += other;
        }
        std::memcpy(place, &value, sizeof value);
    }
};

// Cache lines to prefetch into the L2 cache during a pass.
struct Ahead {
    const char* next = nullptr;
    int64_t num_lines = 0;
};

// A pass of M tokens over R rows (1 or 4), `stride` weights apart. Prefetches FETCHES lines per 32 inputs.
template <int M, int R, int FETCHES>
inline __attribute__((always_inline)) void multiply_block(const BFloat16* x, const BFloat16* w, int64_t stride,
                                                          int64_t num_inputs, const char* ahead, int64_t m, int64_t n,
                                                          const Sums& out) {
    Lanes sums[M][4] = {};
    for (int64_t k = 0; k < num_inputs; k += WIDTH, x += M * WIDTH) {
        for (int line = 0; line < FETCHES; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        Pairs weights[R];
        if (k + WIDTH <= num_inputs)
            for (int r = 0; r < R; r++) weights[r] = load_pairs(w + r * stride + k);
        else
            for (int r = 0; r < R; r++) weights[r] = load_pairs(w + r * stride + k, num_inputs - k);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            const Pairs inputs = load_pairs(x + i * WIDTH);
            for (int r = 0; r < R; r++) sums[i][r] = add_products(sums[i][r], inputs, weights[r]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
        const Quad values = sum_each(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        if (R == 4) out.put(m + i, n, values);
        else out.put(m + i, n, values[0]);
    }
}

template <int R, int FETCHES>
void multiply_tokens(int64_t count, const BFloat16* x, const BFloat16* w, int64_t stride, int64_t num_inputs,
                     const char* ahead, int64_t m, int64_t n, const Sums& out) {
    switch (count) {
        case 1: return multiply_block<1, R, FETCHES>(x, w, stride, num_inputs, ahead, m, n, out);
        case 2: return multiply_block<2, R, FETCHES>(x, w, stride, num_inputs, ahead, m, n, out);
        case 3: return multiply_block<3, R, FETCHES>(x, w, stride, num_inputs, ahead, m, n, out);
        case 4: return multiply_block<4, R, FETCHES>(x, w, stride, num_inputs, ahead, m, n, out);
        case 5: return multiply_block<5, R, FETCHES>(x, w, stride, num_inputs, ahead, m, n, out);
        case 6: return multiply_block<6, R, FETCHES>(x, w, stride, num_inputs, ahead, m, n, out);
    }
}

// Multiplies all tokens by the outputs start..stop, whose weights stay in the L2 cache, and prefetches the next weights.
void multiply_panel(const Linear& linear, const RoundedTokens& tokens, const BFloat16* x, const Target& target,
                    int64_t start, int64_t stop, Ahead ahead) {
    const int64_t width = linear.num_inputs;
    const int64_t rate = tokens.num_blocks == 1 ? 4 : tokens.num_blocks <= 3 ? 2 : 1;
    for (int64_t k = 0; k < width; k += INPUTS) {
        const int64_t count = std::min(INPUTS, width - k), num_steps = (count + WIDTH - 1) / WIDTH;
        const Sums out = {linear, target, k == 0};
        for (int64_t block = 0; block < tokens.num_blocks; block++) {
            const int64_t m = tokens.first(block), size = tokens.size(block);
            const BFloat16* inputs = x + tokens.place(block, 0, k);
            int64_t n = start;
            for (; n + 4 <= stop; n += 4) {
                const BFloat16* weights = (const BFloat16*)linear.weights + n * width + k;
                const int64_t lines = ahead.num_lines > 0 ? rate : 0;
                switch (lines) {
                    default: multiply_tokens<4, 0>(size, inputs, weights, width, count, nullptr, m, n, out); break;
#if defined(__AVX512BF16__)
                    case 1: multiply_tokens<4, 1>(size, inputs, weights, width, count, ahead.next, m, n, out); break;
                    case 2: multiply_tokens<4, 2>(size, inputs, weights, width, count, ahead.next, m, n, out); break;
                    case 4: multiply_tokens<4, 4>(size, inputs, weights, width, count, ahead.next, m, n, out); break;
#endif
                }
                ahead.num_lines -= lines * num_steps;
                ahead.next += lines * num_steps * 64;
            }
            for (; n < stop; n++)
                multiply_tokens<1, 0>(size, inputs, (const BFloat16*)linear.weights + n * width + k, width, count,
                                      nullptr, m, n, out);
        }
    }
}

}  // namespace

void round_token(const float* x, int64_t num_inputs, const RoundedTokens& tokens, int64_t token, BFloat16* rounded) {
    const int64_t block = tokens.block_of(token), within = token - tokens.first(block);
    for (int64_t k = 0; k < num_inputs; k += WIDTH) {
        BFloat16* target = rounded + tokens.place(block, within, k);
        if (k + WIDTH <= num_inputs) {
            round_inputs(x + k, target);
            continue;
        }
        float padded[WIDTH] = {};
        std::copy(x + k, x + num_inputs, padded);
        round_inputs(padded, target);
    }
}

void multiply_rounded(const Linear& linear, int64_t num_tokens, const BFloat16* x, Target target, int64_t start,
                      int64_t stop) {
    const RoundedTokens tokens(num_tokens, linear.num_inputs);
    const int64_t width = linear.num_inputs;
    if (num_tokens <= MAX_ROW_TOKENS) {
        const int64_t apart = (stop - start) / 4;
        const auto multiply = [&](auto rows, int64_t n) {
            for (int64_t k = 0; k < width; k += INPUTS)
                multiply_tokens<rows, 0>(num_tokens, x + tokens.place(0, 0, k),
                                         (const BFloat16*)linear.weights + n * width + k, apart * width,
                                         std::min(INPUTS, width - k), nullptr, 0, n, {linear, target, k == 0, apart});
        };
        for (int64_t n = start; n < start + apart; n++) multiply(std::integral_constant<int, 4>(), n);
        for (int64_t n = start + 4 * apart; n < stop; n++) multiply(std::integral_constant<int, 1>(), n);
        return;
    }
    const int64_t most = std::max<int64_t>(4, PANEL_WEIGHTS / width / 4 * 4);
    const int64_t step = std::min(most, num_tokens > MANY_TOKENS ? MANY_OUTPUTS : FEW_OUTPUTS);
    for (int64_t n = start; n < stop; n += step) {
        const int64_t end = std::min(n + step, stop), next = std::min(end + step, stop);
        const Ahead ahead = {(const char*)((const BFloat16*)linear.weights + end * width), (next - end) * width / 32};
        multiply_panel(linear, tokens, x, target, n, end, ahead);
    }
}
