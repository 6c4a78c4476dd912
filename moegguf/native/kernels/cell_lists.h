// cell_lists.h: lists of each sequence's cells in a KV cache, in the order of their positions. llama.cpp fills the
// lists when it fills a mask, and attention reads them. So the bits of a sequence's results depend neither on where its
// cells are in the cache nor on other cells.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace moegguf {

constexpr int32_t part_keys = 512; // number of positions in one part; sums are computed for each part and then merged

// The cells of one sequence in one stream: pairs (position, cell) [n], ordered by position. parts[i] is the index of
// the first pair of part i. Parts end at positions that are multiples of part_keys, and empty parts are left out.
struct CellList {
    const std::pair<int32_t, int32_t> * cells;
    int64_t n;
    const int32_t * parts;
    int64_t n_parts;
};

class CellLists {
  public:
    // Fills the lists for n_tokens tokens of all streams, one stream after another. sequence_of(token) returns the
    // number of the token's sequence. position_in(token, cell) returns the position of a cell in the token's sequence;
    // negative: the cell does not belong to it.
    template <class SequenceOf, class PositionIn>
    void fill(int64_t n_tokens, int64_t n_cells, SequenceOf sequence_of, PositionIn position_in) {
        list_of_.assign(n_tokens, 0);
        sequences_.clear();
        for (int64_t token = 0; token < n_tokens; token++) {
            const auto found = std::find(sequences_.begin(), sequences_.end(), sequence_of(token));
            list_of_[token] = (int32_t)(found - sequences_.begin());
            if (found == sequences_.end()) {
                sequences_.push_back(sequence_of(token));
                add_list(token, n_cells, position_in);
            }
        }
    }

    CellList of_token(int64_t token) const {
        const auto & list = lists_[list_of_[token]];
        return {list.cells.data(), (int64_t)list.cells.size(), list.parts.data(), (int64_t)list.parts.size()};
    }
    int64_t n_tokens() const { return (int64_t)list_of_.size(); }
    int32_t number_of_list(int64_t token) const { return list_of_[token]; }

  private:
    struct List {
        std::vector<std::pair<int32_t, int32_t>> cells;
        std::vector<int32_t> parts;
    };

    template <class PositionIn>
    void add_list(int64_t token, int64_t n_cells, PositionIn position_in) {
        lists_.resize(std::max(lists_.size(), sequences_.size()));
        List & of_sequence = lists_[sequences_.size() - 1]; // reuses its memory
        auto & list = of_sequence.cells;
        list.clear();
        for (int64_t cell = 0; cell < n_cells; cell++) {
            const int32_t position = position_in(token, cell);
            if (position >= 0) { list.emplace_back(position, (int32_t)cell); }
        }
        if (!std::is_sorted(list.begin(), list.end())) { std::sort(list.begin(), list.end()); }
        of_sequence.parts.clear();
        int32_t part = -1;
        for (size_t i = 0; i < list.size(); i++) {
            if (list[i].first / part_keys != part) { of_sequence.parts.push_back((int32_t)i); }
            part = list[i].first / part_keys;
        }
    }

    std::vector<int32_t> list_of_, sequences_;
    std::vector<List> lists_;
};

} // namespace moegguf
