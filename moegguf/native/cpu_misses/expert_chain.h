// expert_chain.h: what a layer computes between its input and the product with its down matrices: read from
// llama.cpp's graph, and built again for single experts. Knows no store.
#pragma once

#include "layout.h"

#include <functional>

namespace moegguf {

// Values of the model that each expert has its own row of: a bias for each element, or one scale.
struct ExpertRows {
    const ggml_tensor * tensor = nullptr; // whose values these are; nullptr: none
    int64_t n = 0;                        // of one expert
    std::vector<float> values;            // [n_expert][n], of the host

    const float * of(int expert) const { return values.data() + expert * n; }
};

// One tensor of the graph, of which each choice of an expert is a row.
struct ChainStep {
    ggml_op op = GGML_OP_NONE;        // MUL_MAT_ID: a product of the layer's input
    moegguf_kind kind = MOEGGUF_GATE; // of the matrices of a product
    int source[2] = {-1, -1};         // steps before
    int64_t ne0 = 0;                  // of a row
    size_t offset = 0;                // of a view, in bytes of its source's row
    int32_t op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)] = {};
    ExpertRows rows; // the second source of ADD_ID, and of MUL where it has scales

    bool operator==(const ChainStep & other) const;
};

// The last step is what is multiplied with the down matrices.
struct ExpertChain {
    int il = -1;
    bool weights_input = false; // each choice's input is multiplied with its weight
    std::vector<ChainStep> steps;

    size_t n_nodes() const;    // of a graph of one expert, at most
    size_t row_floats() const; // that one choice takes there, without its input and the product with down
    bool operator==(const ExpertChain & other) const;
    void read_rows(); // from where the model has them
};

// A node of slot ids carries its layer's chain. nullptr: not known, the device has to compute every expert.
const ExpertChain * chain_of(const ggml_tensor * ids);
void set_chain(ggml_tensor * ids, const ExpertChain * chain);
bool multiplies_down(const ggml_tensor * t, int il); // with a layer's down matrices

// Reads the chains of those layers of a whole graph that are served, by their tokens. `why` the CPU cannot compute the
// same; empty: it can.
using Serves = std::function<bool(int il, int n_tokens)>;
using FoundChain = std::function<void(ggml_tensor * ids, ExpertChain chain, const std::string & why)>;
void read_chains(const ggml_cgraph & graph, const Layout & layout, const Serves & serves, const FoundChain & found);

// The product of an expert's down matrix with what its chain makes of x, [n_embd, n_rows]. `w`: the expert's matrices,
// by kind; those of others NULL.
ggml_tensor * build_chain(ggml_context * ctx, const ExpertChain & chain, int expert, ggml_tensor * const * w,
                          ggml_tensor * x);

} // namespace moegguf
