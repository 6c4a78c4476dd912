#include "cpu_misses/expert_chain.h"

#include "nodes.h"

#include "ggml-impl.h" // ggml_cgraph is not public; patches/README.md lists what we lean on

#include <algorithm>

namespace moegguf {
namespace {

// What each row computes from the same row of its sources, element by element or half by half.
bool computes_rows(ggml_op op) {
    switch (op) {
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_CLAMP:
        case GGML_OP_SCALE:
        case GGML_OP_SQR:
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
            return true;
        default:
            return false;
    }
}

// A part of each row.
bool is_part_of_rows(const ggml_tensor * view) {
    const ggml_tensor * of = view->src[0];
    const bool same_rows = view->ne[1] == of->ne[1] && view->ne[2] == of->ne[2] && view->ne[3] == of->ne[3] &&
                           view->nb[0] == of->nb[0] && view->nb[1] == of->nb[1] && view->nb[2] == of->nb[2];
    return same_rows && view->view_src == of && view->view_offs + view->ne[0] * view->nb[0] <= of->nb[1];
}

// Reads one layer's chain, from the product with its down matrices back to its input.
class ChainReader {
  public:
    ChainReader(const ggml_cgraph & graph, const ggml_tensor * down, const Layer & layer)
        : graph_(graph),
          down_(*down),
          ready_ids_(down->src[2]),
          ids_(ready_ids_->src[0]),
          n_expert_(layer.n_expert) {}

    // Why the CPU cannot compute the same; empty: it can.
    std::string read(ExpertChain & chain) {
        chain_ = &chain;
        if (step_of(down_.src[1]) >= 0 && !only_used_here()) {
            why_ = "has an adapter on its down matrices";
        }
        return why_;
    }

  private:
    // Of what is computed so far; -1: it cannot be.
    int step_of(const ggml_tensor * t) {
        const auto known = std::find(tensors_.begin(), tensors_.end(), t);
        if (known != tensors_.end()) {
            return int(known - tensors_.begin());
        }
        ChainStep step;
        step.op = t->op;
        step.ne0 = t->ne[0];
        memcpy(step.op_params, t->op_params, sizeof(step.op_params));
        if (!read_step(t, step)) {
            if (why_.empty()) {
                why_ = std::string("has an adapter or an operation that the CPU does not repeat (") + ggml_op_desc(t) +
                       ")";
            }
            return -1;
        }
        chain_->steps.push_back(std::move(step));
        tensors_.push_back(t);
        return int(tensors_.size()) - 1;
    }

    bool read_step(const ggml_tensor * t, ChainStep & step) {
        if (t->op == GGML_OP_MUL_MAT_ID) {
            return read_product(t, step);
        }
        if (t->op == GGML_OP_ADD_ID) { // a bias
            return t->src[2] == ids_->src[0] && find_rows(t->src[1], t->ne[0], step.rows) && read_source(t, 0, step);
        }
        if (t->op == GGML_OP_MUL && is_scale(t->src[1])) {
            return find_rows(t->src[1]->src[0]->src[0], 1, step.rows) && read_source(t, 0, step);
        }
        if (t->op == GGML_OP_VIEW) {
            step.offset = t->view_offs;
            memset(step.op_params, 0, sizeof(step.op_params));
            return is_part_of_rows(t) && read_source(t, 0, step);
        }
        const bool one = !t->src[1], alike = one || ggml_are_same_shape(t->src[0], t->src[1]);
        const bool overwrites = t->view_src && n_uses(t->src[0]) > 1; // what others may read before or after
        return computes_rows(t->op) && alike && !overwrites && !t->src[2] && read_source(t, 0, step) &&
               (one || read_source(t, 1, step));
    }

    bool read_source(const ggml_tensor * t, int i, ChainStep & step) {
        step.source[i] = step_of(t->src[i]);
        return step.source[i] >= 0;
    }

    bool read_product(const ggml_tensor * t, ChainStep & step) {
        constexpr std::pair<const char *, moegguf_kind> kinds[] = {
            {"ffn_gate_up_exps", MOEGGUF_GATE_UP}, {"ffn_gate_exps", MOEGGUF_GATE}, {"ffn_up_exps", MOEGGUF_UP}};
        const auto found = std::find_if(std::begin(kinds), std::end(kinds),
                                        [&](const auto & kind) { return strstr(t->src[0]->name, kind.first); });
        if (t->src[2] != ready_ids_ || found == std::end(kinds)) {
            return false;
        }
        step.kind = found->second;
        memset(step.op_params, 0, sizeof(step.op_params)); // precision is the device's affair
        if (!is_input(t->src[1])) {
            why_ = "changes its input before its experts";
        }
        return why_.empty();
    }

    // What the layer's input is, but for its shape: itself, or multiplied with the router's weights.
    bool is_input(const ggml_tensor * t) {
        const bool weighted = t->op == GGML_OP_MUL && t->src[1] == ids_->src[1] && t->src[0]->op == GGML_OP_REPEAT;
        const ggml_tensor * input = weighted ? t->src[0]->src[0] : t;
        chain_->weights_input = weighted;
        return input == ids_->src[2] || (input->op == GGML_OP_RESHAPE && input->src[0] == ids_->src[2]);
    }

    // One value of each choice's expert, as build_lora_mm_id in llama-graph.cpp has them.
    bool is_scale(const ggml_tensor * t) const {
        return t && t->op == GGML_OP_GET_ROWS && t->src[1] == ids_->src[0] && t->src[0]->op == GGML_OP_REPEAT &&
               t->src[0]->src[0]->op == GGML_OP_RESHAPE;
    }

