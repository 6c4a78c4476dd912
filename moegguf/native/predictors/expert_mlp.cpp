// expert_mlp.cpp: DuoServe-MoE's ExpertMLP (section 4.2): one network for all layers, from all choices of the pass so
// far, the next layer's popularity, and the affinity rows of the experts just chosen.
#include "predictors/predictor.h"

namespace moegguf {
namespace {

// One layer ahead, once every layer before it was seen in a pass of one token.
class ExpertMlp final : public Predictor {
  public:
    ExpertMlp(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          n_expert_(layout.n_expert_max),
          n_used_(arrays.integer("n_expert_used")),
          popularity_(arrays.floats("popularity", size_t(layout.n_moe_layers) * n_expert_)) {
        affinity_ = layout.n_moe_layers > 1 ? arrays.floats("affinity", n_pairs(layout)) : nullptr;
        const size_t n_sizes = arrays.size("sizes");
        const int32_t * sizes = arrays.integers("sizes", 0);
        state_.assign(size_t(std::max(0, n_used_)) * (layout.n_moe_layers - 1 + n_expert_) + n_expert_, 0.0f);
        if (n_used_ <= 0 || n_sizes < 2 || sizes[0] != (int)state_.size() || sizes[n_sizes - 1] != n_expert_) {
            throw Error(MOEGGUF_INVALID, "the network's state or its output has another size than the model");
        }
        for (size_t i = 0; i + 1 < n_sizes; i++) {
            layers_.push_back(arrays.matrix("layers." + std::to_string(i), sizes[i + 1], sizes[i]));
            outputs_.emplace_back(sizes[i + 1]);
        }
    }

    void on_token(int) override { n_seen_ = 0; }

    // After a missed layer, or one that uses fewer experts, nothing is predicted until the next pass.
    void on_routing(const Observation & seen) override {
        if (seen.n_tokens != 1 || seen.n_expert_used != n_used_ || layout_.row_of[seen.il] != n_seen_) {
            n_seen_ = -1;
            return;
        }
        chosen_.assign(seen.expert_ids, seen.expert_ids + n_used_);
        for (int i = 0; i < n_used_ && n_seen_ + 1 < layout_.n_moe_layers; i++) {
            state_[size_t(n_seen_) * n_used_ + i] = float(chosen_[i] + 1) / n_expert_; // 0 is padding
        }
        n_seen_ += 1;
    }

    bool predict(int il, int distance, float * probabilities) override {
        const int row = layout_.row_of[il];
        if (distance != 1 || row < 1 || row != n_seen_) { return false; }
        set_state(row);
        const float * x = state_.data();
        int n = (int)state_.size();
        for (size_t i = 0; i < layers_.size(); i++) {
            if (!rounded_.round(x, n)) { return false; }
            multiply(layers_[i], rounded_, i + 1 < layers_.size(), outputs_[i].data());
            x = outputs_[i].data();
            n = (int)outputs_[i].size();
        }
        sigmoid(x, layout_.layers[il].n_expert, probabilities);
        return true;
    }

  private:
    // [choices of the layers before, padded][popularity of the next][affinity of each expert just chosen]
    void set_state(int row) {
        float * at = state_.data() + size_t(layout_.n_moe_layers - 1) * n_used_;
        std::fill(state_.data() + size_t(row) * n_used_, at, 0.0f);
        at = std::copy_n(popularity_ + size_t(row) * n_expert_, n_expert_, at);
        for (int expert : chosen_) {
            at = std::copy_n(affinity_ + (size_t(row - 1) * n_expert_ + expert) * n_expert_, n_expert_, at);
        }
    }

    const Layout & layout_;
    const int n_expert_;
    const int n_used_;
    const float * popularity_; // [n_moe_layers][n_expert]
    const float * affinity_;   // [n_moe_layers - 1][n_expert][n_expert]
    std::vector<ByteMatrix> layers_;
    std::vector<std::vector<float>> outputs_; // of each
    std::vector<float> state_;
    std::vector<int> chosen_; // by the last layer
    RoundedVector rounded_;
    int n_seen_ = -1; // layers of this pass; -1: not all
};

} // namespace

const PredictorType expert_mlp_predictor = {"expert-mlp", false, false, make_predictor<ExpertMlp>};

} // namespace moegguf
