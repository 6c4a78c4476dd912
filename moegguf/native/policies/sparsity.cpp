// sparsity.cpp: MoE-Infinity's sparsity-aware expert cache (algorithm 1): an expert's score is (its share of the
// layer's predicted activation + epsilon) * (1 - layer / n_layers). Early layers are favoured, because little can be
// prefetched for them (section 4.6).
//
// A share stays until the layer is predicted anew. Where nothing was predicted yet, and in prompts, recency decides.
// Touches its own tables only (policy.h).
#include "policies/policy.h"

namespace moegguf {
namespace {

// Not given in the paper: an expert used by no matched request never outranks one that was used.
constexpr float epsilon = 1e-6f;

class Sparsity final : public EvictionPolicy {
  public:
    Sparsity(const Layout & layout, const Values &) : layout_(layout), scores_(layout.n_keys(), 0.0f) {
        for (int il : layout.moe_layers) { set_row(il, nullptr); }
    }

    bool orders(const LayerStep & now) const override { return now.decodes && predicted_; }
    bool takes_as_predicted() const override { return true; }

    bool on_forecast(int il, const float * probabilities) override {
        if (probabilities) {
            set_row(il, probabilities);
            predicted_ = true;
        }
        return probabilities;
    }

    float score(int il, int expert) const override { return scores_[layout_.key(il, expert)]; }

  private:
    void set_row(int il, const float * probabilities) {
        const Layer & layer = layout_.layers[il];
        const float decay = 1.0f - (float)layout_.row_of[il] / layout_.n_moe_layers;
        for (int e = 0; e < layer.n_expert; e++) {
            const float p = probabilities && probabilities[e] > 0.0f ? std::min(probabilities[e], 1.0f) : 0.0f;
            scores_[layout_.key(il, e)] = (p / layer.n_expert_used + epsilon) * decay;
        }
    }

    const Layout & layout_;
    std::vector<float> scores_; // [n_layer * n_expert_max]
    bool predicted_ = false;
};

} // namespace

const PolicyType sparsity_policy = {"sparsity", true, 0, make_policy_of<Sparsity>};

} // namespace moegguf
