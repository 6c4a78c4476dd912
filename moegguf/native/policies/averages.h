// averages.h: how often tokens use each expert, as a fading average. Arithmetic only: no threads, no locks.
#pragma once

#include "policies/policy.h"

#include <cmath>

namespace moegguf {

// A finite number of 0 or more.
inline bool at_least_zero(float x) {
    return std::isfinite(x) && x >= 0.0f;
}

// The part of an average that is left after so many tokens. Throws Error(INVALID).
inline float kept_after(float half_life_tokens, int n_tokens) {
    if (!at_least_zero(half_life_tokens) || half_life_tokens == 0.0f) {
        throw Error(MOEGGUF_INVALID,
                    "a half-life is a number of tokens above 0, not " + std::to_string(half_life_tokens));
    }
    return std::exp2(-(float)n_tokens / half_life_tokens);
}

// [n_layer * n_expert_max], the share of tokens that used an expert, the last ones most.
class FadingAverage {
  public:
    FadingAverage(const Layout & layout, float half_life_tokens)
        : layout_(layout),
          half_life_tokens_(half_life_tokens),
          table_(layout.n_keys(), 0.0f) {
        kept_after(half_life_tokens, 1);
    }

    const float * row(int il) const { return &table_[layout_.key(il, 0)]; } // [n_expert]

    // A routing event of n_tokens tokens, whose uses count as if spread evenly over them.
    void count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
        float * row = table_.data() + layout_.key(il, 0);
        const int n_expert = layout_.layers[il].n_expert;
        const float kept = kept_after(half_life_tokens_, n_tokens);
        for (int expert = 0; expert < n_expert; expert++) {
            row[expert] *= kept;
        }
        const float one_use = (1.0f - kept) / n_tokens;
        for (int64_t use = 0; use < (int64_t)n_expert_used * n_tokens; use++) {
            row[expert_ids[use]] += one_use;
        }
    }

  private:
    const Layout & layout_;
    float half_life_tokens_;
    std::vector<float> table_;
};

} // namespace moegguf
