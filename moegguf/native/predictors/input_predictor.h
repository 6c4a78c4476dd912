// input_predictor.h: what predictors from the router's input share.
// Arithmetic only: no threads, no locks.
#pragma once

#include "predictors/predictor.h"

namespace moegguf {

// Keeps the last router input of a sequence that decodes, rounded. Prompts are left out: they use most experts anyway.
class InputPredictor : public Predictor {
  public:
    void on_token(int) override { source_ = -1; }

    void on_routing(const Observation & seen) override {
        const bool known = seen.input && seen.n_embd == n_embd_ && seen.n_tokens == 1;
        source_ = known && input_.round(seen.input, n_embd_) ? seen.il : -1;
    }

  protected:
    InputPredictor(const Layout & layout, const Arrays & arrays) : layout_(layout), n_embd_(arrays.integer("n_embd")) {
        if (n_embd_ <= 0) {
            throw Error(MOEGGUF_INVALID, "a router's input has values, not " + std::to_string(n_embd_));
        }
    }

    int source() const { return source_; } // the layer of the input kept, -1: there is none
    const RoundedVector & input() const { return input_; }

    const Layout & layout_;
    const int n_embd_;

  private:
    RoundedVector input_;
    int source_ = -1;
};

} // namespace moegguf
