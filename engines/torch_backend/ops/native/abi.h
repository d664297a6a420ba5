// Enums and structs that Python and C++ share. library.py parses the structs: each line declares fields of one type.
//
// Shape letters: M or N tokens, K inputs, N outputs, S sequences, H query heads, K key/value heads, D head width.
#pragma once

#include <cstdint>

enum Kind : int32_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT4_BFLOAT16_SCALES };

enum Before : int32_t { NOTHING, RMS_NORM, SILU_GATE, QUICK_GELU, GELU };

// A linear layer.
struct Linear {
    int32_t kind;
    int32_t group;        // inputs that share a scale; integers only
    int64_t num_outputs;  // N
    int64_t num_inputs;   // K
    const void* weights;
    const float* scale;  // (N,), int8 only
    const float* bias;   // (N,) or null
};

// The arguments of one product.
struct Step {
    const Linear* linears;  // of one kind and width; their outputs are concatenated in y
    int32_t count;
    int32_t before;
    int32_t bits;  // of activations: 8 or 16 for integer weights; 16 (rounded to bfloat16) or 32 for BFLOAT16 weights
    float eps;
    const float* gain;  // (K,), gain of the norm
    int64_t num_tokens;
    const float* x;  // (M, K), or (M, 2 K): gate inputs, then the values that are multiplied by the gate
    float* y;        // (M, sum of N)
    int32_t adds;    // whether the product is added to y
    int32_t num_threads;
};

// The arguments that all layers of a step share: StepInputs of step.py, and the layout of the KV cache.
struct Attention {
    int32_t kind;  // type of stored keys and values: FLOAT32, BFLOAT16 or FLOAT16
    int32_t num_heads, num_kv_heads, head_dim;
    int64_t num_tokens, num_sequences, num_decodes, block_size, table_width;
    const float* cos;  // (N, D)
    const float* sin;  // (N, D), signed as in rotary.py
    const int64_t* slots;        // (N,)
    const int32_t* tables;       // (S, table_width), blocks
    const int64_t* row_offsets;  // (S + 1,), in new tokens; the first num_decodes sequences have one new token
    const int64_t* lengths;      // (S,), tokens of the context
};

// The attention parameters of a layer.
struct Heads {
    const float* query_gain;  // (D,), gain of the norm of each head before rotation; null: no norm
    const float* key_gain;
    int64_t window;  // tokens that a token attends to, itself included; 0: no window
    float eps;       // of the norms
    float scale;     // of scores; 0: 1 / sqrt(D)
    int32_t rotates;
};

// A layer's products, its KV cache and its attention parameters.
struct Layer {
    const Step *qkv, *out, *gate_up, *down;
    void *keys, *values;
    Heads heads;
};

// The arguments of consecutive layers.
struct Layers {
    const Layer* layers;
    int64_t count;
    const Attention* attention;
    float* x;  // (N, C), the residual stream, changed in place
    float* qkv;     // scratch: (N, (H + 2 K) * D)
    float* mixed;   // scratch: (N, H * D)
    float* gated;   // scratch: (N, 2 I)
    int64_t num_threads;
};

// Attention without a mask over packed sequences. A token's heads are contiguous; strides are in elements.
struct DenseAttention {
    int32_t kind;  // type of all tensors: FLOAT32 or BFLOAT16
    int32_t num_heads, head_dim, num_threads;
    int64_t num_sequences;
    const int64_t* query_offsets;  // (num_sequences + 1,), in tokens
    const int64_t* key_offsets;
    int64_t query_stride, key_stride;  // between tokens; key_stride also of values
    const void* queries;
    const void* keys;
    const void* values;
    void* out;  // (N, H * D)
};
