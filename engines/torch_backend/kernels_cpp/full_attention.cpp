// Attention of a picture's tokens to all of its tokens, without a mask.
//
// A head's keys and values are laid out once for the six times sixteen of tile.h; then a few queries at a time meet all
// keys, and their weights all values. A query's result does not depend on which others there are.
//
// Shape letters: B pictures, t queries, T keys and values of each, H heads, D head width (a multiple of 8).
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tile.h"

// Mirrored by `FullAttentionStruct` in library.py. A head's numbers lie side by side; strides are in numbers.
struct FullAttention {
    int32_t num_pictures, num_heads, head_dim, num_threads;
    int64_t num_queries, num_keys;
    int64_t query_picture, query_head, query_token;  // strides
    int64_t key_picture, key_head, key_token;        // of keys and values
    const float* queries;
    const float* keys;
    const float* values;
    float* out;  // (B, t, H * D)
};

namespace {

constexpr int64_t ROWS = 6, QUERIES = 2 * ROWS;  // queries whose scores stay in the second cache
constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

int64_t round_up(int64_t count) { return (count + COLUMNS - 1) / COLUMNS * COLUMNS; }

// One head of one picture. All its room is a thread's, and kept from call to call.
class Head {
  public:
    explicit Head(const FullAttention& step)
        : step_(step), padded_keys_(round_up(step.num_keys)), padded_width_(round_up(step.head_dim)) {
        keys_.resize(padded_keys_ * step.head_dim);
        values_.resize(padded_keys_ * padded_width_);
        queries_.resize(QUERIES * step.head_dim);
        scores_.resize(QUERIES * padded_keys_);
        weights_.resize(QUERIES * padded_keys_);
    }

    void attend(int64_t picture, int64_t head) {
        const int64_t place = picture * step_.key_picture + head * step_.key_head;
        pack_keys(step_.keys + place);
        pack_values(step_.values + place);
        const int64_t width = step_.head_dim, stride = step_.num_heads * width;
        const float* queries = step_.queries + picture * step_.query_picture + head * step_.query_head;
        float* out = step_.out + picture * step_.num_queries * stride + head * width;
        for (int64_t first = 0; first < step_.num_queries; first += QUERIES) {
            const int64_t count = std::min(QUERIES, step_.num_queries - first);
            const int64_t num_tiles = (count + ROWS - 1) / ROWS;
            scale_queries(queries + first * step_.query_token, count);
            score(num_tiles);
            for (int64_t row = 0; row < count; row++) soften(row);
            gather(num_tiles, count, out + first * stride, stride);
        }
    }

  private:
    // Panels of sixteen keys, (D, 16) each; those that there are not are nought.
    void pack_keys(const float* source) {
        const int64_t width = step_.head_dim, stride = step_.key_token;
        for (int64_t first = 0; first < padded_keys_; first += 8) {
            const float* rows = source + first * stride;
            float* target = keys_.data() + first / COLUMNS * COLUMNS * width + first % COLUMNS;
            if (first + 8 <= step_.num_keys) {
                for (int64_t d = 0; d < width; d += 8) transpose(rows + d, stride, target + d * COLUMNS);
                continue;
            }
            for (int64_t d = 0; d < width; d++)
                for (int64_t r = 0; r < 8; r++)
                    target[d * COLUMNS + r] = first + r < step_.num_keys ? rows[r * stride + d] : 0.0f;
        }
    }

    // Panels of sixteen places of the head, (T, 16) each.
    void pack_values(const float* source) {
        for (int64_t t = 0; t < padded_keys_; t++)
            for (int64_t d = 0; d < padded_width_; d += 8) {
                const bool is_there = t < step_.num_keys && d < step_.head_dim;
                const Floats numbers = is_there ? load(source + t * step_.key_token + d) : Floats{};
                store(values_.data() + (d / COLUMNS * padded_keys_ + t) * COLUMNS + d % COLUMNS, numbers);
            }
    }

