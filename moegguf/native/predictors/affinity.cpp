// affinity.cpp: DuoServe-MoE's affinity between layers (section 4.1): the next layer from the experts just chosen.
// Touches its own tables only (predictor.h).
#include "predictors/predictor.h"

namespace moegguf {
namespace {

// The mean of the chosen experts' rows of the affinity matrix, whose rows add up to 1, times the experts that a token
// uses. One layer ahead, of a sequence that decodes.
class Affinity final : public Predictor {
  public:
    Affinity(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          affinity_(layout.n_moe_layers > 1 ? arrays.floats("affinity", size_of(layout)) : nullptr) {}

    void on_token(int) override { seen_ = {}; }
    void on_routing(const Observation & seen) override { seen_ = seen; }

    bool predict(int il, int distance, float * probabilities) override {
        if (distance != 1 || seen_.n_tokens != 1 || layout_.row_of[seen_.il] + 1 != layout_.row_of[il]) {
            return false;
        }
        const int n_expert = layout_.layers[il].n_expert;
        const size_t width = layout_.n_expert_max;
        std::fill_n(probabilities, n_expert, 0.0f);
        for (int i = 0; i < seen_.n_expert_used; i++) {
            const float * row = affinity_ + (layout_.row_of[seen_.il] * width + seen_.expert_ids[i]) * width;
            for (int e = 0; e < n_expert; e++) {
                probabilities[e] += row[e];
            }
        }
        const float scale = (float)layout_.layers[il].n_expert_used / seen_.n_expert_used;
        for (int e = 0; e < n_expert; e++) {
            probabilities[e] = std::min(probabilities[e] * scale, 1.0f);
        }
        return true;
    }

  private:
    static size_t size_of(const Layout & layout) {
        return size_t(layout.n_moe_layers - 1) * layout.n_expert_max * layout.n_expert_max;
    }

    const Layout & layout_;
    const float * affinity_; // [n_moe_layers - 1][n_expert_max][n_expert_max]
    Observation seen_;
};

} // namespace

extern const PredictorType affinity_predictor;
const PredictorType affinity_predictor = {"affinity", false, false, make_predictor<Affinity>};

} // namespace moegguf
