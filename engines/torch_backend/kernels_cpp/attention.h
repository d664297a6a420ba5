// A step's attention as Python describes it. Shape letters: N new tokens, S sequences with one new token, D head width.
#pragma once

#include <cstdint>

// A sequence with several new tokens, which see those computed before, their own predecessors and themselves. Mirrored
// by the columns of `runs` in attention.py.
struct Run {
    int64_t start, num_new, num_computed;  // start: the place of its first new token in the step
};

// What all layers of a step share. Mirrored by `AttentionStruct` in library.py.
struct Attention {
    int32_t kind;  // of stored keys and values: FLOAT32, BFLOAT16 or FLOAT16
    int32_t num_heads, num_kv_heads, head_dim;
    int64_t num_tokens, num_decodes, block_size, table_width;
    const float* cos;  // (N, D)
    const float* sin;  // (N, D), signed as in rotary.py
    const int64_t* slots;    // (N,)
    const int64_t* table;    // (S, table_width), blocks
    const int64_t* lengths;  // (S,), tokens of the context
    int64_t num_runs, run_table_width;
    const Run* runs;           // of all tokens after the first S
    const int64_t* run_table;  // (num_runs, run_table_width), blocks
};

// Rotate the queries and keys of qkv (N, (H + 2 K) * D) in place, keep keys and values, and attend all tokens to their
// sequences: out (N, H * D). Called by every thread of a team, which has met when it returns.
void attend_in_team(const Attention& step, void* keys, void* values, float* qkv, float* out);

// Products of numbers in a layer's attention.
int64_t count_products(const Attention& step);
