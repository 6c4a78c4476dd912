// predictor.h: the interface of a predictor. A predictor estimates how probable the experts of later layers are, from
// the pass's tokens and from the layers that have been observed so far. Predictors contain only arithmetic, and use
// neither threads nor locks.
//
// To add a predictor, write a class in this folder, with a `const PredictorType NAME_predictor`. Declare this constant
// below and list it in predictors.cpp.
#pragma once

#include "layout.h"
#include "predictors/network.h"

#include <map>
#include <memory>
#include <string>

namespace moegguf {

// The observation of one sequence at one layer of a pass.
struct Observation {
    int il = -1;
    int n_tokens = 0;
    const int32_t * expert_ids = nullptr; // [n_expert_used] experts that the sequence's last token uses
    int n_expert_used = 0;
    // [n_embd] the router's input for the sequence's token; NULL: the sequence has several tokens in this pass, or no
    // input is available.
    const float * input = nullptr;
    int n_embd = 0;
    // Scores of the routers of the next n_scored layers with experts, [n_scored][n_expert of the layer], for the
    // router's input at this layer. They lack the routers' biases. NULL: the sequence has several tokens in this pass,
    // or no scores are available.
    const float * scores = nullptr;
    int n_scored = 0;
};

// A predictor object follows the passes of one sequence, or of several sequences one after another. All calls come from
// one thread at a time.
class Predictor {
  public:
    virtual ~Predictor() = default;

    virtual void on_sequence() {} // called when the next passes belong to another sequence

    // Called when a pass begins. `tokens`: the sequence's last n tokens in the pass; n = 0: the tokens are not
    // known.
    virtual void on_tokens(const int32_t * tokens, int n) { on_token(n == 1 ? tokens[0] : -1); }
    // Called when a pass begins. `token`: the sequence's only token in the pass; -1: the sequence has several
    // tokens, or its token is not known.
    virtual void on_token(int token) { (void)token; }

    // Receives an observation. Its arrays stay valid until the next call to on_tokens or on_routing.
    virtual void on_routing(const Observation & seen) { (void)seen; }

    // Writes the probability that each expert [n_expert] of layer il is used. `distance` counts layers with experts
    // from the last observed layer to this one; before any observation in the pass, the first layer is at distance 1.
    // The order of the probabilities matters more than their scale. Returns false if there is no prediction; the array
    // is then undefined.
    virtual bool predict(int il, int distance, float * probabilities) = 0;
};

// The trained arrays of a predictor. They belong to the caller of the C ABI, and are only read.
class Arrays {
  public:
    explicit Arrays(const moegguf_predictor & given); // Throws Error(INVALID).

    // The following functions throw Error(INVALID) if there is no such array, or if the array is empty or has a
    // different type or size. n: number of elements; 0: any number.
    const float * floats(const std::string & name, size_t n) const {
        return (const float *)find(name, MOEGGUF_FLOAT32, n);
    }
    const int8_t * bytes(const std::string & name, size_t n) const {
        return (const int8_t *)find(name, MOEGGUF_INT8, n);
    }
    const uint16_t * counts(const std::string & name, size_t n) const {
        return (const uint16_t *)find(name, MOEGGUF_UINT16, n);
    }
    const int32_t * integers(const std::string & name, size_t n) const {
        return (const int32_t *)find(name, MOEGGUF_INT32, n);
    }
    int integer(const std::string & name) const { return *integers(name, 1); }
    const float * optional_floats(const std::string & name, size_t n) const { // nullptr: the array is missing or empty
        return size(name) ? floats(name, n) : nullptr;
    }
    // Returns the matrix of the arrays NAME.weights, NAME.scale and, if there is one, NAME.bias.
    ByteMatrix matrix(const std::string & name, int n_rows, int n_cols) const {
        return {bytes(name + ".weights", size_t(n_rows) * n_cols), floats(name + ".scale", n_rows),
                optional_floats(name + ".bias", n_rows), n_rows, n_cols};
    }
    size_t size(const std::string & name) const; // number of elements; 0: no such array

  private:
    const void * find(const std::string & name, int type, size_t n) const;

    std::map<std::string, moegguf_array> arrays_;
};

// Returns the affinities between experts of neighbouring layers, [n_moe_layers - 1][n_expert_max][n_expert_max].
// nullptr: only one layer has experts.
inline const float * affinity_of(const Layout & layout, const Arrays & arrays) {
    const size_t n = size_t(layout.n_moe_layers - 1) * layout.n_expert_max * layout.n_expert_max;
    return n > 0 ? arrays.floats("affinity", n) : nullptr;
}

template <typename T>
std::unique_ptr<Predictor> make_predictor(const Layout & layout, const Arrays & arrays) {
    return std::make_unique<T>(layout, arrays);
}

struct PredictorType {
    const char * name;
    bool needs_inputs;   // true: the predictor needs router inputs
    bool sees_next_pass; // true: after the last layer, the predictor also predicts the next pass
    std::unique_ptr<Predictor> (*make)(const Layout & layout, const Arrays & arrays);
    bool takes_scores = false; // true: the predictor can use scores of later layers' routers in place of inputs
};

extern const PredictorType previous_token_predictor, token_table_predictor, affinity_predictor,
    eamc_predictor;                                                             // defined in counts.cpp
extern const PredictorType skip_predictor, mlp_predictor, expert_mlp_predictor; // defined in networks.cpp
extern const PredictorType routing_path_predictor;                              // defined in routing_path.cpp

// Returns the predictor type with this name. Throws Error(INVALID) if there is none.
const PredictorType & predictor_type(const char * name);

} // namespace moegguf
