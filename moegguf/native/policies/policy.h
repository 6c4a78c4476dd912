// policy.h: the interface of an eviction policy, and parts that several policies use. A policy has a score for every
// expert, which routing events and forecasts may change. Policies contain only arithmetic, and use neither threads nor
// locks.
//
// The Residency of each tier owns one policy. It reports to the policy which experts are used, get slots or lose them,
// and passes on routers' choices from supplies and forecasts from the forecaster. Scores from a caller (ScoreTable)
// replace only the policies of devices that run layers.
//
// To add a policy, write a class in this folder, and add a `const PolicyType` for it to the table in policies.cpp. If
// the class is in its own file, declare the PolicyType below. Python finds the policy by its name in this table.
#pragma once

#include "layout.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace moegguf {

// The layer that is being computed, and facts about its pass. Policies use them when a victim is chosen.
struct LayerStep {
    int il = 0; // layer that is being computed
    // True: several tokens choose nearly all experts of this layer. Also true, with MOEGGUF_SWEEP, if this pass and the
    // previous one have several tokens, and the previous one used more experts than there are slots.
    bool sweep = false;
    bool token = false;   // true: the pass has one token
    uint64_t number = 0;  // position of this layer among the layers of all passes: pass * n_layer + il
    bool decodes = false; // true: the pass has one token, or decodes one token of each of its sequences
};

// The worth of an expert that is about to be loaded. Only an expert that is worth less may be evicted for it.
struct Worth {
    float score = INFINITY; // score in the tier's policy; INFINITY: the score does not matter
    // Chance that the expert will be used the next time its layer is computed; INFINITY: the chance does not matter.
    float chance = INFINITY;
};

// An eviction policy. The expert with the lowest score is evicted first. If scores are equal, recency decides: the
// least recently used expert is evicted first. In a sweep, the layer is compared before recency: experts of the layer
// that is needed last are evicted first.
//
// The current score of an expert is score(il, expert) + layer_offset(il, step). All experts of a layer have the same
// offset, so the offset does not change their order, and an eviction compares only one expert of each layer.
//
// Callers hold the store's lock.
class EvictionPolicy {
  public:
    virtual ~EvictionPolicy() = default;

    // Returns true if scores decide at this step. Otherwise recency decides; in a sweep, experts of the layer that is
    // needed last are evicted first.
    virtual bool orders(const LayerStep & now) const = 0;

    // Receives the router's choice at layer il: expert_ids [n_tokens][n_expert_used]. In RAM, these are the experts
    // that were looked up there, and n_tokens is 1. Returns true if scores of this layer have changed. The order of the
    // layer is then rebuilt before the next eviction.
    virtual bool on_routing(int /*il*/, const int32_t * /*expert_ids*/, int /*n_expert_used*/, int /*n_tokens*/) {
        return false;
    }

    // Called when the router of layer il has chosen, before any expert is evicted for the chosen ones. Returns true
    // if scores of this layer have changed.
    virtual bool on_routed(int /*il*/) { return false; }

    // Receives a forecast for layer il: for each expert [n_expert], the probability that it will be used the next time
    // this layer is computed. The probabilities are from 0 to 1, and stay valid until the next call for this layer.
    // NULL: there is no longer a forecast; this happens at each routing event of the layer. Returns true if scores of
    // this layer have changed.
    virtual bool on_forecast(int /*il*/, const float * /*probabilities*/) { return false; }
    // Returns true if on_forecast() receives the predictor's raw probabilities instead of calibrated ones. They are
    // valid only during the call, and may be any numbers.
    virtual bool takes_as_predicted() const { return false; }

    // The following functions are called when an expert is used, gets a slot, or loses its slot. A use is a routing
    // event that pinned the expert, or the end of a stream that leaves the expert in a slot. In RAM, a use is a copy of
    // the expert to a device. For a missing expert that an event needs, on_load is called right before on_use. The
    // functions may change only this expert's score. When a policy is set, its on_load is called for every expert that
    // already has a slot.
    virtual void on_use(int /*il*/, int /*expert*/) {}
    virtual void on_load(int /*il*/, int /*expert*/) {}
    virtual void on_evict(int /*il*/, int /*expert*/) {}
    virtual void on_prefetch(int /*il*/, int /*expert*/) {} // called when the expert gets a slot for a prefetch

