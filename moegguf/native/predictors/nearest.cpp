// nearest.cpp: which stored requests resemble a pass, layer by layer: the query of an EAM collection.
//
// Touches what it is given only, and knows no store. In numpy this is a dozen steps of a microsecond or two each, and
// the controller asks at every layer.
#include "moegguf.h"

#include <algorithm>
#include <cstddef>

namespace {

constexpr float nearly = 1.0f - 2e-6f; // squared cosines closer than this are the same in float32
constexpr float least = 1e-30f;
constexpr int32_t most_wanted = 64;

struct Found {
    float score;
    float tokens;
    int32_t index;
};

// The nearest first; of equals the one with more tokens, then the later one.
bool before(const Found & a, const Found & b) {
    if (a.score != b.score) {
        return a.score > b.score;
    }
    return a.tokens != b.tokens ? a.tokens > b.tokens : a.index > b.index;
}

} // namespace

int moegguf_eamc_add_row(const float * columns, size_t stride, const float * row, int32_t n_expert,
                         const float * row_norm2, int32_t n_entries, float * dot, float * norm2) {
    if (!columns || !row || !row_norm2 || !dot || !norm2 || n_expert < 0 || n_entries < 0) {
        return MOEGGUF_INVALID;
    }
    for (int32_t e = 0; e < n_expert; e++) {
        const float count = row[e];
        if (count == 0.0f) {
            continue;
        }
        const float * column = columns + e * stride;
        for (int32_t i = 0; i < n_entries; i++) {
            dot[i] += count * column[i];
        }
    }
    for (int32_t i = 0; i < n_entries; i++) {
        norm2[i] += row_norm2[i];
    }
    return MOEGGUF_OK;
}

int moegguf_eamc_match(const float * dot, const float * norm2, const float * tokens, int32_t n_entries, int32_t n,
                       float * scores, int64_t * indices, int32_t * n_found) {
    if (!dot || !norm2 || !tokens || !scores || !indices || !n_found || n < 0 || n > most_wanted || n_entries < 0) {
        return MOEGGUF_INVALID;
    }
    if (n == 0) {
        *n_found = 0;
        return MOEGGUF_OK;
    }
    float top[most_wanted] = {};
    for (int32_t i = 0; i < n_entries; i++) {
        scores[i] = dot[i] * dot[i] / norm2[i];
        for (int32_t at = n - 1; at >= 0 && scores[i] > top[at]; at--) {
            if (at < n - 1) {
                top[at + 1] = top[at];
            }
            top[at] = scores[i];
        }
    }
    const float bar = std::max(least, top[n - 1] * nearly);
    Found best[most_wanted];
    int32_t size = 0;
    for (int32_t i = 0; i < n_entries; i++) {
        if (!(scores[i] >= bar)) {
            continue;
        }
        // As near as the last one that can be among them: tokens decide.
        const Found found{scores[i] * nearly <= bar ? 0.0f : scores[i], tokens[i], i};
        int32_t at = std::min(size, n - 1);
        if (size == n && !before(found, best[at])) {
            continue;
        }
        for (; at > 0 && before(found, best[at - 1]); at--) {
            best[at] = best[at - 1];
        }
        best[at] = found;
        size = std::min(size + 1, n);
    }
    for (int32_t i = 0; i < size; i++) {
        indices[i] = best[i].index;
    }
    *n_found = size;
    return MOEGGUF_OK;
}
