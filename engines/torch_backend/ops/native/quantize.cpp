// Quantizes activations to integers of 8 or 16 bits, with a scale for each group of inputs.
#include <algorithm>
#include <cmath>

#include "linear.h"
#include "vectors.h"

namespace {

// Rounds inputs to integers of `bits`. Returns: their sum. Shapes: x and q (count,), a multiple of LANES.
int32_t round_inputs(const float* x, int64_t count, float inverse, int bits, void* q) {
    using Words = int16_t __attribute__((vector_size(16)));
    using Bytes = int8_t __attribute__((vector_size(8)));
    Integers total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = load(x + i) * inverse;
        const Integers integers = __builtin_convertvector(value + (value < 0.0f ? all(-0.5f) : all(0.5f)), Integers);
        total += integers;
        if (bits == 16) {
            const Words words = __builtin_convertvector(integers, Words);
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t exchanged = (lane & 3) == 1 ? lane + 1 : (lane & 3) == 2 ? lane - 1 : lane;
                ((int16_t*)q)[i + exchanged] = words[lane];
            }
        } else {
            const Bytes bytes = __builtin_convertvector(integers, Bytes);
            std::memcpy((int8_t*)q + i, &bytes, sizeof bytes);
        }
    }
    int32_t sum = 0;
    for (int64_t lane = 0; lane < LANES; lane++) sum += total[lane];
    return sum;
}

// The largest absolute value; NaN if any input is NaN, because the comparisons below propagate NaN.
float largest_size(const float* x, int64_t count) {
    Floats most = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = load(x + i), size = value < 0.0f ? -value : value;
        most = (size > most) | (size != size) ? size : most;
    }
    float largest = 0;
    for (int64_t lane = 0; lane < LANES; lane++)
        if (most[lane] > largest || most[lane] != most[lane]) largest = most[lane];
    return largest;
}

}  // namespace

void quantize_token(const float* x, int64_t num_inputs, const Activations& q, int64_t token) {
    const int64_t group_bytes = q.group * q.bits / 8;
    const float steps = q.bits == 8 ? 127.0f : 32767.0f;
    float total = 0, padded[MAX_GROUP] = {};
    for (int64_t g = 0, place = token; g < q.num_groups; g++, x += q.group, place += q.num_tokens) {
        const float* inputs = x;
        if (const int64_t left = num_inputs - g * q.group; left < q.group) {
            std::copy(x, x + left, padded);
            inputs = padded;
        }
        char* integers = (char*)q.integers + place * group_bytes;
        const float largest = largest_size(inputs, q.group);
        if (!std::isfinite(largest)) {  // makes the products NaN, as with float weights
            q.scale[place] = q.sum[place] = total = NAN;
            std::memset(integers, 0, group_bytes);
            continue;
        }
        q.scale[place] = largest / steps;
        q.sum[place] = (float)round_inputs(inputs, q.group, largest > 0 ? steps / largest : 0.0f, q.bits, integers);
        total += q.sum[place] * q.scale[place];
    }
    q.total[token] = total;
}