    void scale_queries(const float* source, int64_t count) {
        const int64_t width = step_.head_dim;
        const float scale = 1.0f / std::sqrt((float)width);
        for (int64_t row = 0; row < count; row++)
            for (int64_t d = 0; d < width; d += LANES)
                store(queries_.data() + row * width + d, load(source + row * step_.query_token + d) * scale);
    }

    // Tiles of scores: six queries and sixteen keys, one tile after another, then the next keys.
    void score(int64_t num_tiles) {
        const int64_t width = step_.head_dim;
        std::fill(scores_.begin(), scores_.end(), 0.0f);
        for (int64_t key = 0; key < padded_keys_; key += COLUMNS)
            for (int64_t tile = 0; tile < num_tiles; tile++)
                multiply_six(queries_.data() + tile * ROWS * width, width, keys_.data() + key * width, width,
                             scores_.data() + key * QUERIES + tile * ROWS * COLUMNS);
    }

    // A query's scores to weights, side by side, whose sum is left for later.
    void soften(int64_t row) {
        float* scores = scores_.data() + row * COLUMNS;
        const int64_t last = padded_keys_ - COLUMNS;
        for (int64_t k = step_.num_keys - last; k < COLUMNS; k++)
            scores[last * QUERIES + k] = -std::numeric_limits<float>::infinity();
        Floats most[2] = {load(scores), load(scores + 8)};
        for (int64_t key = COLUMNS; key < padded_keys_; key += COLUMNS)
            for (int half = 0; half < 2; half++) {
                const Floats next = load(scores + key * QUERIES + 8 * half);
                most[half] = next > most[half] ? next : most[half];
            }
        float largest = most[0][0];
        for (int i = 0; i < LANES; i++) largest = std::max(largest, std::max(most[0][i], most[1][i]));
        Floats sums[2] = {};
        for (int64_t key = 0; key < padded_keys_; key += COLUMNS)
            for (int half = 0; half < 2; half++) {
                const Floats shifted = load(scores + key * QUERIES + 8 * half) - largest;
                const Floats weights = shifted < all(-87.0f) ? Floats{} : exp(shifted);
                store(weights_.data() + row * padded_keys_ + key + 8 * half, weights);
                sums[half] += weights;
            }
        totals_[row] = sum(sums[0] + sums[1]);
    }

    void gather(int64_t num_tiles, int64_t count, float* out, int64_t stride) {
        for (int64_t d = 0; d < padded_width_; d += COLUMNS) {
            std::fill(mixed_, mixed_ + QUERIES * COLUMNS, 0.0f);
            for (int64_t tile = 0; tile < num_tiles; tile++)
                multiply_six(weights_.data() + tile * ROWS * padded_keys_, padded_keys_,
                             values_.data() + d * padded_keys_, padded_keys_, mixed_ + tile * ROWS * COLUMNS);
            const int64_t width = std::min(COLUMNS, step_.head_dim - d);
            for (int64_t row = 0; row < count; row++)
                for (int64_t i = 0; i < width; i += LANES)
                    store(out + row * stride + d + i, load(mixed_ + row * COLUMNS + i) / totals_[row]);
        }
    }

    const FullAttention& step_;
    const int64_t padded_keys_, padded_width_;
    static thread_local std::vector<float> keys_, values_, queries_, scores_, weights_;
    float totals_[QUERIES];
    float mixed_[QUERIES * COLUMNS];
};

thread_local std::vector<float> Head::keys_, Head::values_, Head::queries_, Head::scores_, Head::weights_;

}  // namespace

extern "C" void vlm_full_attention(const FullAttention* step) {
    const int64_t num_items = (int64_t)step->num_pictures * step->num_heads;
    const int64_t work = num_items * step->num_queries * step->num_keys * step->head_dim;
#pragma omp parallel num_threads(work < MIN_PARALLEL_PRODUCTS ? 1 : step->num_threads)
    {
        Head head(*step);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_items; item++)
            head.attend(item / step->num_heads, item % step->num_heads);
    }
}
