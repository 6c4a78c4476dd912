// multiply.cpp: computes MUL_MAT with quantised or float weights, and MUL_MAT_ID with quantised weights, divided among
// threads. For quantised weights, activations are quantised row by row, and several rows are multiplied together as a
// tile. The bits of a row's result depend neither on the tile nor on the number of threads.
#include "multiply.h"

#include "ggml-cpu-impl.h"
#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moegguf::kernels {
namespace {

#if defined(__x86_64__)
// Returns whether the processor has F16C. Older compilers do not accept __builtin_cpu_supports("f16c").
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Checks each instruction set with which CMakeLists.txt compiles avx2.cpp and avx512.cpp.
const Kernels * detect() {
#if defined(__x86_64__)
    const char * forced = getenv("MOEGGUF_KERNELS");
    const auto is = [forced](const char * name) { return forced && strcmp(forced, name) == 0; };
    __builtin_cpu_init();
    if (!is("upstream") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        const bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512vnni");
        return has_512 && !is("avx2") ? &avx512 : &avx2;
    }
#endif
    return nullptr;
}

constexpr int max_tile = 16;
constexpr int64_t part_bytes = 256 << 10; // size in bytes of the weights that are multiplied by all rows at a time

const Kernel * kernel_of_interleaved(ggml_type type) {
    const Kernels * kernels = processor_kernels();
    return kernels ? kernels->of_interleaved(type) : nullptr;
}

const Kernel * kernel_of_interleaved(const ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes) {
    return n_cols == 8 && interleaved_bytes == 8 ? kernel_of_interleaved(op->src[0]->type) : nullptr;
}

const Kernel * kernel_of_plain(const ggml_tensor * op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const Kernels * kernels = processor_kernels();
    const bool is_plain = x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
                          w->nb[0] == ggml_type_size(w->type) && w->ne[3] == x->ne[3];
    return kernels && is_plain ? kernels->of_plain(w->type) : nullptr;
}

MultiplyFloats kernel_of_floats(const ggml_tensor * op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const Kernels * kernels = processor_kernels();
    const bool is_plain = op->op == GGML_OP_MUL_MAT && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
                          w->nb[0] == ggml_type_size(w->type);
    return kernels && is_plain ? kernels->of_floats(w->type) : nullptr;
}

// Returns the number of rows of the next tile if n_left rows are left. The number may exceed n_left: the last row is
// then repeated.
int next_tile(int64_t n_left, int max_rows) {
    int n = 1;
    while (n < n_left && n < max_rows) { n *= 2; }
    return 4 * n_left < 3 * n ? n / 2 : n;
}

// Returns the total number of rows in the tiles into which n_rows rows are divided, including repeated rows.
int64_t tiled_rows(int64_t n_rows, int max_rows) {
    int64_t n_tiled = 0;
    for (int64_t row = 0; row < n_rows;) {
        const int n_tile = next_tile(n_rows - row, max_rows);
        row += n_tile, n_tiled += n_tile;
    }
    return n_tiled;
}

size_t quantized_bytes(const Kernel * kernel, int64_t n) { return n / kernel->block_values * kernel->block_bytes; }

// The size of a panel of unpacked columns. A panel has about part_bytes, which fit into a second-level cache, but at
// least 16 columns.
struct PanelSize {
    size_t column_bytes;
    int64_t n_cols;

    PanelSize(const Panels & panels, int64_t n)
        : column_bytes(n / panels.kernel->block_values * panels.block_bytes),
          n_cols(std::max<int64_t>(16, part_bytes / column_bytes / 16 * 16)) {}
};

size_t panel_bytes(const Kernel * kernel, int64_t n) {
    if (!kernel->panels) { return 0; }
    const PanelSize size(*kernel->panels, n);
    return GGML_PAD(size.n_cols * size.column_bytes, 64);
}

// Weight columns that are multiplied by all rows before the next columns are multiplied.
struct Columns {
    const Kernel * kernel;
    const char * weights;
    size_t row_bytes; // size of a weight row in bytes
    int64_t n;        // number of values in a row
    int64_t first, n_cols;
    const char * soon; // weights that are unpacked next; nullptr: none

    // Multiplies a tile of n_rows rows by these columns. out: for each row, the address of the first column's result.
    // is_first: also prefetches `soon`.
    void multiply(const char * tile, int n_rows, float * const * out, bool is_first) const {
        kernel->multiply(weights, row_bytes, n_cols, tile, n_rows, n, out, is_first ? soon : nullptr);
    }
};

// A weight matrix, and the kernel that multiplies by it.
struct Product {
    const Panels * panels; // nullptr: weights are multiplied without being unpacked
    const Kernel * kernel;
    const char * weights;
    size_t row_bytes; // size of a weight row in bytes
    int64_t n;        // number of values in a row

