#include "rates.h"

#include <cmath>

namespace moegguf {
namespace {

bool at_least_zero(float x) {
    return std::isfinite(x) && x >= 0.0f;
}

void check(const moegguf_rates & given, int most) {
    if (given.n < 1 || given.n > most) {
        throw Error(MOEGGUF_INVALID,
                    "there are 1 to " + std::to_string(most) + " averages, not " + std::to_string(given.n));
    }
    float sum = 0.0f;
    for (int i = 0; i < given.n; i++) {
        if (!at_least_zero(given.half_life_tokens[i]) || given.half_life_tokens[i] == 0.0f) {
            throw Error(MOEGGUF_INVALID,
                        "a half-life is a number of tokens above 0, not " + std::to_string(given.half_life_tokens[i]));
        }
        if (!at_least_zero(given.weight[i])) {
            throw Error(MOEGGUF_INVALID, "an average's weight is 0 or more, not " + std::to_string(given.weight[i]));
        }
        sum += given.weight[i];
    }
    if (sum <= 0.0f || !std::isfinite(sum)) {
        throw Error(MOEGGUF_INVALID, "the weights of the averages add up to " + std::to_string(sum));
    }
    if (!at_least_zero(given.phase_weight)) {
        throw Error(MOEGGUF_INVALID, "the weight of the phase is 0 or more, not " + std::to_string(given.phase_weight));
    }
}

} // namespace

void Rates::set(const moegguf_rates * parameters) {
    if (parameters) {
        check(*parameters, max_averages);
    }
    wait_.clear(); // off until all is there: any allocation may fail
    if (!parameters) {
        return;
    }
    const size_t n_key = layout_.layers.size() * layout_.n_expert_max;
    const int n_row = layout_.n_moe_layers;
    n_ = parameters->n;
    for (int i = 0; i < max_averages; i++) {
        half_life_tokens_[i] = parameters->half_life_tokens[i];
        weight_[i] = parameters->weight[i];
        average_[i].assign(i < n_ ? n_key : 0, 0.0f);
    }
    row_.assign(layout_.layers.size(), 0);
    int row = 0;
    for (size_t il = 0; il < row_.size(); il++) {
        row_[il] = row;
        row += layout_.layers[il].n_expert > 0;
    }
    // The layer after this one comes next; this one's own others wait for a whole pass: its chosen ones are pinned.
    phase_.resize(2 * n_row - 1);
    for (int i = 0; i < (int)phase_.size(); i++) {
        const int ahead = i - (n_row - 1);
        phase_[i] = parameters->phase_weight * (ahead > 0 ? ahead : ahead + n_row) / n_row;
    }
    wait_.assign(n_key, 1.0f / least_chance);
}

void Rates::count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    const int first = layout_.key(il, 0), n_expert = layout_.layers[il].n_expert;
    for (int i = 0; i < n_; i++) {
        float * average = average_[i].data() + first;
        const float kept = std::exp2(-(float)n_tokens / half_life_tokens_[i]);
        for (int expert = 0; expert < n_expert; expert++) {
            average[expert] *= kept;
        }
        const float one_use = (1.0f - kept) / n_tokens;
        for (int64_t use = 0; use < (int64_t)n_expert_used * n_tokens; use++) {
            average[expert_ids[use]] += one_use;
        }
    }
    renew_waits(il);
}

void Rates::renew_waits(int il) {
    const int first = layout_.key(il, 0), n_expert = layout_.layers[il].n_expert;
    for (int key = first; key < first + n_expert; key++) {
        float chance = 0.0f;
        for (int i = 0; i < n_; i++) {
            chance += weight_[i] * average_[i][key];
        }
        wait_[key] = 1.0f / std::max(chance, least_chance);
    }
}

} // namespace moegguf
