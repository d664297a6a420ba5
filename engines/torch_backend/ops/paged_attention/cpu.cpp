// Attention of new tokens to the paged keys and values of their sequences, read from the cache without a copy.
//
// Shape letters: N new tokens, S sequences, H query heads, K key/value heads, G = H / K, D head width (a multiple of 8).
// Source: online softmax, Milakov and Gimelshein 2018.
#include <omp.h>

#include "attention.h"
#include "linear.h"
#include "wide_mixer.h"

namespace {

constexpr int64_t CHUNK = 64;  // tokens whose scores are computed before their values are read
constexpr int64_t TOKENS = 4;  // tokens whose keys are multiplied by a query at a time
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 15;

void rotate(float* x, const float* cos, const float* sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

void normalise(float* x, const float* gain, float eps, int64_t width) {
    Floats squares = {};
    for (int64_t d = 0; d < width; d += LANES) squares += load(x + d) * load(x + d);
    const float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (int64_t d = 0; d < width; d += LANES) store(x + d, load(x + d) * scale * load(gain + d));
}

float scale_of(const Attention& step, const Heads& form) {
    return form.scale ? form.scale : 1.0f / std::sqrt((float)step.head_dim);
}

// The first token that the token at an index attends to.
int64_t first_seen(const Heads& form, int64_t index) {
    return form.window ? std::max<int64_t>(0, index + 1 - form.window) : 0;
}

// The cache slot of a sequence's token.
int64_t slot_of(const Attention& step, int64_t sequence, int64_t index) {
    const int32_t* table = step.tables + sequence * step.table_width;
    return table[index / step.block_size] * step.block_size + index % step.block_size;
}

// Normalise and rotate a token's queries and keys in place, and write its keys and values to the cache.
template <class T>
void rotate_and_keep(const Attention& step, const Heads& form, int64_t token, float* qkv, T* keys, T* values) {
    const int64_t width = step.head_dim, heads = step.num_heads, kv_heads = step.num_kv_heads;
    float* row = qkv + token * (heads + 2 * kv_heads) * width;
    for (int64_t h = 0; form.query_gain && h < heads; h++) normalise(row + h * width, form.query_gain, form.eps, width);
    for (int64_t h = heads; form.key_gain && h < heads + kv_heads; h++)
        normalise(row + h * width, form.key_gain, form.eps, width);
    for (int64_t h = 0; form.rotates && h < heads + kv_heads; h++)
        rotate(row + h * width, step.cos + token * width, step.sin + token * width, width);
    const float* key = row + heads * width;
    const float* value = key + kv_heads * width;
    const int64_t place = step.slots[token] * kv_heads * width;
    for (int64_t i = 0; i < kv_heads * width; i++) {
        store(keys + place + i, key[i]);
        store(values + place + i, value[i]);
    }
}

// One key/value head of one sequence, and the G queries that share it.
template <class T>
class Head {
  public:
    Head(const Attention& step, float scale, int64_t sequence, int64_t head, const T* keys, const T* values)
        : step_(step),
          scale_(scale),
          table_(step.tables + sequence * step.table_width),
          keys_(keys + head * step.head_dim),
          values_(values + head * step.head_dim),
          num_queries_(step.num_heads / step.num_kv_heads) {}

    // Attends to the tokens from `begin` on. Shapes: query and out (G, D), scratch at least G * (CHUNK + 2) floats.
    void attend(const float* query, int64_t begin, int64_t length, float* out, float* scratch) {
        float* scores = scratch;
        float* largest = scores + num_queries_ * CHUNK;
        float* total = largest + num_queries_;
        std::fill(largest, largest + num_queries_, -std::numeric_limits<float>::infinity());
        std::fill(total, total + num_queries_, 0.0f);
        std::fill(out, out + num_queries_ * step_.head_dim, 0.0f);
        locate(begin, length, next_);
        for (int64_t start = begin; start < length; start += CHUNK) {
            const int64_t count = std::min(CHUNK, length - start);
            std::copy(next_, next_ + CHUNK, places_);
            locate(start + CHUNK, length, next_);
            for (int64_t t = 0; t < count; t += TOKENS) {
                fetch(t);
                score(query, t, scores);
            }
            for (int64_t g = 0; g < num_queries_; g++)
                soften(scores + g * CHUNK, count, largest[g], total[g], out + g * step_.head_dim);
            gather(scores, count, out);
        }
        for (int64_t g = 0; g < num_queries_; g++)
            for (int64_t d = 0; d < step_.head_dim; d++) out[g * step_.head_dim + d] /= total[g];
    }

  private:
    // Finds the offsets of a chunk's tokens. The last token pads an incomplete chunk.
    void locate(int64_t start, int64_t length, int64_t (&places)[CHUNK]) {
        const int64_t token_width = (int64_t)step_.num_kv_heads * step_.head_dim, size = step_.block_size;
        int64_t block = std::min(start, length - 1) / size, offset = std::min(start, length - 1) % size;
        for (int64_t i = 0; i < CHUNK; i++) {
            places[i] = (table_[block] * size + offset) * token_width;
            if (start + i + 1 < length && ++offset == size) block++, offset = 0;
        }
    }

    // Prefetches values of this chunk and keys of the next. A head's rows are too far apart for the hardware prefetcher.
    void fetch(int64_t t) const {
        for (int64_t i = t; i < t + TOKENS; i++)
            for (int64_t d = 0; d < step_.head_dim; d += LINE_BYTES / (int64_t)sizeof(T)) {
                __builtin_prefetch(values_ + places_[i] + d);
                __builtin_prefetch(keys_ + next_[i] + d);
            }
    }

    void score(const float* query, int64_t t, float* scores) const {
        int64_t g = 0;
        for (; g + 2 <= num_queries_; g += 2) score_queries<2>(query + g * step_.head_dim, t, scores + g * CHUNK);
        for (; g < num_queries_; g++) score_queries<1>(query + g * step_.head_dim, t, scores + g * CHUNK);
    }

    template <int Q>
    void score_queries(const float* query, int64_t t, float* scores) const {
        Floats sums[2 * TOKENS] = {};
        for (int64_t d = 0; d < step_.head_dim; d += LANES) {
            Floats inputs[Q];
            for (int q = 0; q < Q; q++) inputs[q] = load(query + q * step_.head_dim + d);
            for (int i = 0; i < TOKENS; i++) {
                const Floats key = load(keys_ + places_[t + i] + d);
                for (int q = 0; q < Q; q++) sums[q * TOKENS + i] += inputs[q] * key;
            }
        }
        const Floats products = sum_each(sums) * scale_;
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < TOKENS; i++) scores[q * CHUNK + t + i] = products[q * TOKENS + i];
    }

    // Converts scores of a query to weights relative to the largest score so far, and rescales earlier sums to it.
    void soften(float* scores, int64_t count, float& largest, float& total, float* out) {
        for (int64_t t = count; t < CHUNK; t++) scores[t] = -std::numeric_limits<float>::infinity();
        Floats most = load(scores);
        for (int64_t t = LANES; t < CHUNK; t += LANES) {
            const Floats other = load(scores + t);
            most = other > most ? other : most;
        }
        float next = largest;
        for (int i = 0; i < LANES; i++) next = std::max(next, most[i]);
        Floats sums = {};
        for (int64_t t = 0; t < CHUNK; t += LANES) {
            const Floats shifted = load(scores + t) - next;
            const Floats weights = shifted < all(-87.0f) ? Floats{} : exp(shifted);
            store(scores + t, weights);
            sums += weights;
        }
        const float kept = largest == next ? 1.0f : std::exp(largest - next);
        total = total * kept + sum(sums);
        if (kept != 1.0f)
            for (int64_t d = 0; d < step_.head_dim; d++) out[d] *= kept;
        largest = next;
    }

    void gather(const float* scores, int64_t count, float* out) const {
        int64_t g = 0;
        for (; g + 4 <= num_queries_; g += 4) gather_queries<4>(scores + g * CHUNK, count, out + g * step_.head_dim);
        for (; g < num_queries_; g++) gather_queries<1>(scores + g * CHUNK, count, out + g * step_.head_dim);
    }

    template <int Q>
    void gather_queries(const float* scores, int64_t count, float* out) const {
        int64_t d = 0;
        for (; d + 2 * LANES <= step_.head_dim; d += 2 * LANES) gather_places<Q, 2>(scores, count, d, out + d);
        for (; d < step_.head_dim; d += LANES) gather_places<Q, 1>(scores, count, d, out + d);
    }

    template <int Q, int V>
    void gather_places(const float* scores, int64_t count, int64_t d, float* out) const {
        Floats sums[Q][V];
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < V; v++) sums[q][v] = load(out + q * step_.head_dim + v * LANES);
        for (int64_t t = 0; t < count; t++) {
            const T* source = values_ + places_[t] + d;
            Floats value[V];
            for (int v = 0; v < V; v++) value[v] = load(source + v * LANES);
            for (int q = 0; q < Q; q++)
                for (int v = 0; v < V; v++) sums[q][v] += value[v] * scores[q * CHUNK + t];
        }
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < V; v++) store(out + q * step_.head_dim + v * LANES, sums[q][v]);
    }

    const Attention& step_;
    const float scale_;
    const int32_t* table_;
    const T* keys_;
    const T* values_;
    int64_t num_queries_;
    int64_t places_[CHUNK], next_[CHUNK];
};

