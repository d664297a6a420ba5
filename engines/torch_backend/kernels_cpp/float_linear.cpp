// Products of float32 activations with float32, bfloat16 or float16 weights as a checkpoint stores them, row by row.
//
// Few tokens: the weights stream from memory once, and are widened in registers (up to two tokens) or, three
// outputs at a time, in the cache.
#include <vector>

#include "linear.h"
#include "vectors.h"

namespace {

// M tokens times R outputs; lanes run along the inputs.
template <int M, int R, class W>
inline __attribute__((always_inline)) void multiply_block(const float* x, int64_t x_stride, const W* w,
                                                          int64_t w_stride, int64_t num_inputs, float (&out)[M][R]) {
    Floats sums[M][R] = {};
    int64_t k = 0;
    for (; k + LANES <= num_inputs; k += LANES) {
        Floats weights[R];
        for (int r = 0; r < R; r++) weights[r] = load(w + r * w_stride + k);
        for (int m = 0; m < M; m++) {
            const Floats input = load(x + m * x_stride + k);
            for (int r = 0; r < R; r++) sums[m][r] += input * weights[r];
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) {
            float rest = 0;
            for (int64_t i = k; i < num_inputs; i++) rest += x[m * x_stride + i] * scalar(w[r * w_stride + i]);
            out[m][r] = sum(sums[m][r]) + rest;
        }
}

// What a block of tokens and outputs is computed of, and where it goes.
template <class W>
struct Block {
    const float* x;
    const W* weights;
    int64_t w_stride;
    const Linear& linear;
    Target target;
    int64_t token, output;

    template <int M, int R>
    void compute() const {
        float out[M][R];
        const int64_t num_inputs = linear.num_inputs;
        multiply_block<M, R>(x + token * num_inputs, num_inputs, weights, w_stride, num_inputs, out);
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) {
                const float bias = linear.bias ? linear.bias[output + r] : 0.0f;
                target.put(token + m, output + r, out[m][r] + bias);
            }
    }

    // All tokens, four at a time.
    template <int R>
    void compute_all(int64_t num_tokens) {
        for (; token + 4 <= num_tokens; token += 4) compute<4, R>();
        switch (num_tokens - token) {
            case 1: return compute<1, R>();
            case 2: return compute<2, R>();
            case 3: return compute<3, R>();
        }
    }
};

// R outputs' weights as float32, for several blocks of tokens to read. Shapes: wide (R, stride).
template <int R, class W>
void widen(const W* weights, int64_t num_inputs, float* wide, int64_t stride) {
    for (int r = 0; r < R; r++, weights += num_inputs, wide += stride) {
        int64_t k = 0;
        for (; k + LANES <= num_inputs; k += LANES) store(wide + k, load(weights + k));
        for (; k < num_inputs; k++) wide[k] = scalar(weights[k]);
    }
}

constexpr int64_t MAX_DIRECT_TOKENS = 4;

template <class W>
void multiply(const Linear& linear, int64_t num_tokens, const float* x, Target target, int64_t start, int64_t stop) {
    static thread_local std::vector<float> wide;
    const int64_t num_inputs = linear.num_inputs, wide_stride = num_inputs + LANES;
    const bool is_direct = sizeof(W) == sizeof(float) || num_tokens <= MAX_DIRECT_TOKENS;
    if (!is_direct) wide.resize(3 * wide_stride);
    const W* weights = (const W*)linear.weights + start * num_inputs;
    int64_t n = start;
    const auto step = [&](int64_t count) { n += count, weights += count * num_inputs; };
    if (num_tokens == 1)
        for (; n + 4 <= stop; step(4))
            Block<W>{x, weights, num_inputs, linear, target, 0, n}.template compute_all<4>(1);
    for (; n + 3 <= stop; step(3)) {
        if (is_direct) {
            Block<W>{x, weights, num_inputs, linear, target, 0, n}.template compute_all<3>(num_tokens);
        } else {
            widen<3>(weights, num_inputs, wide.data(), wide_stride);
            Block<float>{x, wide.data(), wide_stride, linear, target, 0, n}.template compute_all<3>(num_tokens);
        }
    }
    for (; n < stop; step(1))
        Block<W>{x, weights, num_inputs, linear, target, 0, n}.template compute_all<1>(num_tokens);
}

}  // namespace

void multiply_floats(const Linear& linear, int64_t num_tokens, const float* x, Target target, int64_t start,
                     int64_t stop) {
    switch (linear.kind) {
        case FLOAT32: return multiply<float>(linear, num_tokens, x, target, start, stop);
        case BFLOAT16: return multiply<BFloat16>(linear, num_tokens, x, target, start, stop);
        default: return multiply<Float16>(linear, num_tokens, x, target, start, stop);
    }
}