    Product(const Kernel * of_weights, const ggml_tensor * w, int64_t n_rows)
        : panels(of_weights->panels && n_rows >= of_weights->panels->least_rows ? of_weights->panels : nullptr),
          kernel(panels ? panels->kernel : of_weights),
          weights((const char *)w->data),
          row_bytes(w->nb[1]),
          n(w->ne[0]) {}

    size_t quantized() const { return quantized_bytes(kernel, n); } // size of a quantised activation row in bytes

    // Calls visit() once with columns [first, last), or once with each of their unpacked panels. panel: memory for the
    // unpacked weights.
    template <class Visit>
    void for_each_part(int64_t first, int64_t last, char * panel, Visit visit) const {
        if (!panels) {
            return visit(Columns{kernel, weights + first * row_bytes, row_bytes, n, first, last - first, nullptr});
        }
        const PanelSize size(*panels, n);
        for (int64_t col = first; col < last; col += size.n_cols) {
            const int64_t n_cols = std::min(size.n_cols, last - col);
            panels->unpack(weights + col * row_bytes, row_bytes, n_cols, n, panel);
            visit(Columns{kernel, panel, size.column_bytes, n, col, n_cols, weights + (col + n_cols) * row_bytes});
        }
    }
};

// The columns of a matrix, divided among threads. Each thread has a share of successive columns, which it takes one
// part at a time. A thread that has finished its share takes parts of other shares, because another thread may be
// slower.
struct Shares {
    int64_t * taken; // [n_threads] number of parts taken from each share
    int64_t n_threads, n_parts, n_cols;

    bool next(int64_t thread, int64_t & first, int64_t & last) const {
        for (int64_t i = 0; i < n_threads; i++) {
            const int64_t share = (thread + i) % n_threads;
            for (int64_t part; (part = __atomic_fetch_add(&taken[share], 1, __ATOMIC_RELAXED)) < n_parts;) {
                first = begin(share * n_parts + part), last = begin(share * n_parts + part + 1);
                if (first < last) { return true; }
            }
        }
        return false;
    }

  private:
    int64_t begin(int64_t part) const { // first column of a part: a multiple of 16, or n_cols
        return std::min((part * n_cols / (n_parts * n_threads) + 15) / 16 * 16, n_cols);
    }
};

// ---- MUL_MAT ----

// Returns row i of a tensor. The rows of all its planes are numbered consecutively.
float * row_of(const ggml_tensor * t, int64_t i) {
    const int64_t plane = i / t->ne[1];
    return (float *)((char *)t->data + i % t->ne[1] * t->nb[1] + plane % t->ne[2] * t->nb[2] +
                     plane / t->ne[2] * t->nb[3]);
}

// The work memory of a MUL_MAT. Each of its n_matrices weight matrices is multiplied by n_rows successive rows.
struct Matrices {
    int64_t n_matrices, n_rows;
    int64_t * taken; // [n_matrices][n_threads] Shares::taken of each matrix
    char * panels;   // [n_threads] memory for a panel
    char * tiles;    // [n_matrices] quantised activations, in tiles
    size_t taken_bytes, tiles_bytes, size;

