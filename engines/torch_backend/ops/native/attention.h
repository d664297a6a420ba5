// Attention of a step. Shape letters: N new tokens, S sequences, D head width.
#pragma once

#include "abi.h"

// Normalise and rotate the queries and keys of qkv (N, (H + 2 K) * D) in place, write keys and values to the cache, and
// compute the attention of all tokens: out (N, H * D). Called by every thread of a team; ends with a barrier.
void attend_in_team(const Attention& step, const Heads& heads, void* keys, void* values, float* qkv, float* out);

// Number of multiplications in a layer's attention.
int64_t count_products(const Attention& step);