    virtual float score(int il, int expert) const = 0; // never returns NaN
    virtual float layer_offset(int /*il*/, const LayerStep & /*now*/) const { return 0.0f; }
};

template <typename T>
std::unique_ptr<EvictionPolicy> make_policy_of(const Layout & layout) {
    return std::make_unique<T>(layout);
}

struct PolicyType {
    const char * name;
    bool takes_forecast; // true: on_forecast() changes scores
    std::unique_ptr<EvictionPolicy> (*make)(const Layout & layout);
};

extern const PolicyType next_use_policy, locality_policy; // defined in expected_use.cpp

// Creates the policy with this name. Throws Error(INVALID) for an unknown name.
std::unique_ptr<EvictionPolicy> make_policy(const Layout & layout, const std::string & name);
const PolicyType * policy_at(int index); // nullptr after the last policy

// Returns p clamped to the range 0 to 1; NaN becomes 0.
inline float probability(float p) { return p > 0.0f ? std::min(p, 1.0f) : 0.0f; }

// Returns the weight that earlier tokens keep in a fading average after n_tokens more tokens.
inline float kept_after(float half_life_tokens, int n_tokens) { return std::exp2(-(float)n_tokens / half_life_tokens); }

// A table [n_layer * n_expert_max] with the share of tokens that used each expert. The latest tokens count most.
class FadingAverage {
  public:
    FadingAverage(const Layout & layout, float half_life_tokens)
        : layout_(layout),
          half_life_tokens_(half_life_tokens),
          table_(layout.n_keys(), 0.0f) {}

    const float * row(int il) const { return &table_[layout_.key(il, 0)]; } // [n_expert]

    // Counts a routing event of n_tokens tokens as if its uses were spread evenly over the tokens.
    void count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
        float * row = table_.data() + layout_.key(il, 0);
        const int n_expert = layout_.layers[il].n_expert;
        const float kept = kept_after(half_life_tokens_, n_tokens);
        for (int expert = 0; expert < n_expert; expert++) { row[expert] *= kept; }
        const float one_use = (1.0f - kept) / n_tokens;
        for (int64_t use = 0; use < (int64_t)n_expert_used * n_tokens; use++) { row[expert_ids[use]] += one_use; }
    }

  private:
    const Layout & layout_;
    float half_life_tokens_;
    std::vector<float> table_;
};

// Scores that a caller has set, one for each expert. While there is a table, it replaces the chosen policy.
class ScoreTable final : public EvictionPolicy {
  public:
    explicit ScoreTable(const Layout & layout) : layout_(layout) {}

    bool set() const { return !table_.empty(); }
    bool orders(const LayerStep &) const override { return set(); }
    float score(int il, int expert) const override { return table_[layout_.key(il, expert)]; }

    // Returns a copy of the scores. Scores that are not finite become 0.
    static std::vector<float> finite(const float * scores, size_t n) {
        std::vector<float> table(scores, scores + n);
        std::replace_if(table.begin(), table.end(), [](float score) { return !std::isfinite(score); }, 0.0f);
        return table;
    }

    // Exchanges the current table with `scores`. Calls changed(il) for every layer whose scores differ, or for every
    // layer if there was no table. Makes no calls if the new table is empty.
    template <typename Changed>
    void exchange(std::vector<float> & scores, Changed changed) {
        table_.swap(scores);
        for (int il = 0; il < (int)layout_.layers.size() && !table_.empty(); il++) {
            const size_t first = layout_.key(il, 0), last = first + layout_.n_expert_max;
            if (scores.empty() || !std::equal(&table_[first], &table_[0] + last, &scores[first])) { changed(il); }
        }
    }

  private:
    const Layout & layout_;
    std::vector<float> table_; // [n_layer * n_expert_max]; empty: no scores are set
};

} // namespace moegguf
