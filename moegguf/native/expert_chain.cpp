#include "expert_chain.h"

#include "nodes.h"
#include "store.h"

#include "ggml-impl.h" // ggml_cgraph is not public; patches/README.md lists what we lean on

#include <algorithm>

namespace moegguf {
namespace {

// Words of op_params. The first is moegguf_slot_ids' own.
constexpr int chain_word = 1, store_word = 8;
static_assert(sizeof(ExpertChain) <= (store_word - chain_word) * sizeof(int32_t), "the store's address comes behind");
static_assert(store_word * sizeof(int32_t) + sizeof(Store *) <= GGML_MAX_OP_PARAMS, "both fit");

Store * store_of_ids(const ggml_tensor * ids) {
    Store * store;
    memcpy(&store, ids->op_params + store_word, sizeof(store));
    return store;
}

// The product with matrices of one kind that a tensor is, or is half of.
const ggml_tensor * product_of(const ggml_tensor * t) {
    const ggml_tensor * product = t && t->op == GGML_OP_VIEW ? t->src[0] : t;
    return product && product->op == GGML_OP_MUL_MAT_ID ? product : nullptr;
}

bool is_product(const ggml_tensor * t, const ggml_tensor * ready_ids, const char * matrices) {
    const ggml_tensor * product = product_of(t);
    return product && product->src[2] == ready_ids && strstr(product->src[0]->name, matrices);
}

bool is_gated(const ggml_tensor * activation, const ggml_tensor * ready_ids) {
    const ggml_tensor *gate = activation->src[0], *up = activation->src[1];
    if (is_product(gate, ready_ids, "ffn_gate_up_exps")) {
        return up && up->op == GGML_OP_VIEW && up->src[0] == gate->src[0] && gate->view_offs == 0;
    }
    return is_product(gate, ready_ids, "ffn_gate_exps") && is_product(up, ready_ids, "ffn_up_exps");
}

// What the layer's input is, but for its shape: itself, or multiplied with the router's weights.
bool is_input(const ggml_tensor * t, const ggml_tensor * ids, bool & weighted) {
    weighted = t->op == GGML_OP_MUL && t->src[1] == ids->src[1] && t->src[0]->op == GGML_OP_REPEAT;
    const ggml_tensor * input = weighted ? t->src[0]->src[0] : t;
    return input == ids->src[2] || (input->op == GGML_OP_RESHAPE && input->src[0] == ids->src[2]);
}

// Why the CPU cannot compute the same; empty: it can.
std::string read_chain(const ggml_cgraph & graph, const ggml_tensor * down, ExpertChain & chain) {
    const ggml_tensor *activation = down->src[1], *ready_ids = down->src[2], *ids = ready_ids->src[0];
    if (activation->op == GGML_OP_GLU && is_gated(activation, ready_ids)) {
        chain.kind = ExpertChain::gated;
    } else if (activation->op == GGML_OP_UNARY && is_product(activation->src[0], ready_ids, "ffn_up_exps")) {
        chain.kind = ExpertChain::plain;
    } else {
        return "has biases, scales, adapters or an activation that the CPU does not repeat";
    }
    memcpy(chain.activation, activation->op_params, sizeof(chain.activation));
    bool weighted = false;
    const ggml_tensor * product = product_of(activation->src[0]);
    if (!is_input(product->src[1], ids, weighted)) {
        return "changes its input before its experts";
    }
    chain.weights_input = weighted;
    const bool shared = std::any_of(graph.nodes, graph.nodes + graph.n_nodes, [&](const ggml_tensor * t) {
        return t != down && std::find(std::begin(t->src), std::end(t->src), activation) != std::end(t->src);
    });
    return shared ? "has an adapter on its down matrices" : "";
}

} // namespace

void mark_chain(ggml_tensor * ids, Store & store) {
    const Store * address = &store;
    memcpy(ids->op_params + store_word, &address, sizeof(address));
}

ExpertChain chain_of(const ggml_tensor * ids) {
    ExpertChain chain;
    memcpy((void *)&chain, ids->op_params + chain_word, sizeof(chain));
    return chain;
}

bool multiplies_down(const ggml_tensor * t, int il) {
    return t->op == GGML_OP_MUL_MAT_ID && layer_of(t->src[1], down_node) == il;
}

void read_chains(const ggml_cgraph & graph) {
    Store * store = nullptr;
    int n_layers = 0;
    std::string note;
    for (int i = 0; i < graph.n_nodes; i++) {
        const ggml_tensor * t = graph.nodes[i];
        const int il = t->op == GGML_OP_MUL_MAT_ID ? layer_of(t->src[1], down_node) : -1;
        if (il < 0 || layer_of(t->src[2], ready_node) != il) {
            continue;
        }
        ggml_tensor * ids = t->src[2]->src[0];
        store = store_of_ids(ids);
        if (!store->missed.serves(il, (int)ids->ne[1])) {
            continue;
        }
        ExpertChain chain;
        const std::string why = read_chain(graph, t, chain);
        if (!why.empty()) {
            chain.kind = ExpertChain::unknown;
            note = note.empty() ? "layer " + std::to_string(il) + " " + why : note;
        }
        n_layers += why.empty();
        memcpy(ids->op_params + chain_word, &chain, sizeof(chain));
    }
    if (store && (n_layers > 0 || !note.empty())) {
        store->missed.set_layers(n_layers, note);
    }
}

ggml_tensor * build_chain(ggml_context * ctx, const ExpertChain & chain, ggml_tensor * const * w, ggml_tensor * x) {
    ggml_tensor * activation = nullptr;
    if (chain.kind == ExpertChain::plain) {
        activation = ggml_unary(ctx, ggml_mul_mat(ctx, w[MOEGGUF_UP], x), (ggml_unary_op)chain.activation[0]);
    } else if (w[MOEGGUF_GATE_UP]) {
        ggml_tensor * both = ggml_mul_mat(ctx, w[MOEGGUF_GATE_UP], x);
        const int64_t n_ff = both->ne[0] / 2;
        const auto half = [&](int i) {
            return ggml_view_2d(ctx, both, n_ff, both->ne[1], both->nb[1], i * n_ff * both->nb[0]);
        };
        activation = ggml_glu_split(ctx, half(0), half(1), (ggml_glu_op)chain.activation[0]);
    } else {
        ggml_tensor * up = ggml_mul_mat(ctx, w[MOEGGUF_UP], x);
        activation = ggml_glu_split(ctx, ggml_mul_mat(ctx, w[MOEGGUF_GATE], x), up, (ggml_glu_op)chain.activation[0]);
    }
    memcpy(activation->op_params, chain.activation, sizeof(chain.activation)); // its limits, too
    return ggml_mul_mat(ctx, w[MOEGGUF_DOWN], activation);
}

} // namespace moegguf
