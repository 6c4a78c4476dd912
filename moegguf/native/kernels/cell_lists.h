// cell_lists.h: which cells of a KV cache each sequence has, in the order of their positions. llama.cpp fills it with a
// mask and attention reads it, so that a sequence's bits do not depend on where its cells lie nor on the others' cells.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moegguf {

// Cells of one sequence and stream: [n], by position.
struct CellList {
    const int32_t *cells, *positions;
    int64_t n;
};

class CellLists {
  public:
    // For n_tokens tokens, of which n_tokens / n_stream follow one another in each stream. sequence_of(token) numbers
    // their sequences; position_in(token, cell) is that of a cell that its sequence has, else negative.
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
        const List & list = lists_[list_of_[token]];
        return {list.cells.data(), list.positions.data(), (int64_t)list.cells.size()};
    }
    int64_t n_tokens() const { return (int64_t)list_of_.size(); }
    int32_t number_of_list(int64_t token) const { return list_of_[token]; }

  private:
    struct List {
        std::vector<int32_t> cells, positions;
    };

    template <class PositionIn>
    void add_list(int64_t token, int64_t n_cells, PositionIn position_in) {
        if (lists_.size() < sequences_.size()) {
            lists_.emplace_back();
        }
        List & list = lists_[sequences_.size() - 1]; // memory is used again
        list.cells.clear();
        list.positions.clear();
        bool in_order = true;
        for (int64_t cell = 0; cell < n_cells; cell++) {
            const int32_t position = position_in(token, cell);
            if (position >= 0) {
                in_order &= list.positions.empty() || list.positions.back() <= position;
                list.cells.push_back((int32_t)cell);
                list.positions.push_back(position);
            }
        }
        if (!in_order) {
            sort(list);
        }
    }

    void sort(List & list) {
        by_position_.resize(list.cells.size());
        for (size_t i = 0; i < list.cells.size(); i++) {
            by_position_[i] = {list.positions[i], list.cells[i]};
        }
        std::sort(by_position_.begin(), by_position_.end());
        for (size_t i = 0; i < list.cells.size(); i++) {
            list.positions[i] = by_position_[i].first;
            list.cells[i] = by_position_[i].second;
        }
    }

    std::vector<int32_t> list_of_, sequences_;
    std::vector<List> lists_;
    std::vector<std::pair<int32_t, int32_t>> by_position_;
};

} // namespace moegguf
