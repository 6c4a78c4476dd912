// admission.h: which experts may take a slot on a device, where the CPU computes what is missed there.
// Arithmetic only: it knows no slot and no thread.
#pragma once

#include "layout.h"

namespace moegguf {

// Those that were used twice in the last tokens: a copy of what is used once pays for itself only where the device has
// to have it. Where every miss is copied, all are admitted. Under the store's lock.
class Admission {
  public:
    static constexpr uint64_t window_tokens = 64;

    explicit Admission(const Layout & layout) : layout_(layout) {}

    void start() { uses_.assign(layout_.n_keys(), {}); }

    // At a routing event of a layer, by when so many tokens were computed in all.
    void note_uses(int il, const std::vector<int> & experts, uint64_t n_tokens) {
        now_ = n_tokens;
        for (int expert : experts) {
            Uses & uses = uses_[layout_.key(il, expert)];
            uses.before = uses.last;
            uses.last = n_tokens;
        }
    }

    bool admits(int il, int expert) const {
        if (uses_.empty()) {
            return true;
        }
        const Uses & uses = uses_[layout_.key(il, expert)];
        return uses.before > 0 && now_ - uses.before < window_tokens;
    }

  private:
    struct Uses { // the last two, 0: none
        uint64_t before = 0;
        uint64_t last = 0;
    };

    const Layout & layout_;
    std::vector<Uses> uses_; // [n_layer * n_expert_max], empty where all are admitted
    uint64_t now_ = 0;
};

} // namespace moegguf
