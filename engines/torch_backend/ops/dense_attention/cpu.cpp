// Attention without a mask over packed sequences of different lengths.
//
// Shape letters: N queries, T keys and values, H heads, D head width (a multiple of 8).
#include "abi.h"
#include "wide_mixer.h"

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

template <class T>
void attend(const DenseAttention& step, int64_t sequence, int64_t head) {
    const int64_t width = step.head_dim, stride = step.query_stride, out_stride = step.num_heads * width;
    const int64_t begin = step.query_offsets[sequence], count = step.query_offsets[sequence + 1] - begin;
    const int64_t key_begin = step.key_offsets[sequence], num_keys = step.key_offsets[sequence + 1] - key_begin;
    const T* queries = (const T*)step.queries + begin * stride + head * width;
    const T* keys = (const T*)step.keys + key_begin * step.key_stride + head * width;
    const T* values = (const T*)step.values + key_begin * step.key_stride + head * width;
    T* out = (T*)step.out + begin * out_stride + head * width;
    with_mixer<T>(width, num_keys, 1.0f / std::sqrt((float)width), [&](auto& mixer) {
        constexpr int64_t size = std::decay_t<decltype(mixer)>::QUERIES;
        mixer.lay_out(keys, values, [&](int64_t t) { return t * step.key_stride; });
        for (int64_t first = 0; first < count; first += size) {
            Query<T> asked[size];
            const int64_t num_asked = std::min(size, count - first);
            for (int64_t i = 0; i < num_asked; i++)
                asked[i] = {queries + (first + i) * stride, num_keys, out + (first + i) * out_stride};
            mixer.attend(asked, num_asked);
        }
    });
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
