// Products with linear layers, by format of the weights. Shape letters: M tokens, K inputs, N outputs.
#pragma once

#include "abi.h"
#include "vectors.h"

// Quantized activations: integers (G, M, group), scale and sum of the integers (G, M), sum of the activations (M,).
struct Activations {
    int64_t num_tokens, num_groups, group;
    int bits;  // 8 or 16
    void* integers;
    float *scale, *sum, *total;
};

constexpr int64_t TILE = 16;  // outputs that are computed together by the integer products
constexpr int64_t MAX_GROUP = 64;  // maximum number of inputs that share a scale; a multiple of LANES

// The destination of results, y[m * stride + n], which are stored or added.
struct Target {
    float* y;
    int64_t stride;
    bool adds;

    void put(int64_t m, int64_t n, float value) const {
        float& place = y[m * stride + n];
        place = adds ? place + value : value;
    }
};

// Computes outputs start..stop for floating-point weights. Called by every thread of a team. Shapes: x (M, K).
void multiply_floats(const Linear& linear, int64_t num_tokens, const float* x, Target target, int64_t start,
                     int64_t stop);

constexpr int64_t ROUNDED_WIDTH = 32;  // contiguous inputs of a token

// Layout of tokens rounded to bfloat16: blocks of up to six tokens, interleaved by ROUNDED_WIDTH inputs.
struct RoundedTokens {
    int64_t num_blocks, width;

    RoundedTokens(int64_t num_tokens, int64_t num_inputs)
        : num_blocks((num_tokens + 5) / 6), width((num_inputs + ROUNDED_WIDTH - 1) / ROUNDED_WIDTH * ROUNDED_WIDTH) {
        least_ = num_tokens / num_blocks;
        num_larger_ = num_tokens % num_blocks;
    }

    int64_t size(int64_t block) const { return least_ + (block < num_larger_); }
    int64_t first(int64_t block) const { return block * least_ + (block < num_larger_ ? block : num_larger_); }
    int64_t block_of(int64_t token) const {
        const int64_t in_larger = num_larger_ * (least_ + 1);
        return token < in_larger ? token / (least_ + 1) : num_larger_ + (token - in_larger) / least_;
    }
    // Offset of a token's inputs from k (a multiple of ROUNDED_WIDTH) on. `within` is the token's index in its block.
    int64_t place(int64_t block, int64_t within, int64_t k) const {
        return first(block) * width + k * size(block) + within * ROUNDED_WIDTH;
    }

  private:
    int64_t least_, num_larger_;
};

// Rounds one token's inputs to bfloat16, padded with zeros. Shapes: x (K,).
void round_token(const float* x, int64_t num_inputs, const RoundedTokens& tokens, int64_t token, BFloat16* rounded);

// `multiply_floats` with bfloat16 weights and tokens rounded to bfloat16.
void multiply_rounded(const Linear& linear, int64_t num_tokens, const BFloat16* x, Target target, int64_t start,
                      int64_t stop);

// `multiply_floats` with integer weights and activations; start is a multiple of TILE.
void multiply_integers(const Linear& linear, const Activations& x, Target target, int64_t start, int64_t stop);

// Quantizes the inputs of one token, and stores them in q. Shapes: x (K,).
void quantize_token(const float* x, int64_t num_inputs, const Activations& q, int64_t token);
