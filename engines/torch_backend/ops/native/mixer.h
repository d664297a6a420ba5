// Attention of several queries to many keys. Keys and values are packed once for the 6 x 16 tiles of tile.h; then a few
// queries at a time are multiplied by all visible keys, and the resulting weights by the values. A query's result does
// not depend on other queries, or on keys outside its range.
//
// Shape letters: T keys and values, D head width (a multiple of LANES).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tile.h"

// A query, the range of keys that it attends to (from `first` to before `num_keys`), and its result. Shapes: source and
// out (D,).
template <class S>
struct Query {
    const S* source;
    int64_t num_keys;
    S* out;
    int64_t first = 0;
};

// Attention of one head. A thread can have only one Mixer at a time, because scratch memory is per thread.
class Mixer {
  public:
    static constexpr int64_t KEYS = COLUMNS;  // shifting keys by a multiple of this does not change results
    static constexpr int64_t ROWS = 6, QUERIES = 2 * ROWS;  // queries whose scores fit the L2 cache

    Mixer(int64_t width, int64_t num_keys, float scale)
        : width_(width), num_keys_(num_keys), scale_(scale), padded_keys_(round_up(num_keys)), padded_width_(round_up(width)) {
        static thread_local std::vector<float> buffers[5];
        keys_ = fit(buffers[0], padded_keys_ * width);
        values_ = fit(buffers[1], padded_keys_ * padded_width_);
        queries_ = fit(buffers[2], QUERIES * width);
        scores_ = fit(buffers[3], QUERIES * padded_keys_);
        weights_ = fit(buffers[4], QUERIES * padded_keys_);
    }

    // Packs keys and values. `place(t)` is the offset of the row of key t. The last key pads incomplete tiles.
    template <class T, class Place>
    void lay_out(const T* keys, const T* values, Place place) {
        for (int64_t first = 0; first < padded_keys_; first += 8) {
            const T* rows[8];
            for (int64_t r = 0; r < 8; r++) rows[r] = keys + place(std::min(first + r, num_keys_ - 1));
            float* target = keys_ + first / COLUMNS * COLUMNS * width_ + first % COLUMNS;
            for (int64_t d = 0; d < width_; d += 8) transpose(rows, d, target + d * COLUMNS);
        }
        for (int64_t t = 0; t < padded_keys_; t++) {
            const T* row = values + place(std::min(t, num_keys_ - 1));
            for (int64_t d = 0; d < padded_width_; d += 8)
                store(values_ + (d / COLUMNS * padded_keys_ + t) * COLUMNS + d % COLUMNS,
                      d < width_ ? load(row + d) : Floats{});
        }
    }

    // Computes up to QUERIES queries.
    template <class S>
    void attend(const Query<S>* queries, int64_t count) {
        const int64_t num_tiles = (count + ROWS - 1) / ROWS;
        int64_t most = 0;
        for (int64_t row = 0; row < count; row++) most = std::max(most, queries[row].num_keys);
        const int64_t num_keys = round_up(most);
        scale(queries, count);
        score(num_tiles, num_keys);
        for (int64_t row = 0; row < count; row++) soften(row, queries[row].first, queries[row].num_keys, num_keys);
        gather(queries, count, num_tiles, num_keys);
    }

  private:
    static int64_t round_up(int64_t count) { return (count + COLUMNS - 1) / COLUMNS * COLUMNS; }

    static float* fit(std::vector<float>& buffers, int64_t size) {
        if ((int64_t)buffers.size() < size) buffers.resize(size);
        return buffers.data();
    }

    template <class S>
    void scale(const Query<S>* queries, int64_t count) {
        for (int64_t row = 0; row < count; row++)
            for (int64_t d = 0; d < width_; d += LANES)
                store(queries_ + row * width_ + d, load(queries[row].source + d) * scale_);
    }

    // Computes scores in tiles of six queries and sixteen keys. All queries use sixteen keys before the next sixteen.
    void score(int64_t num_tiles, int64_t num_keys) {
        std::fill(scores_, scores_ + QUERIES * num_keys, 0.0f);
        for (int64_t key = 0; key < num_keys; key += COLUMNS)
            for (int64_t tile = 0; tile < num_tiles; tile++)
                multiply_six(queries_ + tile * ROWS * width_, width_, keys_ + key * width_, width_,
                             scores_ + key * QUERIES + tile * ROWS * COLUMNS);
    }

    // Converts a query's scores to contiguous weights, which `gather` divides by their sum.
    void soften(int64_t row, int64_t first, int64_t num_seen, int64_t num_keys) {
        float* scores = scores_ + row * COLUMNS;
        const auto hide = [&](int64_t k) {
            scores[k / COLUMNS * COLUMNS * QUERIES + k % COLUMNS] = -std::numeric_limits<float>::infinity();
        };
        for (int64_t k = 0; k < first; k++) hide(k);
        for (int64_t k = num_seen; k < num_keys; k++) hide(k);
        Floats most[2] = {load(scores), load(scores + 8)};
        for (int64_t key = COLUMNS; key < num_keys; key += COLUMNS)
            for (int half = 0; half < 2; half++) {
                const Floats next = load(scores + key * QUERIES + 8 * half);
                most[half] = next > most[half] ? next : most[half];
            }
        float largest = most[0][0];
        for (int i = 0; i < LANES; i++) largest = std::max(largest, std::max(most[0][i], most[1][i]));
        Floats sums[2] = {};
        for (int64_t key = 0; key < num_keys; key += COLUMNS)
            for (int half = 0; half < 2; half++) {
                const Floats shifted = load(scores + key * QUERIES + 8 * half) - largest;
                const Floats weights = shifted < all(-87.0f) ? Floats{} : exp(shifted);
                store(weights_ + row * padded_keys_ + key + 8 * half, weights);
                sums[half] += weights;
            }
        totals_[row] = sum(sums[0] + sums[1]);
    }

    template <class S>
    void gather(const Query<S>* queries, int64_t count, int64_t num_tiles, int64_t num_keys) {
        for (int64_t d = 0; d < padded_width_; d += COLUMNS) {
            std::fill(mixed_, mixed_ + QUERIES * COLUMNS, 0.0f);
            for (int64_t tile = 0; tile < num_tiles; tile++)
                multiply_six(weights_ + tile * ROWS * padded_keys_, padded_keys_,
                             values_ + d * padded_keys_, num_keys, mixed_ + tile * ROWS * COLUMNS);
            const int64_t width = std::min(COLUMNS, width_ - d);
            for (int64_t row = 0; row < count; row++)
                for (int64_t i = 0; i < width; i += LANES)
                    store(queries[row].out + d + i, load(mixed_ + row * COLUMNS + i) / totals_[row]);
        }
    }

    const int64_t width_, num_keys_;
    const float scale_;
    const int64_t padded_keys_, padded_width_;
    float *keys_, *values_, *queries_, *scores_, *weights_;  // scratch memory of the thread
    float totals_[QUERIES];
    float mixed_[QUERIES * COLUMNS];
};
