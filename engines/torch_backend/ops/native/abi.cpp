// What a library was made of: its level, the number of its interface, the sizes of its structs.
#include "abi.h"

#include <cstring>

extern "C" const char* vlm_level() { return VLM_LEVEL; }

extern "C" int32_t vlm_abi() { return VLM_ABI; }

// Bytes of a struct; 0 if there is none by that name.
extern "C" int64_t vlm_sizeof(const char* name) {
#define VLM_SIZE(STRUCT) \
    if (std::strcmp(name, #STRUCT) == 0) return sizeof(STRUCT);
    VLM_SIZE(Linear)
    VLM_SIZE(Step)
    VLM_SIZE(Attention)
    VLM_SIZE(Heads)
    VLM_SIZE(Layer)
    VLM_SIZE(Layers)
    VLM_SIZE(DenseAttention)
    return 0;
}
