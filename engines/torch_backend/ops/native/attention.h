// A step's attention as Python describes it. Shape letters: N new tokens, S sequences, D head width.
#pragma once

#include "abi.h"

// Normalise and rotate the queries and keys of qkv (N, (H + 2 K) * D) in place, keep keys and values, and attend all
// tokens to their sequences: out (N, H * D). Called by every thread of a team, which has met when it returns.
void attend_in_team(const Attention& step, const Heads& heads, void* keys, void* values, float* qkv, float* out);

// Products of numbers in a layer's attention.
int64_t count_products(const Attention& step);
