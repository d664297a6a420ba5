// Functions that a call for one product shares with a call for all layers. Shape letters: M tokens, K inputs.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "linear.h"

// Whether activations are rounded to bfloat16, as the weights are.
inline bool rounds_to_bfloat16(const Step& step) { return step.linears[0].kind == BFLOAT16 && step.bits == 16; }

// Scratch memory that a calling thread keeps between calls.
struct Workspace {
    std::vector<float> inputs;
    std::vector<int16_t> integers;
    std::vector<float> scale, sum, total;
    struct alignas(64) RoundedInputs {
        BFloat16 values[ROUNDED_WIDTH];
    };
    std::vector<RoundedInputs> rounded;

    void fit(const Step& step, int64_t num_tokens) {
        const Linear& linear = step.linears[0];
        if (step.before != NOTHING) grow(inputs, num_tokens * linear.num_inputs);
        if (rounds_to_bfloat16(step))
            grow(rounded, num_tokens * ((linear.num_inputs + ROUNDED_WIDTH - 1) / ROUNDED_WIDTH));
        if (linear.kind < INT8) return;
        const int64_t num_groups = (linear.num_inputs + linear.group - 1) / linear.group;
        grow(integers, num_tokens * num_groups * linear.group);
        grow(scale, num_tokens * num_groups);
        grow(sum, num_tokens * num_groups);
        grow(total, num_tokens);
    }

  private:
    template <class T>
    void grow(std::vector<T>& values, int64_t size) {
        if ((int64_t)values.size() < size) values.resize(size);
    }
};

// The workspace of the calling thread.
Workspace& thread_workspace();

// Number of weights that each token is multiplied by.
int64_t count_weights(const Step& step);

// Called by every thread of a team. Results are complete when all have returned. The workspace must be large enough.
void multiply_in_team(const Step& step, Workspace& workspace);
