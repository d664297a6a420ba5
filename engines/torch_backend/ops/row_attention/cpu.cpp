// Attention of rows to themselves, without a mask: texts of different lengths, one after another without padding.
//
// Shape letters: T tokens of all rows, n rows, L tokens of a row, H heads, D head width (a multiple of 8).
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "mixer.h"

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

template <class T>
void attend(const RowAttention& rows, int64_t row, int64_t head) {
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
