// All layers of a decoder, computed by one team of threads with barriers between the parts of a layer.
#include <omp.h>

#include "attention.h"
#include "step.h"

namespace {

constexpr int64_t MIN_PARALLEL_LAYER = 1 << 16;  // multiplications of a layer that take as long as ten barriers

// Computes one matrix product of a layer, followed by a barrier.
void multiply_rows(const Step& product, const Layers& step, const float* x, float* y, bool adds, Workspace& workspace) {
    Step filled = product;
    filled.num_tokens = step.attention->num_tokens;
    filled.x = x;
    filled.y = y;
    filled.adds = adds;
    multiply_in_team(filled, workspace);
#pragma omp barrier
}

void pass_in_team(const Layer& layer, const Layers& step, Workspace& workspace) {
    multiply_rows(*layer.qkv, step, step.x, step.qkv, false, workspace);
    attend_in_team(*step.attention, layer.heads, layer.keys, layer.values, step.qkv, step.mixed);
    multiply_rows(*layer.out, step, step.mixed, step.x, true, workspace);
    multiply_rows(*layer.gate_up, step, step.x, step.gated, false, workspace);
    multiply_rows(*layer.down, step, step.gated, step.x, true, workspace);
}

}  // namespace

extern "C" void vlm_layers(const Layers* step) {
    Workspace& workspace = thread_workspace();
    int64_t num_products = count_products(*step->attention);
    for (int64_t i = 0; i < step->count; i++)
        for (const Step* product : {step->layers[i].qkv, step->layers[i].out, step->layers[i].gate_up, step->layers[i].down}) {
            workspace.fit(*product, step->attention->num_tokens);
            num_products += step->attention->num_tokens * count_weights(*product);
        }
    const bool is_small = num_products < step->count * MIN_PARALLEL_LAYER;
#pragma omp parallel num_threads(is_small ? 1 : (int)step->num_threads)
    for (int64_t i = 0; i < step->count; i++) pass_in_team(step->layers[i], *step, workspace);
}
