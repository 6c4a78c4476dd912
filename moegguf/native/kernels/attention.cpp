// attention.cpp: computes FLASH_ATTN_EXT. The work is divided among threads by tiles of rows, and also by parts of the
// keys if there are few tiles. A row is the query of one token and one head. Rows that read the same keys share a tile:
// the heads of a group, and successive tokens. Keys are added in the order of their positions, in blocks and parts that
// end at fixed positions. So the bits of a row's result do not depend on other rows, on cells that the row does not
// see, or on the number of threads. Without lists of cells (cell_lists.h), the cells' numbers are used instead of their
// positions. This file writes only the operation's result, its work memory, and candidates of TOP_K. It does not know
// about the store.
#include "cell_lists.h"
#include "ggml-cpu-impl.h"
#include "kernels.h"
#include "multiply.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace moegguf::kernels {
namespace {

// Parts of tiles are divided among threads if there are fewer tiles per thread than this.
constexpr int64_t few_tiles = 4;
// Initial maximum of the scores. Unlike with -inf, subtracting it from itself does not yield NaN.
constexpr float lowest = -1e30f;
constexpr ggml_fp16_t masked = 0xfc00; // -inf
constexpr int64_t unlisted = 1 << 30; // position of the first cell that is not in any list; above every listed position

using ToFloat = void (*)(const char * values, int64_t n, float * out);

void f32_to_float(const char * values, int64_t n, float * out) { memcpy(out, values, n * sizeof(float)); }

ToFloat find_to_float(const AttentionKernels & kernels, ggml_type type) {
    return type == GGML_TYPE_F32    ? f32_to_float
           : type == GGML_TYPE_F16  ? kernels.f16_to_float
           : type == GGML_TYPE_Q8_0 ? kernels.q8_0_to_float
                                    : nullptr;
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Returns the number of lanes for n_rows rows. Successive values of queries, and scores of successive keys, are this
// many floats apart. The lanes take up an odd number of cache lines. Otherwise successive values or keys would evict
// each other from the first-level cache.
int64_t lanes_of(int64_t n_rows) {
    constexpr int64_t line = 64 / sizeof(float);
    return (round_up(n_rows, line) / line | 1) * line;
}

// The lists of a KV cache's cells. They cover the first n_cells cells of a mask.
struct Listed {
    const CellLists * lists; // nullptr: there are no lists
    int64_t n_cells;
};

// Finds the lists that belong to a mask of n_tokens tokens. `lists` is nullptr if there are none. The mask of a KV
// cache points to the cache's lists. Masks of sparse attention, and scores with a mask added, are computed from the
// cache's mask, so their sources are searched.
Listed find_lists(const ggml_tensor * mask, int64_t n_tokens) {
    if (!mask) { return {nullptr, 0}; }
    switch (mask->op) {
        case GGML_OP_ADD:
            return find_lists(mask->src[1], n_tokens);
        case GGML_OP_RESHAPE:
        case GGML_OP_CPY:
            return find_lists(mask->src[0], n_tokens);
        case GGML_OP_CONCAT: // the listed cells are in the first source; other cells follow them
            return mask->op_params[0] == 0 ? find_lists(mask->src[0], n_tokens) : Listed{nullptr, 0};
        case GGML_OP_NONE:
            break;
        default:
            return {nullptr, 0};
    }
    const bool is_input = mask->flags & GGML_TENSOR_FLAG_INPUT;
    const auto * lists = is_input ? (const CellLists *)mask->extra : nullptr;
    return lists && lists->n_tokens() == n_tokens ? Listed{lists, mask->ne[0]} : Listed{nullptr, 0};
}

// The sizes of one attention operation, and the tiles and parts into which it is divided.
struct Shape {
    const ggml_tensor *q, *k, *v, *mask, *sinks, *out;
    const AttentionKernels * kernels;
    int64_t n_key, n_value; // number of floats in a key, and in a value
    int64_t n_cells, n_tokens, n_head;
    // n_shared: number of heads that share keys. n_heads, n_of_tokens: largest numbers of heads and tokens in a tile.
    int64_t n_shared, n_heads, n_of_tokens;
    int64_t n_groups;                 // number of groups of heads; a tile has heads of one group
    Listed listed;                    // cells from listed.n_cells on come last, in the order of their numbers
    int64_t n_tiles = 0, n_parts = 0; // n_tiles: number of tiles; n_parts: largest number of parts in a tile

    Shape(const ggml_tensor * op, const AttentionKernels & of)
        : q(op->src[0]),
          k(op->src[1]),
          v(op->src[2]),
          mask(op->src[3]),
          sinks(op->src[4]),
          out(op),
          kernels(&of),
          n_key(k->ne[0]),
          n_value(v->ne[0]),
          n_cells(k->ne[1]),
          n_tokens(q->ne[1]),
          n_head(q->ne[2]),
          n_shared(n_head / k->ne[2]),
          n_heads(std::min<int64_t>(n_shared, rows_of_tile())),
          n_of_tokens(std::min(n_tokens, rows_of_tile() / n_heads)),
          n_groups(k->ne[2] * ((n_shared + n_heads - 1) / n_heads)),
          listed(find_lists(mask, n_tokens * q->ne[3])) {
        for (int64_t token = 0; token < n_tokens * q->ne[3]; token = tile_end(token)) {
            n_tiles += n_groups;
            n_parts = std::max(n_parts, parts_of(token));
        }
    }

    // Returns the largest number of rows in a tile. Their queries and sums have to fit into a second-level cache.
    int64_t rows_of_tile() const { return n_key + 2 * n_value <= 512 ? most_rows : most_rows / 2; }

    // Returns the token after the last token of the tile that begins at `token`. The tokens of all streams are numbered
    // consecutively.
    int64_t tile_end(int64_t token) const {
        const int64_t last = std::min(token + n_of_tokens, (token / n_tokens + 1) * n_tokens);
        int64_t end = token + 1;
        const CellLists * lists = listed.lists;
        while (end < last && (!lists || lists->number_of_list(end) == lists->number_of_list(token))) { end++; }
        return end;
    }

    CellList list_of(int64_t token) const {
        return listed.lists ? listed.lists->of_token(token) : CellList{nullptr, 0, nullptr, 0};
    }
    int64_t n_unlisted() const { return n_cells - listed.n_cells; }

    int64_t parts_of(int64_t token) const {
        return list_of(token).n_parts + (n_unlisted() + part_keys - 1) / part_keys;
    }

    // Returns the number of floats of work memory that each thread needs.
    int64_t scratch() const {
        const int64_t n_rows = lanes_of(n_heads * n_of_tokens);
        return round_up(n_rows * (n_key + 2 * n_value + 5) + few_rows + most_keys * (n_key + n_value) +
                            2 * most_keys * std::max<int64_t>(n_rows, few_rows),
                        16);
    }
    // Returns the number of floats in the sums of one part of a tile.
    int64_t of_part() const { return n_heads * n_of_tokens * (n_value + 2); }
    bool divides_parts(int n_threads) const { return n_parts > 1 && n_tiles < few_tiles * n_threads; }
    size_t work_bytes(int n_threads) const {
        const int64_t of_parts = divides_parts(n_threads) ? n_tiles * n_parts * of_part() : 0;
        return (n_threads * scratch() + of_parts + 16) * sizeof(float);
    }
};

// Returns the factor by which a head's mask is multiplied before it is added to the scores (ALiBi); 1 without ALiBi.
float slope(const ggml_tensor * op, int64_t head, int64_t n_head) {
    float max_bias;
    memcpy(&max_bias, (const float *)op->op_params + 1, sizeof(max_bias));
    if (max_bias <= 0) { return 1; }
    const int64_t n = (int64_t)1 << (int)floor(log2((double)n_head));
    return head < n ? powf(powf(2, -max_bias / n), head + 1) : powf(powf(2, -max_bias / 2 / n), 2 * (head - n) + 1);
}

AttentionScale scale_of(const ggml_tensor * op) {
    float params[3];
    memcpy(params, op->op_params, sizeof(params));
    return {params[2] == 0 ? params[0] : params[0] / params[2], params[2]};
}

// Up to most_keys cells in the order of their positions. All positions are between two successive multiples of
// most_keys.
struct Block {
    int n = 0;
    bool is_run = true; // the numbers of the cells are consecutive
    int32_t cells[most_keys];
};

// The keys of a block that are multiplied together, and their addresses. Unused entries of `keys` and `values` repeat
// the last address.
struct Keys {
    int n;
    uint8_t bits[most_keys]; // index of each key in the block
    int32_t cells[most_keys];
    const char *keys[most_keys], *values[most_keys];
    CacheType value_type;
};

// A tile: rows [token][head] of one stream that share one head of keys, with their sums and scratch memory.
struct Tile {
    const Shape & s;
    const AttentionKernels & kernels;
    const AttentionScale scale;
    int64_t stream, first_head, first_token, n_parts;
    CellList list; // cells of the tokens' sequence; cells that are not in any list come after them
    int n_heads, n_tokens, n_rows, n_lanes; // n_lanes: see lanes_of
    float *queries, *keys, *values, *scores, *bias, *rescale;
    AttentionSums part, all;
    float slopes[most_rows];
    SeenKeys seen[most_rows]; // [n_tokens] keys of the current block that each token sees

    Tile(const Shape & shape, int64_t i, float * memory)
        : s(shape),
          kernels(*shape.kernels),
          scale(scale_of(shape.out)) {
        const int64_t group = i % s.n_groups, groups_of_key = s.n_groups / s.k->ne[2];
        int64_t token = 0;
        for (int64_t n_before = i / s.n_groups; n_before > 0; n_before--) { token = s.tile_end(token); }
        stream = token / s.n_tokens;
        first_token = token % s.n_tokens;
        n_tokens = (int)(s.tile_end(token) - token);
        n_parts = s.parts_of(token);
        list = s.list_of(token);
        first_head = group / groups_of_key * s.n_shared + group % groups_of_key * s.n_heads;
        n_heads = (int)std::min(s.n_heads, (group / groups_of_key + 1) * s.n_shared - first_head);
        n_rows = n_heads * n_tokens;
        n_lanes = (int)lanes_of(n_rows);
        const auto take = [&memory](int64_t n) {
            float * at = memory;
            memory += n;
            return at;
        };
        queries = take(n_lanes * s.n_key + few_rows);
        keys = take(most_keys * s.n_key);
        values = take(most_keys * s.n_value);
        scores = take(most_keys * std::max(n_lanes, few_rows));
        bias = take(most_keys * std::max(n_lanes, few_rows));
        rescale = take(n_lanes);
        for (AttentionSums * sums : {&part, &all}) {
            *sums = {take(n_lanes), take(n_lanes), take(n_lanes * s.n_value)};
        }
    }

    void load_queries() {
        memset(queries, 0, (n_lanes * s.n_key + few_rows) * sizeof(float));
        for (int row = 0; row < n_rows; row++) {
            const ggml_tensor * q = s.q;
            const char * from = (const char *)q->data + (first_token + row / n_heads) * q->nb[1] +
                                (first_head + row % n_heads) * q->nb[2] + stream * q->nb[3];
            for (int64_t i = 0; i < s.n_key; i++) { queries[i * n_lanes + row] = ((const float *)from)[i]; }
        }
        for (int i = 0; i < n_heads; i++) { slopes[i] = slope(s.out, first_head + i, s.n_head); }
    }

    void clear(const AttentionSums & sums) const {
        std::fill_n(sums.max, n_lanes, lowest);
        std::fill_n(sums.sum, n_lanes, 0.0f);
        std::fill_n(sums.values, n_rows * s.n_value, 0.0f);
    }

    const ggml_fp16_t * mask_of(int64_t token) const {
        const ggml_tensor * m = s.mask;
        return (const ggml_fp16_t *)((const char *)m->data + (first_token + token) * m->nb[1] +
                                     stream % m->ne[3] * m->nb[3]);
    }

    // Sets `seen` to the cells of a block that each token sees.
    void look(const Block & block) {
        const uint32_t exist = block.n == most_keys ? ~0u : (1u << block.n) - 1;
        for (int t = 0; t < n_tokens; t++) {
            seen[t] = {exist, 0};
            if (s.mask) {
                const ggml_fp16_t * of_token = mask_of(t);
                ggml_fp16_t m[most_keys];
                if (block.is_run) {
                    memcpy(m, of_token + block.cells[0], block.n * sizeof(*m));
                } else {
                    std::transform(block.cells, block.cells + block.n, m, [&](int32_t cell) { return of_token[cell]; });
                }
                seen[t] = kernels.see(m);
                seen[t] = {seen[t].seen & exist, seen[t].biased & exist};
            }
        }
    }

    // Adds a block of keys to the sums of the current part. Returns false if no token sees any of its cells. A token is
    // processed together with the tokens before it if it sees every cell that any of them sees, or sees no other cell.
    // `next`: the block that is added next.
    bool add_block(const Block & block, const Block & next) {
        look(block);
        bool found = false;
        for (int t = 0; t < n_tokens;) {
            uint32_t together = seen[t].seen;
            int end = t + 1;
            for (; end < n_tokens; end++) {
                const uint32_t both = together & seen[end].seen;
                if (both != together && both != seen[end].seen) { break; }
                together |= seen[end].seen;
            }
            if (together) {
                add_keys(block, next, together, t, end);
                found = true;
            }
            t = end;
        }
        return found;
    }

    // Adds the keys of a block whose bits are set in `together` to the sums of tokens [first, last). Each of these keys
    // is seen by at least one of the tokens.
    void add_keys(const Block & block, const Block & next, uint32_t together, int first, int last) {
        Keys of = {};
        uint32_t common = together;
        bool is_biased = false;
        for (int i = 0; i < block.n; i++) {
            if (together >> i & 1) {
                of.bits[of.n] = (uint8_t)i;
                of.cells[of.n++] = block.cells[i];
            }
        }
        for (int t = first; t < last; t++) {
            common &= seen[t].seen;
            is_biased |= seen[t].biased != 0;
        }
        // A small number of rows is computed without rows of other tokens. A larger number is computed in whole
        // vectors, which may include rows of other tokens. The bias hides the keys from the rows of other tokens.
        int row = first * n_heads, n = (last - first) * n_heads;
        const bool few = n <= few_rows && s.k->type == GGML_TYPE_F16;
        if (!few && (row % kernels.lanes != 0 || (n % kernels.lanes != 0 && row + n != n_rows))) {
            is_biased = true;
            row = 0, n = n_rows;
        }
        if (!few) { prefetch(next); }
        load_keys(of, few);
        const int key_stride = few ? 1 : n_lanes, row_stride = few ? most_keys : 1;
        float * const bias_or_none = is_biased || common != together ? bias : nullptr;
        if (bias_or_none) { fill_bias(of, first, last, row, n, key_stride, row_stride); }
        if (few) {
            const char * soon[2 * most_keys]; // memory to prefetch: this block's values, the next block's keys
            std::copy_n(of.values, of.n, soon);
            for (int i = 0; i < next.n; i++) { soon[of.n + i] = row_of(s.k, next.cells[i]); }
            kernels.score_few(queries + row, n_lanes, n, of.keys, of.n, s.n_key, {soon, of.n + next.n, 2 * s.n_key},
                              scores);
            kernels.soften_few(scores, bias_or_none, n, of.n, scale, at_row(part, row), rescale + row);
        } else {
            const int n_vectors = (int)round_up(n, kernels.lanes);
            kernels.score(queries + row, n_lanes, n_vectors, keys, of.n, s.n_key, scores);
            kernels.soften(scores, bias_or_none, n_lanes, n_vectors, of.n, scale, at_row(part, row), rescale + row);
        }
        const float * p = scores + (first * n_heads - row) * row_stride;
        if (common == together || are_finite(of, together & ~common)) {
            mix(of, together, first, last, p, key_stride, row_stride);
        } else { // a value that is hidden from some token is not finite, and 0 * value would be NaN
            for (int t = first; t < last; t++) {
                mix(of, seen[t].seen, t, t + 1, p + (t - first) * n_heads * row_stride, key_stride, row_stride);
            }
        }
    }

    // Prefetches the keys and values of a block to the second-level cache. The processor does not foresee these
    // addresses, because rows of other heads lie between the rows of this head.
    void prefetch(const Block & block) const {
        for (int i = 0; i < block.n; i++) {
            prefetch_row(row_of(s.k, block.cells[i]), ggml_row_size(s.k->type, s.n_key));
            prefetch_row(row_of(s.v, block.cells[i]), ggml_row_size(s.v->type, s.n_value));
        }
    }

    static void prefetch_row(const char * row, size_t n_bytes) {
        for (size_t at = 0; at < n_bytes; at += 64) { __builtin_prefetch(row + at, 0, 2); }
    }

    void load_keys(Keys & of, bool few) const {
        for (int i = 0; i < most_keys; i++) {
            const int64_t cell = of.cells[std::min(i, of.n - 1)];
            of.keys[i] = row_of(s.k, cell), of.values[i] = row_of(s.v, cell);
        }
        of.value_type = few && s.v->type == GGML_TYPE_F16 ? CacheType::f16 : CacheType::f32;
        if (!few) { to_floats(s.k->type, of, of.keys, s.n_key, keys); }
        if (of.value_type == CacheType::f32) { to_floats(s.v->type, of, of.values, s.n_value, values); }
    }

    void to_floats(ggml_type type, const Keys & of, const char ** rows, int64_t n, float * to) const {
        const ToFloat to_float = find_to_float(kernels, type);
        for (int i = 0; i < of.n; i++) { to_float(rows[i], n, to + i * n); }
        for (int i = 0; i < most_keys; i++) { rows[i] = (const char *)(to + std::min(i, of.n - 1) * n); }
    }

    // Writes the bias that is added to the scores of rows [row, row + n). It is the mask's value times the head's
    // slope, and -INFINITY for a key that the row's token does not see. Tokens outside [first, last) see no key here.
    void fill_bias(const Keys & of, int first, int last, int row, int n, int key_stride, int row_stride) const {
        for (int r = 0; r < n; r++) {
            const int t = (row + r) / n_heads;
            const float slope = slopes[(row + r) % n_heads];
            const SeenKeys x = t >= first && t < last ? seen[t] : SeenKeys{0, 0};
            for (int i = 0; i < of.n; i++) {
                const uint32_t bit = 1u << of.bits[i];
                bias[r * row_stride + i * key_stride] = !(x.seen & bit) ? -INFINITY
                                                        : x.biased & bit
                                                            ? slope * GGML_CPU_FP16_TO_FP32(mask_of(t)[of.cells[i]])
                                                            : 0;
            }
        }
    }

    bool are_finite(const Keys & of, uint32_t bits) const {
        for (int i = 0; i < of.n; i++) {
            if (bits >> of.bits[i] & 1 && !kernels.is_finite(of.values[i], s.n_value, of.value_type)) { return false; }
        }
        return true;
    }

    void mix(const Keys & of, uint32_t bits, int first, int last, const float * p, int key_stride,
             int row_stride) const {
        uint8_t which[most_keys];
        int n = 0;
        for (int i = 0; i < of.n; i++) {
            which[n] = (uint8_t)i;
            n += bits >> of.bits[i] & 1;
        }
        const int row = first * n_heads;
        kernels.mix(p, key_stride, row_stride, (last - first) * n_heads, of.value_type, of.values, s.n_value, which, n,
                    rescale + row, at_row(part, row).values);
    }

    AttentionSums at_row(const AttentionSums & sums, int row) const {
        return {sums.max + row, sums.sum + row, sums.values + row * s.n_value};
    }

    const char * row_of(const ggml_tensor * x, int64_t cell) const {
        return (const char *)x->data + cell * x->nb[1] + first_head / s.n_shared * x->nb[2] + stream * x->nb[3];
    }

    int64_t position(int64_t i) const { return i < list.n ? list.cells[i].first : unlisted + i - list.n; }

    int32_t cell_at(int64_t i) const {
        return i < list.n ? list.cells[i].second : (int32_t)(s.listed.n_cells + i - list.n);
    }

    // Returns the index at which a part begins. Indices run first through the cells in `list`, then through the cells
    // that are not in any sequence's list.
    int64_t begin_of(int64_t part) const {
        const int64_t n_after = part - list.n_parts;
        return n_after < 0 ? list.parts[part] : list.n + std::min(n_after * part_keys, s.n_unlisted());
    }

    // Returns the block whose first cell has the index `entry`. The indices of all its cells are below `end`.
    Block block_at(int64_t entry, int64_t end) const {
        Block block;
        for (int64_t i = entry; i < end && block.n < most_keys; i++) {
            if (position(i) / most_keys != position(entry) / most_keys) { break; }
            block.cells[block.n] = cell_at(i);
            block.is_run &= block.cells[block.n] == block.cells[0] + block.n;
            block.n++;
        }
        return block;
    }

    // Computes the sums over part i of the keys. Returns false if there is no part i, or if no token sees any of its
    // cells.
    bool add_part(int64_t i) {
        clear(part);
        if (i >= n_parts) { return false; }
        int64_t entry = begin_of(i);
        const int64_t end = begin_of(i + 1);
        bool found = false;
        for (Block next = block_at(entry, end); next.n > 0;) {
            const Block block = next;
            entry += block.n;
            next = block_at(entry, end);
            found |= add_block(block, next);
        }
        return found;
    }

    // Writes the result of each row: adds the attention sink, if any, and divides by the sum. A row that sees no key
    // gets zeros.
    void finish() const {
        for (int row = 0; row < n_rows; row++) {
            const int64_t head = first_head + row % n_heads, token = first_token + row / n_heads;
            float * values_of_row = all.values + row * s.n_value;
            if (s.sinks) {
                float score = ((const float *)s.sinks->data)[head], one = 1;
                memset(part.values, 0, s.n_value * sizeof(float));
                s.kernels->merge({all.max + row, all.sum + row, values_of_row}, {&score, &one, part.values}, 1,
                                 s.n_value);
            }
            const float factor = all.sum[row] == 0 ? 0 : 1 / all.sum[row];
            float * to =
                (float *)((char *)s.out->data + ((stream * s.out->ne[2] + token) * s.out->ne[1] + head) * s.out->nb[1]);
            for (int64_t d = 0; d < s.n_value; d++) { to[d] = values_of_row[d] * factor; }
        }
    }
};

// Returns the addresses in `memory` that hold the sums of one part of a tile until all parts have been computed.
AttentionSums sums_at(const Shape & s, float * memory) {
    const int64_t n = s.n_heads * s.n_of_tokens;
    return {memory, memory + n, memory + 2 * n};
}

void compute_tiles(const ggml_compute_params * params, const Shape & s, float * scratch) {
    for (int64_t i = params->ith; i < s.n_tiles; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        Tile tile(s, s.n_tiles - 1 - i, scratch); // the last tokens come first, because they usually see the most keys
        tile.load_queries();
        tile.clear(tile.all);
        for (int64_t part = 0; part < tile.n_parts; part++) {
            if (tile.add_part(part)) { s.kernels->merge(tile.all, tile.part, tile.n_rows, s.n_value); }
        }
        tile.finish();
    }
}

void compute_parts(const ggml_compute_params * params, const Shape & s, float * scratch, float * parts) {
    const int64_t n = s.n_tiles * s.n_parts;
    for (int64_t i = params->ith; i < n; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        Tile tile(s, i / s.n_parts, scratch);
        tile.load_queries();
        const AttentionSums to = sums_at(s, parts + i * s.of_part());
        const bool found = tile.add_part(i % s.n_parts);
        std::copy_n(tile.part.sum, tile.n_rows, to.sum);
        if (found) {
            std::copy_n(tile.part.max, tile.n_rows, to.max);
            std::copy_n(tile.part.values, tile.n_rows * s.n_value, to.values);
        }
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < s.n_tiles; i += params->nth) {
        Tile tile(s, i, scratch);
        tile.clear(tile.all);
        for (int64_t part = 0; part < tile.n_parts; part++) {
            const AttentionSums of_part = sums_at(s, parts + (i * s.n_parts + part) * s.of_part());
            if (std::any_of(of_part.sum, of_part.sum + tile.n_rows, [](float sum) { return sum != 0; })) {
                s.kernels->merge(tile.all, of_part, tile.n_rows, s.n_value);
            }
        }
        tile.finish();
    }
}

// Returns the kernels that compute this operation; nullptr: upstream's kernels compute it.
const AttentionKernels * kernels_of(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const AttentionKernels * kernels = processor_kernels() ? processor_kernels()->attention : nullptr;
    const bool known = kernels && find_to_float(*kernels, k->type) && find_to_float(*kernels, v->type) &&
                       q->type == GGML_TYPE_F32 && k->ne[0] % 16 == 0 && v->ne[0] % 16 == 0;
    const bool fits = k->ne[2] == v->ne[2] && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] &&
                      (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1));
    return known && fits ? kernels : nullptr;
}

} // namespace
} // namespace moegguf::kernels

