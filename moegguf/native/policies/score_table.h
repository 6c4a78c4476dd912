// score_table.h: scores written from outside, one per expert. While a table is set it comes before the chosen policy.
// Arithmetic only: no threads, no locks.
#pragma once

#include "policies/policy.h"

namespace moegguf {

class ScoreTable final : public EvictionPolicy {
  public:
    explicit ScoreTable(const Layout & layout) : layout_(layout) {}

    bool set() const { return !table_.empty(); }
    bool orders(const LayerStep &) const override { return set(); }
    float score(int il, int expert) const override { return table_[layout_.key(il, expert)]; }

    // Scores that are no finite numbers count as 0.
    static std::vector<float> finite(const float * scores, size_t n) {
        std::vector<float> table(scores, scores + n);
        std::replace_if(table.begin(), table.end(), [](float score) { return !std::isfinite(score); }, 0.0f);
        return table;
    }

    // Takes the place of the table in force, which is left in `scores`. Calls changed(il) for every row that differs.
    template <typename Changed>
    void exchange(std::vector<float> & scores, Changed changed) {
        table_.swap(scores);
        for (int il = 0; il < (int)layout_.layers.size() && !table_.empty(); il++) {
            const size_t first = layout_.key(il, 0), last = first + layout_.n_expert_max;
            if (scores.empty() || !std::equal(&table_[first], &table_[0] + last, &scores[first])) {
                changed(il);
            }
        }
    }

  private:
    const Layout & layout_;
    std::vector<float> table_; // [n_layer * n_expert_max]; empty: not set
};

} // namespace moegguf
