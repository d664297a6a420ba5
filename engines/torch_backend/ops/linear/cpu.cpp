// Products of float32 activations with float32, bfloat16 or float16 weights in the row-major order of checkpoints.
//
// Weights are read from memory once. For up to four tokens they are converted to float32 in registers; for more, in the
// L1 cache.
#include <algorithm>

#include "linear.h"
#include "tile.h"

namespace {

// Multiplies M tokens by R outputs; lanes are inputs.
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

constexpr int64_t ROW_INPUTS = 3072;  // up to this many inputs of a token leave most of the L1 cache to weights

// Multiplies one token by one output, because one stream is read from memory faster than eight if the inputs stay in
// the L1 cache. Four sums hide the latency of the additions.
template <class W>
inline float multiply_row(const float* x, const W* w, int64_t num_inputs) {
    constexpr int64_t PARTS = 4;
    Floats sums[PARTS] = {};
    int64_t k = 0;
    for (; k + PARTS * LANES <= num_inputs; k += PARTS * LANES)
        for (int64_t p = 0; p < PARTS; p++) sums[p] += load(x + k + p * LANES) * load(w + k + p * LANES);
    float rest = 0;
    for (; k < num_inputs; k++) rest += x[k] * scalar(w[k]);
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

// The arguments of a product of few tokens with some outputs.
template <class W>
struct Block {
    const float* x;
    const W* weights;
    const Linear& linear;
    Target target;
    int64_t output;

    template <int M, int R>
    void compute() const {
        float out[M][R];
        const int64_t num_inputs = linear.num_inputs;
        multiply_block<M, R>(x, num_inputs, weights, num_inputs, num_inputs, out);
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) {
                const float bias = linear.bias ? linear.bias[output + r] : 0.0f;
                target.put(m, output + r, out[m][r] + bias);
            }
    }

    template <int R>
    void compute_all(int64_t num_tokens) const {
        switch (num_tokens) {
            case 1: return compute<1, R>();
            case 2: return compute<2, R>();
            case 3: return compute<3, R>();
            case 4: return compute<4, R>();
        }
    }
};

constexpr int64_t MAX_DIRECT_TOKENS = 4;
constexpr int64_t TOKENS = 96, OUTPUTS = COLUMNS, INPUTS = 128;  // size of a panel, which fits the L1 cache

// Weights of some outputs as float32 vectors whose lanes are outputs, and the sums of some tokens.
struct Panel {
    float weights[INPUTS][OUTPUTS];
    float sums[TOKENS][OUTPUTS];

    template <class W>
    void widen(const W* source, int64_t stride, int64_t num_outputs, int64_t count) {
        for (int64_t first = 0; first < OUTPUTS; first += 8) {
            const W* rows = source + first * stride;
            int64_t k = 0;
            if (first + 8 <= num_outputs)
                for (; k + 8 <= count; k += 8) transpose(rows + k, stride, weights[k] + first);
            for (; k < count; k++)
                for (int64_t r = 0; r < 8; r++)
                    weights[k][first + r] = first + r < num_outputs ? scalar(rows[r * stride + k]) : 0.0f;
        }
    }

    template <int M>
    void add(const float* x, int64_t stride, int64_t count, int64_t token) {
        multiply_rows<M>(x, stride, weights[0], count, sums[token]);
    }

    void add_tokens(const float* x, int64_t stride, int64_t count, int64_t num_tokens) {
        for (int64_t m = 0; m < num_tokens;) {
            const int64_t left = num_tokens - m;  // six at a time; the last ones in two halves
            const int64_t taken = left >= 10 ? 6 : left > 6 ? (left + 1) / 2 : left;
            const float* rows = x + m * stride;
            switch (taken) {
                case 1: add<1>(rows, stride, count, m); break;
                case 2: add<2>(rows, stride, count, m); break;
                case 3: add<3>(rows, stride, count, m); break;
                case 4: add<4>(rows, stride, count, m); break;
                case 5: add<5>(rows, stride, count, m); break;
                case 6: multiply_six(rows, stride, weights[0], count, sums[m]); break;
            }
            m += taken;
        }
    }
};

// Multiplies up to TOKENS tokens from first_token on by up to OUTPUTS outputs from n on.
template <class W>
void multiply_panel(const Linear& linear, const float* x, int64_t first_token, int64_t num_tokens, int64_t n,
                    int64_t num_outputs, Panel& panel, const Target& target) {
    const int64_t num_inputs = linear.num_inputs;
    const W* weights = (const W*)linear.weights + n * num_inputs;
    x += first_token * num_inputs;
    std::memset(panel.sums, 0, sizeof panel.sums);
    for (int64_t k = 0; k < num_inputs; k += INPUTS) {
        const int64_t count = std::min(INPUTS, num_inputs - k);
        panel.widen(weights + k, num_inputs, num_outputs, count);
        panel.add_tokens(x + k, num_inputs, count, num_tokens);
    }
    for (int64_t m = 0; m < num_tokens; m++)
        for (int64_t r = 0; r < num_outputs; r++)
            target.put(first_token + m, n + r, panel.sums[m][r] + (linear.bias ? linear.bias[n + r] : 0.0f));
}

template <class W>
void multiply(const Linear& linear, int64_t num_tokens, const float* x, Target target, int64_t start, int64_t stop) {
    int64_t n = start;
    if (num_tokens > MAX_DIRECT_TOKENS) {
        Panel panel;
        for (; n < stop; n += OUTPUTS)
            for (int64_t m = 0; m < num_tokens; m += TOKENS)
                multiply_panel<W>(linear, x, m, std::min(TOKENS, num_tokens - m), n, std::min(OUTPUTS, stop - n), panel,
                                  target);
        return;
    }
    const W* weights = (const W*)linear.weights;
    const auto row = [&] { return weights + n * linear.num_inputs; };
    const auto block = [&] { return Block<W>{x, row(), linear, target, n}; };
    if (num_tokens == 1 && linear.num_inputs <= ROW_INPUTS) {
        for (; n < stop; n++) {
            const float bias = linear.bias ? linear.bias[n] : 0.0f;
            target.put(0, n, multiply_row(x, row(), linear.num_inputs) + bias);
        }
        return;
    }
    if (num_tokens == 1)
        for (; n + 8 <= stop; n += 8) block().template compute<1, 8>();
    for (; n + 3 <= stop; n += 3) block().template compute_all<3>(num_tokens);
    for (; n < stop; n++) block().template compute_all<1>(num_tokens);
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
