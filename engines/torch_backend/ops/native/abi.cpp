// The level that a library was compiled for.
extern "C" const char* vlm_level() { return VLM_LEVEL; }