    // Their values are read when the chain is kept.
    bool find_rows(const ggml_tensor * t, int64_t n, ExpertRows & rows) const {
        const ggml_tensor * of = t && t->op == GGML_OP_RESHAPE ? t->src[0] : t;
        rows.tensor = of;
        rows.n = n;
        return of && of->op == GGML_OP_NONE && of->type == GGML_TYPE_F32 && ggml_is_contiguous(of) && of->buffer &&
               ggml_nelements(of) == n * n_expert_;
    }

    int n_uses(const ggml_tensor * t) const { return graph_.use_counts[ggml_hash_find(&graph_.visited_hash_set, t)]; }

    // Nothing else reads what the chain computes: only the rows behind down are replaced.
    bool only_used_here() const {
        const auto uses_of = [&](size_t step) {
            int n = step + 1 == tensors_.size(); // by down
            for (const ChainStep & other : chain_->steps) {
                n += (int)std::count(std::begin(other.source), std::end(other.source), (int)step);
            }
            return n;
        };
        for (size_t i = 0; i < tensors_.size(); i++) {
            if (n_uses(tensors_[i]) != uses_of(i)) {
                return false;
            }
        }
        return true;
    }

    const ggml_cgraph & graph_;
    const ggml_tensor & down_;
    const ggml_tensor * const ready_ids_;
    const ggml_tensor * const ids_;
    const int64_t n_expert_;
    ExpertChain * chain_ = nullptr;
    std::vector<const ggml_tensor *> tensors_; // of its steps
    std::string why_;
};

ggml_tensor * over(ggml_context * ctx, int64_t n, const float * values) {
    ggml_set_no_alloc(ctx, true);
    ggml_tensor * t = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n);
    ggml_set_no_alloc(ctx, false);
    t->data = (void *)values;
    return t;
}

ggml_tensor * build_step(ggml_context * ctx, const ChainStep & step, int expert, ggml_tensor * a, ggml_tensor * b) {
    if (step.rows.tensor) {
        ggml_tensor * row = over(ctx, step.rows.n, step.rows.of(expert));
        return step.op == GGML_OP_ADD_ID ? ggml_add(ctx, a, row) : ggml_mul(ctx, a, row);
    }
    if (step.op == GGML_OP_VIEW) {
        return ggml_view_2d(ctx, a, step.ne0, a->ne[1], a->nb[1], step.offset);
    }
    ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, step.ne0, a->ne[1]);
    t->op = step.op;
    t->src[0] = a;
    t->src[1] = b;
    memcpy(t->op_params, step.op_params, sizeof(step.op_params));
    return t;
}

} // namespace

bool ChainStep::operator==(const ChainStep & other) const {
    return op == other.op && kind == other.kind && source[0] == other.source[0] && source[1] == other.source[1] &&
           ne0 == other.ne0 && offset == other.offset && rows.tensor == other.rows.tensor &&
           memcmp(op_params, other.op_params, sizeof(op_params)) == 0;
}

bool ExpertChain::operator==(const ExpertChain & other) const {
    return il == other.il && weights_input == other.weights_input && steps == other.steps;
}

size_t ExpertChain::n_nodes() const {
    return 2 * steps.size() + MOEGGUF_MAX_KINDS + 2; // values of experts, matrices, the input, the product with down
}

size_t ExpertChain::row_floats() const {
    size_t n = 0;
    for (const ChainStep & step : steps) {
        n += step.ne0;
    }
    return n;
}

void ExpertChain::read_rows() {
    for (ChainStep & step : steps) {
        if (const ggml_tensor * t = step.rows.tensor) {
            step.rows.values.resize(ggml_nelements(t));
            ggml_backend_tensor_get(t, step.rows.values.data(), 0, ggml_nbytes(t));
        }
    }
}

const ExpertChain * chain_of(const ggml_tensor * ids) {
    return op_pointer<const ExpertChain>(ids, supply_word);
}

void set_chain(ggml_tensor * ids, const ExpertChain * chain) {
    set_op_pointer(ids, supply_word, chain);
}

bool multiplies_down(const ggml_tensor * t, int il) {
    return t->op == GGML_OP_MUL_MAT_ID && layer_of(t->src[1], down_node) == il;
}

void read_chains(const ggml_cgraph & graph, const Layout & layout, const Serves & serves, const FoundChain & found) {
    for (int i = 0; i < graph.n_nodes; i++) {
        const ggml_tensor * t = graph.nodes[i];
        const int il = t->op == GGML_OP_MUL_MAT_ID ? layer_of(t->src[1], down_node) : -1;
        if (il < 0 || layer_of(t->src[2], ready_node) != il) {
            continue;
        }
        ggml_tensor * ids = t->src[2]->src[0];
        if (serves(il, (int)ids->ne[1])) {
            ExpertChain chain;
            chain.il = il;
            const std::string why = ChainReader(graph, t, layout.layers[il]).read(chain);
            found(ids, std::move(chain), why);
        }
    }
}

ggml_tensor * build_chain(ggml_context * ctx, const ExpertChain & chain, int expert, ggml_tensor * const * w,
                          ggml_tensor * x) {
    std::vector<ggml_tensor *> made;
    for (const ChainStep & step : chain.steps) {
        const auto source = [&](int i) { return step.source[i] < 0 ? nullptr : made[step.source[i]]; };
        const bool product = step.op == GGML_OP_MUL_MAT_ID;
        made.push_back(product ? ggml_mul_mat(ctx, w[step.kind], x)
                               : build_step(ctx, step, expert, source(0), source(1)));
    }
    return ggml_mul_mat(ctx, w[MOEGGUF_DOWN], made.back());
}

} // namespace moegguf
