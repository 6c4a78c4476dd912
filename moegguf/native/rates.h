// rates.h: when an expert will be used again, from fading averages of its use. Arithmetic only: no threads, no locks.
#pragma once

#include "layout.h"

namespace moegguf {

// What the policy "next-use" computes from gates alone (moegguf/controller/policies/next_use.py derives it).
class Rates {
  public:
    explicit Rates(const Layout & layout) : layout_(layout) {}

    // Starts with averages of zero; NULL: off. Throws Error(INVALID) for parameters that mean nothing.
    void set(const moegguf_rates * parameters);
    bool on() const { return !wait_.empty(); }

    // A gate's choice, expert_ids [n_tokens][n_expert_used]: n_tokens tokens whose use was spread evenly.
    void count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);

    // -(expected passes until the next use of an expert), seen from a gate of layer `now`.
    float worth(int il, int expert, int now) const {
        return 1.0f - wait_[layout_.key(il, expert)] - phase_[row_[il] - row_[now] + layout_.n_moe_layers - 1];
    }

  private:
    void renew_waits(int il);

    static constexpr int max_averages = 4;
    static constexpr float least_chance = 1e-4f; // a token uses no expert less often than this

    const Layout & layout_;
    int n_ = 0;
    float half_life_tokens_[max_averages] = {};
    float weight_[max_averages] = {};
    std::vector<float> average_[max_averages]; // [n_layer * n_expert_max], the share of tokens that used an expert
    std::vector<float> wait_;                  // [n_layer * n_expert_max], passes between uses; empty: off
    std::vector<float> phase_; // [2 * n_moe_layers - 1], by rows ahead: part of a pass until a layer's turn
    std::vector<int> row_;     // [n_layer], counts layers with experts
};

} // namespace moegguf
