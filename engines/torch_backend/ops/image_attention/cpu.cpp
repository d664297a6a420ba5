// Attention of an image's tokens to all of its tokens, without a mask.
//
// Shape letters: B images, t queries, T keys and values of each, H heads, D head width (a multiple of 8).
#include <algorithm>

#include "abi.h"
#include "mixer.h"

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

void attend(const FullAttention& step, int64_t image, int64_t head) {
    const int64_t place = image * step.key_image + head * step.key_head;
    const int64_t stride = step.num_heads * (int64_t)step.head_dim;
    Mixer mixer(step.head_dim, step.num_keys);
    mixer.lay_out(step.keys + place, step.values + place, [&](int64_t t) { return t * step.key_token; });
    const float* source = step.queries + image * step.query_image + head * step.query_head;
    float* out = step.out + image * step.num_queries * stride + head * step.head_dim;
    for (int64_t first = 0; first < step.num_queries; first += Mixer::QUERIES) {
        const int64_t count = std::min(Mixer::QUERIES, step.num_queries - first);
        Query queries[Mixer::QUERIES];
        for (int64_t i = 0; i < count; i++)
            queries[i] = {source + (first + i) * step.query_token, step.num_keys, out + (first + i) * stride};
        mixer.attend(queries, count);
    }
}

}  // namespace

extern "C" void vlm_full_attention(const FullAttention* step) {
    const int64_t num_items = (int64_t)step->num_images * step->num_heads;
    const int64_t work = num_items * step->num_queries * step->num_keys * step->head_dim;
#pragma omp parallel num_threads(work < MIN_PARALLEL_PRODUCTS ? 1 : step->num_threads)
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_items; item++) attend(*step, item / step->num_heads, item % step->num_heads);
}
