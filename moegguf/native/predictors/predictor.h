// predictor.h: the interface of a predictor. It computes probabilities of the experts of later layers from the layers
// of a pass that were observed so far. Arithmetic only: no threads, no locks.
//
// A new predictor is a class in this folder, with a `const PredictorType NAME_predictor`, which is declared below and
// listed in predictors.cpp.
#pragma once

#include "layout.h"
#include "predictors/network.h"

#include <cmath>
#include <map>
#include <memory>
#include <string>

namespace moegguf {

// The observation of one sequence at one layer of a pass.
struct Observation {
    int il = -1;
    int n_tokens = 0;
    const int32_t * expert_ids = nullptr; // [n_expert_used] experts of the sequence's last token
    int n_expert_used = 0;
    const float * input = nullptr; // [n_embd] input of the router; NULL: several tokens, or needs_inputs is false
    int n_embd = 0;
};

// One object follows the passes of one sequence, or of sequences one after another. All calls come from one thread at a
// time.
class Predictor {
  public:
    virtual ~Predictor() = default;

    virtual void on_sequence() {} // the object follows another sequence from now on

    // A pass begins. The tokens are its last ones; none: they are not known.
    virtual void on_tokens(const int32_t * tokens, int n) { on_token(n == 1 ? tokens[0] : -1); }
    virtual void on_token(int token) { (void)token; } // -1: several tokens, or an unknown one

    // Receives an observation. Its arrays stay valid until the next call of on_tokens or on_routing.
    virtual void on_routing(const Observation & seen) { (void)seen; }

    // Writes the probability of each expert [n_expert] of layer il. The layer comes `distance` layers with experts
    // after the last observed one; before any observation of the pass, the first layer is at distance 1. The order of
    // the probabilities matters more than their scale. Returns false if there is no prediction; the array is then
    // undefined.
    virtual bool predict(int il, int distance, float * probabilities) = 0;
};

// A predictor's trained arrays, in the memory of the ABI's caller. They are never written.
class Arrays {
  public:
    explicit Arrays(const moegguf_predictor & given); // Throws Error(INVALID).

    // The next functions throw Error(INVALID) when there is no such array, or it has another type or size. n 0: any
    // size.
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
    const float * optional_floats(const std::string & name, size_t n) const { // nullptr: there are none
        return size(name) ? floats(name, n) : nullptr;
    }
    ByteMatrix matrix(const std::string & name, int n_rows, int n_cols) const { // NAME.weights, NAME.scale, NAME.bias
        return {bytes(name + ".weights", size_t(n_rows) * n_cols), floats(name + ".scale", n_rows),
                optional_floats(name + ".bias", n_rows), n_rows, n_cols};
    }
    size_t size(const std::string & name) const; // 0: there is none

  private:
    const void * find(const std::string & name, int type, size_t n) const;

    std::map<std::string, moegguf_array> arrays_;
};

// Returns the affinity of experts of neighbouring layers, [n_moe_layers - 1][n_expert_max][n_expert_max]; nullptr:
// there is one layer.
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
    bool needs_inputs;   // the predictor computes with router inputs
    bool sees_next_pass; // the last layer's observation predicts the next pass, too
    std::unique_ptr<Predictor> (*make)(const Layout & layout, const Arrays & arrays);
};

extern const PredictorType previous_token_predictor, token_table_predictor, affinity_predictor,
    eamc_predictor;                                                             // counts.cpp
extern const PredictorType skip_predictor, mlp_predictor, expert_mlp_predictor; // networks.cpp
extern const PredictorType routing_path_predictor;                              // routing_path.cpp

// Returns the type with this name. Throws Error(INVALID) when there is none.
const PredictorType & predictor_type(const char * name);

} // namespace moegguf