    Matrices(const ggml_tensor * op, const Kernel * kernel, int n_threads, void * memory) {
        const ggml_tensor * w = op->src[0];
        n_matrices = w->ne[2] * w->ne[3], n_rows = ggml_nrows(op->src[1]) / n_matrices;
        taken_bytes = GGML_PAD(n_matrices * n_threads * sizeof(int64_t), 64);
        tiles_bytes =
            tiled_rows(n_rows, Product(kernel, w, n_rows).kernel->max_rows) * quantized_bytes(kernel, w->ne[0]);
        taken = (int64_t *)memory;
        panels = (char *)memory + taken_bytes;
        tiles = panels + n_threads * panel_bytes(kernel, w->ne[0]);
        size = tiles + n_matrices * tiles_bytes - (char *)memory;
    }
};

// Quantises n_rows activation rows, starting at row `first`, into tiles. Each thread quantises some of the rows.
void quantize_tiles(const ggml_compute_params * params, const ggml_tensor * x, const Product & p, int64_t first,
                    int64_t n_rows, char * tiles) {
    for (int64_t row = 0, tile = first; row < n_rows;) {
        const int n_tile = next_tile(n_rows - row, p.kernel->max_rows);
        for (int r = 0; r < n_tile; r++) {
            if ((tile + r) % params->nth == params->ith) {
                p.kernel->quantize(row_of(x, first + std::min(row + r, n_rows - 1)), p.n,
                                   tiles + r * p.kernel->block_bytes, n_tile * p.kernel->block_bytes);
            }
        }
        row += n_tile, tile += n_tile, tiles += n_tile * p.quantized();
    }
}

// Multiplies weight columns by n_rows rows in tiles. result_of(i) returns the address of row i of the result.
template <class ResultOf>
void multiply_tiles(const Columns & columns, const char * tile, int64_t n_rows, ResultOf result_of) {
    for (int64_t row = 0; row < n_rows;) {
        const int n_tile = next_tile(n_rows - row, columns.kernel->max_rows);
        float * out[max_tile];
        for (int r = 0; r < n_tile; r++) { out[r] = result_of(std::min(row + r, n_rows - 1)) + columns.first; }
        columns.multiply(tile, n_tile, out, row == 0);
        row += n_tile, tile += n_tile * quantized_bytes(columns.kernel, columns.n);
    }
}

void mul_mat(const ggml_compute_params * params, ggml_tensor * op, const Kernel * kernel) {
    const ggml_tensor * w = op->src[0];
    const Matrices m(op, kernel, params->nth, params->wdata);
    GGML_ASSERT(params->wsize >= m.size);
    Product p(kernel, w, m.n_rows);
    for (int64_t i = 0; i < m.n_matrices; i++) {
        quantize_tiles(params, op->src[1], p, i * m.n_rows, m.n_rows, m.tiles + i * m.tiles_bytes);
    }
    if (params->ith == 0) { memset(m.taken, 0, m.taken_bytes); }
    ggml_barrier(params->threadpool);

    char * panel = m.panels + params->ith * panel_bytes(kernel, p.n);
    const int64_t n_parts = std::max<int64_t>(4, w->ne[1] * p.row_bytes / part_bytes / params->nth);
    for (int64_t i = 0; i < m.n_matrices; i++) {
        p.weights = (const char *)w->data + i % w->ne[2] * w->nb[2] + i / w->ne[2] * w->nb[3];
        const Shares shares = {m.taken + i * params->nth, params->nth, n_parts, w->ne[1]};
        for (int64_t first, last; shares.next(params->ith, first, last);) {
            p.for_each_part(first, last, panel, [&](const Columns & columns) {
                multiply_tiles(columns, m.tiles + i * m.tiles_bytes, m.n_rows,
                               [&](int64_t row) { return row_of(op, i * m.n_rows + row); });
            });
        }
    }
}

// ---- MUL_MAT with float weights ----

constexpr int64_t float_cols = 64; // number of weight columns that a thread takes at a time

// Computes columns [first, last) of a plane of the result: the product of an activation matrix and a weight matrix.
// Several planes may share a weight matrix.
void multiply_plane(const ggml_tensor * op, MultiplyFloats multiply, int64_t plane, int64_t first, int64_t last) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const int64_t i2 = plane % op->ne[2], i3 = plane / op->ne[2];
    const char * weights =
        (const char *)w->data + i2 * w->ne[2] / x->ne[2] * w->nb[2] + i3 * w->ne[3] / x->ne[3] * w->nb[3];
    const float * rows[max_tile];
    float * out[max_tile];
    for (int64_t row = 0; row < op->ne[1]; row += max_tile) {
        const int n_rows = (int)std::min<int64_t>(max_tile, op->ne[1] - row);
        for (int r = 0; r < n_rows; r++) {
            rows[r] = (const float *)((const char *)x->data + (row + r) * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
            out[r] = (float *)((char *)op->data + (row + r) * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3]) + first;
        }
        multiply(weights + first * w->nb[1], w->nb[1], last - first, rows, n_rows, w->ne[0], out);
    }
}

void mul_mat_floats(const ggml_compute_params * params, ggml_tensor * op, MultiplyFloats multiply) {
    if (params->ith == 0) { ggml_threadpool_chunk_set(params->threadpool, params->nth); }
    ggml_barrier(params->threadpool);
    const int64_t of_plane = (op->ne[0] + float_cols - 1) / float_cols, n_parts = of_plane * op->ne[2] * op->ne[3];
    for (int64_t part = params->ith; part < n_parts; part = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t first = part % of_plane * float_cols;
        multiply_plane(op, multiply, part / of_plane, first, std::min(first + float_cols, op->ne[0]));
    }
}