size_t moegguf_attention_work_size(const ggml_tensor * op, int n_threads) {
    using namespace moegguf::kernels;
    const AttentionKernels * kernels = kernels_of(op);
    return kernels ? Shape(op, *kernels).work_bytes(n_threads) : 0;
}

bool moegguf_attention(const ggml_compute_params * params, ggml_tensor * op) {
    using namespace moegguf::kernels;
    const AttentionKernels * kernels = params->use_ref ? nullptr : kernels_of(op);
    if (!kernels) { return false; }
    const Shape shape(op, *kernels);
    if (params->ith == 0) { ggml_threadpool_chunk_set(params->threadpool, params->nth); }
    ggml_barrier(params->threadpool);
    float * scratch = (float *)params->wdata + params->ith * shape.scratch();
    if (shape.divides_parts(params->nth)) {
        compute_parts(params, shape, scratch, (float *)params->wdata + params->nth * shape.scratch());
    } else {
        compute_tiles(params, shape, scratch);
    }
    return true;
}

void moegguf_order_candidates(const ggml_tensor * scores, int64_t row, int32_t * candidates) {
    using namespace moegguf::kernels;
    const int64_t n = scores->ne[0];
    const Listed listed = find_lists(scores, ggml_nrows(scores));
    if (listed.lists && listed.n_cells == n) {
        const moegguf::CellList list = listed.lists->of_token(row);
        std::vector<bool> is_listed(n);
        int32_t * to = candidates;
        for (int64_t i = 0; i < list.n; i++) {
            *to++ = list.cells[i].second;
            is_listed[list.cells[i].second] = true;
        }
        for (int32_t cell = 0; cell < n; cell++) {
            if (!is_listed[cell]) { *to++ = cell; }
        }
    }
    const auto * of_row = (const float *)((const char *)scores->data + row * scores->nb[1]);
    const auto is_seen = [of_row](int32_t candidate) { return of_row[candidate] != -INFINITY; };
    std::stable_partition(candidates, candidates + n, is_seen);
}
