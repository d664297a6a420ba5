// Linear layers fused with a norm, a gate or an activation before and an addition after them. Each call from Python
// starts one team of threads.
#include "step.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "vectors.h"

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 16;  // fewer multiplications take less time than waking a thread

void normalize(const float* x, const float* gain, float eps, int64_t width, float* out) {
    Floats squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < width; i++) rest += x[i] * x[i];
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = x[i] * scale * gain[i];
}

void gate(const float* x, int64_t width, float* out) {
    const float* factor = x + width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Floats value = load(x + i);
        store(out + i, value / (1.0f + exp(-value)) * load(factor + i));
    }
    for (; i < width; i++) out[i] = x[i] / (1.0f + std::exp(-x[i])) * factor[i];
}

void quick_gelu(const float* x, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Floats value = load(x + i);
        store(out + i, value / (1.0f + exp(value * -1.702f)));
    }
    for (; i < width; i++) out[i] = x[i] / (1.0f + std::exp(-1.702f * x[i]));
}

// Source: Abramowitz and Stegun, 7.1.26; error below 1.5e-7 of the input.
void gelu(const float* x, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Floats value = load(x + i), size = (value < 0.0f ? -value : value) * 0.70710678f;
        const Floats t = 1.0f / (1.0f + size * 0.3275911f);
        Floats series = t * 1.061405429f - 1.453152027f;
        series = series * t + 1.421413741f;
        series = series * t - 0.284496736f;
        series = series * t + 0.254829592f;
        const Floats beyond = series * t * exp(-size * size) * 0.5f;  // tail of a normal distribution
        store(out + i, value * (value < 0.0f ? beyond : 1.0f - beyond));
    }
    for (; i < width; i++) out[i] = x[i] * 0.5f * std::erfc(x[i] * -0.70710678f);
}

class Product {
  public:
    // The workspace must be large enough.
    Product(const Step& step, Workspace& workspace) : step_(step), linear_(step.linears[0]), workspace_(workspace) {
        for (int32_t i = 0; i < step.count; i++) stride_ += step.linears[i].num_outputs;
        inputs_ = step.before == NOTHING ? step.x : workspace.inputs.data();
        rounds_ = rounds_to_bfloat16(step);
        if (linear_.kind < INT8) return;
        const int64_t num_groups = (linear_.num_inputs + linear_.group - 1) / linear_.group;
        integers_ = {step.num_tokens,   num_groups,      linear_.group,    step.bits, workspace.integers.data(),
                     workspace.scale.data(), workspace.sum.data(), workspace.total.data()};
    }

    int num_threads() const {
        return step_.num_tokens * count_weights(step_) < MIN_PARALLEL_PRODUCTS ? 1 : step_.num_threads;
    }

    bool prepares() const { return step_.before != NOTHING || linear_.kind >= INT8 || rounds_; }

    // Applies the norm or gate to a token, and converts it to the type that the product needs.
    void prepare(int64_t token) {
        const int64_t width = linear_.num_inputs;
        float* into = workspace_.inputs.data() + token * width;
        if (step_.before == RMS_NORM) normalize(step_.x + token * width, step_.gain, step_.eps, width, into);
        if (step_.before == SILU_GATE) gate(step_.x + token * 2 * width, width, into);
        if (step_.before == QUICK_GELU) quick_gelu(step_.x + token * width, width, into);
        if (step_.before == GELU) gelu(step_.x + token * width, width, into);
        if (rounds_) {
            const RoundedTokens tokens(step_.num_tokens, width);
            round_token(inputs_ + token * width, width, tokens, token, workspace_.rounded[0].values);
        }
        if (linear_.kind >= INT8) quantize_token(inputs_ + token * width, width, integers_, token);
    }

    void multiply(int thread, int team) const {
        float* target = step_.y;
        for (int32_t i = 0; i < step_.count; i++) {
            const Linear& linear = step_.linears[i];
            const Share outputs = share_of(linear.num_outputs, TILE, thread, team);
            const Target into = {target, stride_, step_.adds != 0};
            if (linear.kind >= INT8) multiply_integers(linear, integers_, into, outputs.start, outputs.stop);
            else if (rounds_)
                multiply_rounded(linear, step_.num_tokens, workspace_.rounded[0].values, into, outputs.start, outputs.stop);
            else multiply_floats(linear, step_.num_tokens, inputs_, into, outputs.start, outputs.stop);
            target += linear.num_outputs;
        }
    }

  private:
    const Step& step_;
    const Linear& linear_;
    Workspace& workspace_;
    Activations integers_ = {};
    const float* inputs_;
    bool rounds_;
    int64_t stride_ = 0;
};

}  // namespace

int64_t count_weights(const Step& step) {
    int64_t num_outputs = 0;
    for (int32_t i = 0; i < step.count; i++) num_outputs += step.linears[i].num_outputs;
    return num_outputs * step.linears[0].num_inputs;
}

void multiply_in_team(const Step& step, Workspace& workspace) {
    Product product(step, workspace);
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    if (product.prepares()) {
        const Share tokens = share_of(step.num_tokens, 1, thread, team);
        for (int64_t m = tokens.start; m < tokens.stop; m++) product.prepare(m);
#pragma omp barrier
    }
    product.multiply(thread, team);
}

Workspace& thread_workspace() {
    static thread_local Workspace workspace;
    return workspace;
}

extern "C" void vlm_linear(const Step* step) {
    Workspace& workspace = thread_workspace();
    workspace.fit(*step, step->num_tokens);
#pragma omp parallel num_threads(Product(*step, workspace).num_threads())
    multiply_in_team(*step, workspace);
}