// Computes some queries of a sequence with several new tokens. A token's queries of one key/value head are contiguous.
template <class T>
void attend_run(const Attention& step, const Heads& form, int64_t sequence, int64_t head, Share rows, const T* keys,
                const T* values, const float* qkv, float* out) {
    const int64_t width = step.head_dim, heads = step.num_heads, kv_heads = step.num_kv_heads;
    const int64_t group = heads / kv_heads, token_width = kv_heads * width, start = step.row_offsets[sequence];
    const int64_t num_computed = step.lengths[sequence] - (step.row_offsets[sequence + 1] - start);
    const int64_t begin = first_seen(form, num_computed + rows.start / group) / Mixer::KEYS * Mixer::KEYS;
    const int64_t num_keys = num_computed + (rows.stop + group - 1) / group - begin;
    with_mixer<T>(width, num_keys, scale_of(step, form), [&](auto& mixer) {
        constexpr int64_t size = std::decay_t<decltype(mixer)>::QUERIES;
        mixer.lay_out(keys + head * width, values + head * width,
                      [&](int64_t key) { return slot_of(step, sequence, begin + key) * token_width; });
        for (int64_t first = rows.start; first < rows.stop; first += size) {
            const int64_t count = std::min(size, rows.stop - first);
            Query<float> queries[size];
            for (int64_t i = 0; i < count; i++) {
                const int64_t token = (first + i) / group, place = head * group + (first + i) % group;
                queries[i] = {qkv + ((start + token) * (heads + 2 * kv_heads) + place) * width,
                              num_computed + token + 1 - begin, out + ((start + token) * heads + place) * width,
                              std::max<int64_t>(0, first_seen(form, num_computed + token) - begin)};
            }
            mixer.attend(queries, count);
        }
    });
}

