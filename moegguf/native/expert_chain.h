// expert_chain.h: what a layer computes between its input and the product with its down matrices: read from
// llama.cpp's graph, and built again for single experts.
#pragma once

#include "layout.h"

namespace moegguf {

class Store;

// Lies in the op_params of a layer's node of slot ids.
struct ExpertChain {
    enum Kind : int32_t { unknown, gated, plain };

    int32_t kind = unknown;
    int32_t weights_input = 0; // each choice's input is multiplied with its weight
    int32_t activation[4] = {};
};

// The node of slot ids of a store's layer, whose chain is not known yet.
void mark_chain(ggml_tensor * ids, Store & store);
ExpertChain chain_of(const ggml_tensor * ids);
bool multiplies_down(const ggml_tensor * t, int il); // with a layer's down matrices

// Reads the chain of every layer of a whole graph, where misses are to be computed, and tells the store.
void read_chains(const ggml_cgraph & graph);

// down(activation(gate x, up x)) of [n_embd, n_rows]. `w`: the expert's matrices, by kind; those of others NULL.
ggml_tensor * build_chain(ggml_context * ctx, const ExpertChain & chain, ggml_tensor * const * w, ggml_tensor * x);

} // namespace moegguf
