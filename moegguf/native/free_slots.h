// free_slots.h: the lowest free slot, found in a bitmap of two levels.
// Knows numbers only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moegguf {

class FreeSlots {
  public:
    explicit FreeSlots(int n) : words_((size_t)n / 64 + 1, 0), groups_(words_.size() / 64 + 1, 0) {
        for (int s = 0; s < n; s++) {
            add(s);
        }
    }

    void add(int s) {
        words_[s / 64] |= bit(s);
        groups_[s / 4096] |= bit(s / 64);
    }

    void remove(int s) {
        words_[s / 64] &= ~bit(s);
        if (words_[s / 64] == 0) {
            groups_[s / 4096] &= ~bit(s / 64);
        }
    }

    // -1 when none is free.
    int lowest() const {
        for (size_t g = 0; g < groups_.size(); g++) {
            if (groups_[g]) {
                const size_t w = g * 64 + __builtin_ctzll(groups_[g]);
                return (int)(w * 64) + __builtin_ctzll(words_[w]);
            }
        }
        return -1;
    }

  private:
    static uint64_t bit(int i) { return uint64_t(1) << (i % 64); }

    std::vector<uint64_t> words_;  // a bit per slot
    std::vector<uint64_t> groups_; // a bit per word that is not 0
};

} // namespace moegguf