// ---- MUL_MAT_ID ----

struct Choice {
    int32_t i, token; // index of the expert among the token's experts, and index of the token
};

constexpr int64_t most_gathered_rows = 256; // largest number of choices whose activations a thread gathers at once

// The work memory of a MUL_MAT_ID.
struct Work {
    char * rows;      // quantised activations
    char * tiles;     // [n_threads] memory for the tiles of most_gathered_rows rows
    char * panels;    // [n_threads] memory for a panel
    int64_t * n_rows; // [n_expert] number of rows that are multiplied by each expert
    int64_t * taken;  // [n_expert][n_threads] Shares::taken of each expert
    int64_t * end;    // [n_expert] index just past the expert's last entry in `choices`
    Choice * choices; // the choices of all tokens, ordered by expert
    size_t size;

    Work(const ggml_tensor * op, const Kernel * kernel, int n_threads, void * memory) {
        const ggml_tensor * x = op->src[1];
        const size_t row = quantized_bytes(kernel, x->ne[0]);
        char * at = (char *)memory;
        const auto take = [&at](size_t n) {
            char * begin = at;
            at += GGML_PAD(n, 64);
            return begin;
        };
        rows = take(ggml_nrows(x) * row);
        tiles = take(n_threads * most_gathered_rows * row);
        panels = take(n_threads * panel_bytes(kernel, x->ne[0]));
        const int64_t n_expert = op->src[0]->ne[2];
        n_rows = (int64_t *)take(n_expert * sizeof(int64_t));
        taken = (int64_t *)take(n_expert * n_threads * sizeof(int64_t));
        end = (int64_t *)take(n_expert * sizeof(int64_t));
        choices = (Choice *)take(ggml_nelements(op->src[2]) * sizeof(Choice));
        size = at - (char *)memory;
    }
};

template <class Visit>
void for_each_choice(const ggml_tensor * ids, Visit visit) {
    for (int32_t token = 0; token < ids->ne[1]; token++) {
        for (int32_t i = 0; i < ids->ne[0]; i++) {
            visit(*(const int32_t *)((const char *)ids->data + token * ids->nb[1] + i * ids->nb[0]), Choice{i, token});
        }
    }
}

// Sorts the choices of all tokens by expert, and counts the rows of each expert.
void sort_choices(const ggml_tensor * op, const Work & work, int n_threads) {
    const int64_t n_expert = op->src[0]->ne[2];
    memset(work.taken, 0, n_expert * n_threads * sizeof(int64_t));
    memset(work.n_rows, 0, n_expert * sizeof(int64_t));
    for_each_choice(op->src[2], [&](int32_t expert, Choice) {
        GGML_ASSERT(expert >= 0 && expert < n_expert);
        work.n_rows[expert]++;
    });
    for (int64_t expert = 0, n = 0; expert < n_expert; n += work.n_rows[expert++]) { work.end[expert] = n; }
    for_each_choice(op->src[2], [&](int32_t expert, Choice choice) { work.choices[work.end[expert]++] = choice; });
}

// Copies the activations of n_rows choices into `tiles`. Returns the address of the first tile: a single row is a tile
// as it is.
const char * gather_tiles(const ggml_tensor * op, const Kernel * kernel, const Work & work, const Choice * choices,
                          int64_t n_rows, char * tiles) {
    const ggml_tensor * x = op->src[1];
    const size_t bytes = quantized_bytes(kernel, x->ne[0]);
    const auto row_of_choice = [&](int64_t i) {
        const Choice c = choices[std::min(i, n_rows - 1)];
        return work.rows + (c.i % x->ne[1] + c.token * x->ne[1]) * bytes;
    };
    if (n_rows == 1) { return row_of_choice(0); }
    char * tile = tiles;
    for (int64_t row = 0; row < n_rows;) {
        const int n_tile = next_tile(n_rows - row, kernel->max_rows);
        const char * rows[max_tile];
        for (int r = 0; r < n_tile; r++) { rows[r] = row_of_choice(row + r); }
        kernel->gather(rows, n_tile, x->ne[0], tile);
        row += n_tile, tile += n_tile * bytes;
    }
    return tiles;
}

