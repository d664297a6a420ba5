// What Python and C++ share: numbers, and structs that library.py reads from this file. A line has fields of one type.
//
// Shape letters: M or N tokens, K inputs, N outputs, S sequences, H query heads, K key/value heads,
// D head width.
#pragma once

#include <cstdint>

enum Kind : int32_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT4_BFLOAT16_SCALES };

enum Before : int32_t { NOTHING, RMS_NORM, SILU_GATE, QUICK_GELU, GELU };

// A linear map.
struct Linear {
    int32_t kind;
    int32_t group;        // inputs that share a scale; integers only
    int64_t num_outputs;  // N
    int64_t num_inputs;   // K
    const void* weights;
    const float* scale;  // (N,), int8 only
    const float* bias;   // (N,) or null
};

// One call's inputs.
struct Step {
    const Linear* linears;  // of one kind and width, whose outputs lie side by side in y
    int32_t count;
    int32_t before;
    int32_t bits;  // of activations: 8 or 16 beside integer weights; beside BFLOAT16 16, rounded alike, or 32
    float eps;
    const float* gain;  // (K,), of the norm
    int64_t num_tokens;
    const float* x;  // (M, K), or (M, 2 K): what is gated, then what is multiplied with it
    float* y;        // (M, sum of N)
    int32_t adds;    // to what is in y already
    int32_t num_threads;
};

// What all layers of a step share: StepInputs of step.py, and how keys and values are stored.
struct Attention {
    int32_t kind;  // of stored keys and values: FLOAT32, BFLOAT16 or FLOAT16
    int32_t num_heads, num_kv_heads, head_dim;
    int64_t num_tokens, num_sequences, num_decodes, block_size, table_width;
    const float* cos;  // (N, D)
    const float* sin;  // (N, D), signed as in rotary.py
    const int64_t* slots;        // (N,)
    const int32_t* tables;       // (S, table_width), blocks
    const int64_t* row_offsets;  // (S + 1,), of new tokens; the first num_decodes sequences have one each
    const int64_t* lengths;      // (S,), tokens of the context
};

// How the heads of a layer attend.
struct Heads {
    const float* query_gain;  // (D,), of the norm of each head before rotation; null without
    const float* key_gain;
    int64_t window;  // tokens that a token attends to, itself included; 0: all before it
    float eps;       // of the norms
    float scale;     // of scores; 0: one over the root of D
    int32_t rotates;
};

// A layer's products, what is kept of its keys and values, and how its heads meet them.
struct Layer {
    const Step *qkv, *out, *gate_up, *down;
    void *keys, *values;
    Heads heads;
};

// What goes through layers one after another.
struct Layers {
    const Layer* layers;
    int64_t count;
    const Attention* attention;
    float* x;  // (N, C), the stream, replaced by what it has become
    float* qkv;     // room: (N, (H + 2 K) * D)
    float* mixed;   // room: (N, H * D)
    float* gated;   // room: (N, 2 I)
    int64_t num_threads;
};

// Attention without a mask of sequences packed one after another. A token's heads lie side by side; strides are in numbers.
struct DenseAttention {
    int32_t kind;  // of all numbers: FLOAT32 or BFLOAT16
    int32_t num_heads, head_dim, num_threads;
    int64_t num_sequences;
    const int64_t* query_offsets;  // (num_sequences + 1,), in tokens
    const int64_t* key_offsets;
    int64_t query_stride, key_stride;  // from token to token; of keys and values
    const void* queries;
    const void* keys;
    const void* values;
    void* out;  // (N, H * D)
};
