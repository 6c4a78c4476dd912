// previous_token.cpp: the experts that the last token used at a layer.
// Touches its own tables only (predictor.h).
#include "predictors/predictor.h"

namespace moegguf {
namespace {

// Probability 1 for these, 0 for the others. Of a pass of many tokens, the last one counts. Needs no training.
class PreviousToken final : public Predictor {
  public:
    PreviousToken(const Layout & layout, const Arrays &)
        : layout_(layout),
          used_(layout.n_keys(), 0.0f),
          seen_(layout.layers.size(), 0) {}

    void on_routing(const Observation & seen) override {
        float * used = &used_[layout_.key(seen.il, 0)];
        std::fill_n(used, layout_.layers[seen.il].n_expert, 0.0f);
        for (int i = 0; i < seen.n_expert_used; i++) {
            used[seen.expert_ids[i]] = 1.0f;
        }
        seen_[seen.il] = 1;
    }

    bool predict(int il, int, float * probabilities) override {
        std::copy_n(&used_[layout_.key(il, 0)], layout_.layers[il].n_expert, probabilities);
        return seen_[il];
    }

  private:
    const Layout & layout_;
    std::vector<float> used_;   // [n_layer * n_expert_max]
    std::vector<uint8_t> seen_; // [n_layer]
};

} // namespace

extern const PredictorType previous_token_predictor;
const PredictorType previous_token_predictor = {"previous-token", false, false, make_predictor<PreviousToken>};

} // namespace moegguf
