#include "policies/score_table.h"

#include <cmath>

namespace moegguf {

std::vector<float> ScoreTable::finite(const float * scores, size_t n) {
    std::vector<float> table(scores, scores + n);
    for (float & score : table) {
        if (!std::isfinite(score)) {
            score = 0.0f;
        }
    }
    return table;
}

// By name without a table: recency, until moegguf_store_set_scores gives one.
extern const PolicyType score_table_policy;
const PolicyType score_table_policy = {"scores", MOEGGUF_POLICY_SCORES, {}, make_policy_of<ScoreTable>};

} // namespace moegguf