void mul_mat_id(const ggml_compute_params * params, ggml_tensor * op, const Kernel * kernel) {
    const ggml_tensor * w = op->src[0];
    const Work work(op, kernel, params->nth, params->wdata);
    GGML_ASSERT(params->wsize >= work.size);
    const size_t row = quantized_bytes(kernel, w->ne[0]);
    for (int64_t i = params->ith; i < ggml_nrows(op->src[1]); i += params->nth) {
        kernel->quantize(row_of(op->src[1], i), w->ne[0], work.rows + i * row, kernel->block_bytes);
    }
    if (params->ith == 0) { sort_choices(op, work, params->nth); }
    ggml_barrier(params->threadpool);

    ggml_mul_mat_id_order order;
    ggml_mul_mat_id_begin(&order, op, params->nth);
    for (int expert; (expert = ggml_mul_mat_id_next(&order, work.n_rows, (int)w->ne[2], params->ith)) >= 0;) {
        const int64_t n_rows = work.n_rows[expert], n_parts = n_rows < 4 ? 4 : 1;
        Product p(kernel, w, n_rows);
        p.weights += order.at * w->nb[2];
        const Shares shares = {work.taken + expert * params->nth, params->nth, n_parts, w->ne[1]};
        for (int64_t first, last; shares.next(params->ith, first, last);) {
            char * panel = work.panels + params->ith * panel_bytes(kernel, p.n);
            char * tiles = work.tiles + params->ith * most_gathered_rows * row;
            // Panels are multiplied by the same tiles one after another. Without panels, a tile is used only once.
            const int64_t n_gathered = p.panels ? most_gathered_rows : max_tile;
            for (int64_t done = 0; done < n_rows; done += n_gathered) {
                const Choice * choices = work.choices + work.end[expert] - n_rows + done;
                const int64_t n = std::min(n_rows - done, n_gathered);
                const char * tile = gather_tiles(op, p.kernel, work, choices, n, tiles);
                p.for_each_part(first, last, panel, [&](const Columns & columns) {
                    multiply_tiles(columns, tile, n,
                                   [&](int64_t i) { return row_of(op, choices[i].i + choices[i].token * op->ne[1]); });
                });
            }
        }
    }
}

} // namespace

const Kernels * processor_kernels() {
    static const Kernels * found = detect();
    return found;
}

bool has_kernels(ggml_type type) { return kernel_of_interleaved(type) != nullptr; }

static size_t work_size(int n_threads, const ggml_tensor * op, const Kernel * kernel) {
    return op->op == GGML_OP_MUL_MAT ? Matrices(op, kernel, n_threads, nullptr).size
                                     : Work(op, kernel, n_threads, nullptr).size;
}

static void multiply(const ggml_compute_params * params, ggml_tensor * op, const Kernel * kernel) {
    (op->op == GGML_OP_MUL_MAT ? mul_mat : mul_mat_id)(params, op, kernel);
}

bool work_size(int n_threads, const ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes, size_t & size) {
    const Kernel * kernel = kernel_of_interleaved(op, n_cols, interleaved_bytes);
    if (kernel) { size = work_size(n_threads, op, kernel); }
    return kernel != nullptr;
}

bool multiply(ggml_compute_params * params, ggml_tensor * op, int64_t n_cols, int64_t interleaved_bytes) {
    const Kernel * kernel = kernel_of_interleaved(op, n_cols, interleaved_bytes);
    if (kernel) { multiply(params, op, kernel); }
    return kernel != nullptr;
}

} // namespace moegguf::kernels

size_t moegguf_multiply_work_size(const ggml_tensor * op, int n_threads) {
    using namespace moegguf::kernels;
    const Kernel * kernel = kernel_of_plain(op);
    return kernel ? work_size(n_threads, op, kernel) : 0;
}

bool moegguf_multiply(const ggml_compute_params * params, ggml_tensor * op) {
    using namespace moegguf::kernels;
    if (params->use_ref) { return false; }
    if (const Kernel * kernel = kernel_of_plain(op)) {
        multiply(params, op, kernel);
        return true;
    }
    const MultiplyFloats of_floats = kernel_of_floats(op);
    if (of_floats) { mul_mat_floats(params, op, of_floats); }
    return of_floats != nullptr;
}

bool moegguf_get_rows(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * table = op->src[0]->view_src ? op->src[0]->view_src : op->src[0];
    const moegguf_rows * rows = nullptr;
    if (table->op == GGML_OP_NONE) { memcpy(&rows, table->op_params, sizeof(rows)); }
    if (rows && params->ith == 0) { rows->get(rows, op); }
    return rows != nullptr;
}
