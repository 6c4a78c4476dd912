// router_scores.h: computes scores for a prediction inside the graph. The graph of a layer on a device can also
// multiply the router's input by the routers of the next layers. The results reach the host in one copy with the ids of
// the chosen experts. Prediction then needs neither a stop nor a copy of its own.
//
// This file only adds nodes to graphs. hook.cpp reads the scores, and the predictor `skip` uses them
// (predictors/networks.cpp). The thread that builds graphs calls the functions, except forget(), which the thread that
// loads a model calls.
#pragma once

#include "layout.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <vector>

namespace moegguf {

// Largest number of layers ahead for which a graph computes scores. With a larger window, `skip` gets router inputs.
constexpr int most_scored_layers = 4;

class RouterScores {
  public:
    explicit RouterScores(const Layout & layout) : layout_(layout), routers_(layout.layers.size(), nullptr) {}

    // Keeps the router of a layer, for graphs that are built later. nullptr: the layer's router is not one matrix.
    void keep(int il, ggml_tensor * router) { routers_[il] = router; }
    void forget() { routers_.assign(routers_.size(), nullptr); } // drops all routers, because their model may be freed

    // Returns the number of layers after layer il for which its graph computes scores: `window`, or fewer near the end
    // of the model. Returns 0 if a router is unknown, has an unsuitable shape, or is not in the device's memory.
    int n_layers(int il, const ggml_tensor * input, int window, ggml_backend_dev_t device) const;

    // Returns a node with the expert ids, which is a view of a larger tensor of 32-bit values. The tensor begins with
    // the ids [n_tokens][n_expert_used]. The scores [n_tokens][n_expert] of each of the next n routers follow. Returns
    // nullptr if the device cannot compute the nodes.
    ggml_tensor * join(ggml_context * ctx, ggml_tensor * expert_ids, ggml_tensor * input, int il, int n,
                       ggml_backend_dev_t device) const;

  private:
    const Layout & layout_;
    std::vector<ggml_tensor *> routers_; // [n_layer] nullptr: not known
};

} // namespace moegguf