template <class T>
void attend(const Attention& step, const Heads& form, T* keys, T* values, float* qkv, float* out) {
    const int64_t kv_heads = step.num_kv_heads, group = step.num_heads / kv_heads, width = step.head_dim;
    const int team = omp_get_num_threads(), num_parts = kv_heads % team ? team : 1;
    const int64_t num_run_items = (step.num_sequences - step.num_decodes) * kv_heads * num_parts;
    static thread_local std::vector<float> scratch;
    scratch.resize(group * (CHUNK + 2));
#pragma omp for schedule(static)
    for (int64_t token = 0; token < step.num_tokens; token++) rotate_and_keep(step, form, token, qkv, keys, values);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_run_items + step.num_decodes * kv_heads; item++) {
        if (item < num_run_items) {
            const int64_t sequence = step.num_decodes + item / num_parts / kv_heads, head = item / num_parts % kv_heads;
            const int64_t num_new = step.row_offsets[sequence + 1] - step.row_offsets[sequence];
            const Share rows = share_of(num_new * group, Mixer::QUERIES, item % num_parts, num_parts);
            if (rows.start < rows.stop) attend_run(step, form, sequence, head, rows, keys, values, qkv, out);
            continue;
        }
        const int64_t sequence = (item - num_run_items) / kv_heads, head = (item - num_run_items) % kv_heads;
        const float* query = qkv + (sequence * (step.num_heads + 2 * kv_heads) + head * group) * width;
        Head<T>(step, scale_of(step, form), sequence, head, keys, values)
            .attend(query, first_seen(form, step.lengths[sequence] - 1), step.lengths[sequence],
                    out + (sequence * step.num_heads + head * group) * width, scratch.data());
    }
}

}  // namespace

int64_t count_products(const Attention& step) {
    int64_t num_tokens = step.num_tokens;
    for (int64_t s = 0; s < step.num_sequences; s++)
        num_tokens += (step.row_offsets[s + 1] - step.row_offsets[s]) * step.lengths[s];
    return num_tokens * step.num_heads * step.head_dim;
}

void attend_in_team(const Attention& step, const Heads& heads, void* keys, void* values, float* qkv, float* out) {
    switch (step.kind) {
        case FLOAT32: return attend(step, heads, (float*)keys, (float*)values, qkv, out);
        case BFLOAT16: return attend(step, heads, (BFloat16*)keys, (BFloat16*)values, qkv, out);
        default: return attend(step, heads, (Float16*)keys, (Float16*)values, qkv, out);
    }
}

extern "C" void vlm_attention(const Attention* step, const Heads* heads, void* keys, void* values, float* qkv,
                              float* out, int32_t num_threads) {
#pragma omp parallel num_threads(count_products(*step) < MIN_PARALLEL_PRODUCTS ? 1 : num_threads)
    attend_in_team(*step, *heads, keys, values, qkv, out);
}
