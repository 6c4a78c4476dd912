// routing_path.cpp: ExpertFlow's routing-path network (section 3.1). Before the first layer of a token is computed, the
// network predicts the experts of all layers from the ids of this token and of earlier tokens.
//
// The network is a small T5: an encoder over the `window` tokens before a chunk, a decoder over the chunk, token by
// token, and a linear head for each layer. moegguf/controller/predictors/routing_path.py defines the network.
//
// A token costs one step of the decoder, which keeps its keys and values. The encoder runs once per chunk. It normally
// runs when the last layer of the previous chunk's last token has been routed, so that the next token does not wait for
// the encoder. This file writes only its own memory.
#include "predictors/predictor.h"

#include <list>

namespace moegguf {
namespace {

// The matrices of an attention layer, the number of its heads, and their total width.
struct Attention {
    int n_head, width;
    ByteMatrix projection, memory, out;

    Attention(const Arrays & arrays, const std::string & name, int n_embd, bool is_cross)
        : n_head(arrays.integer(name + ".n_head")),
          width((int)(arrays.size(name + ".out.weights") / n_embd)) {
        if (n_head <= 0 || width <= 0 || width % n_head) {
            throw Error(MOEGGUF_INVALID, "the heads of an attention layer must divide its width evenly");
        }
        projection = arrays.matrix(name + ".projection", is_cross ? width : 3 * width, n_embd);
        if (is_cross) { memory = arrays.matrix(name + ".memory", 2 * width, n_embd); }
        out = arrays.matrix(name + ".out", n_embd, width);
    }
};

// Adds a feed-forward block to a network: x += down(relu(up(norm(x)))).
void add_feed_forward(Network & network, const Arrays & arrays, const std::string & name, int n_embd) {
    const int n_ff = (int)(arrays.size(name + ".up.weights") / n_embd);
    network.save().norm().dense(arrays.matrix(name + ".up", n_ff, n_embd), true);
    network.dense(arrays.matrix(name + ".down", n_embd, n_ff)).add();
}

// A block of the encoder. The keys and values of all positions in the window are computed before any position attends
// to them.
struct EncoderBlock {
    Positions window;
    Network enter, leave;

    EncoderBlock(const Arrays & arrays, const std::string & name, int n_embd, int n_window)
        : EncoderBlock(arrays, name, n_embd, n_window, {arrays, name + ".self", n_embd, false}) {}

  private:
    EncoderBlock(const Arrays & arrays, const std::string & name, int n_embd, int n_window, const Attention & self)
        : window(n_window, self.n_head, self.width) {
        enter.norm().dense(self.projection).keep(window);
        leave.attend(window).dense(self.out).add();
        add_feed_forward(leave, arrays, name + ".feed", n_embd);
    }
};

// A block of the decoder. A position attends to itself, to earlier positions of its chunk, and to the window.
struct DecoderBlock {
    Positions past, window;
    Network see_window, step;

    DecoderBlock(const Arrays & arrays, const std::string & name, int n_embd, int n_window, int n_chunk)
        : DecoderBlock(arrays, name, n_embd, n_window, n_chunk, {arrays, name + ".self", n_embd, false},
                       {arrays, name + ".cross", n_embd, true}) {}

  private:
    DecoderBlock(const Arrays & arrays, const std::string & name, int n_embd, int n_window, int n_chunk,
                 const Attention & self, const Attention & cross)
        : past(n_chunk, self.n_head, self.width),
          window(n_window, cross.n_head, cross.width) {
        see_window.norm().dense(cross.memory).keep(window);
        step.save().norm().dense(self.projection).keep(past).attend(past).dense(self.out).add();
        step.save().norm().dense(cross.projection).attend(window).dense(cross.out).add();
        add_feed_forward(step, arrays, name + ".feed", n_embd);
    }
};

class RoutingPath final : public Predictor {
  public:
    RoutingPath(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          n_embd_(arrays.integer("n_embd")),
          n_vocab_(arrays.integer("n_vocab")),
          n_window_(arrays.integer("n_window")),
          n_chunk_(arrays.integer("n_chunk")) {
        if (n_embd_ <= 0 || n_vocab_ < 0 || n_window_ <= 0 || n_chunk_ <= 0) {
            throw Error(MOEGGUF_INVALID, "a routing-path network must have sizes above 0");
        }
        embedding_ = arrays.matrix("embedding", n_vocab_ + 1, n_embd_);
        window_positions_ = arrays.floats("window", size_t(n_window_) * n_embd_);
        chunk_positions_ = arrays.floats("chunk", size_t(n_chunk_) * n_embd_);
        for (int i = 0; i < arrays.integer("n_encoder"); i++) {
            encoder_.emplace_back(arrays, "encoder." + std::to_string(i), n_embd_, n_window_);
        }
        for (int i = 0; i < arrays.integer("n_decoder"); i++) {
            decoder_.emplace_back(arrays, "decoder." + std::to_string(i), n_embd_, n_window_, n_chunk_);
        }
        heads_.norm().dense(arrays.matrix("heads", layout.n_moe_layers * layout.n_expert_max, n_embd_));
        states_.assign(n_window_, std::vector<float>(n_embd_));
        queries_.resize(n_window_);
        recent_.resize(n_window_);
        on_sequence();
    }

    void on_sequence() override {
        std::fill(recent_.begin(), recent_.end(), n_vocab_); // the padding token takes the place of all earlier tokens
        position_ = n_chunk_;
        logits_.clear();
    }

    // Predicts the experts of a single token. Several tokens (a prompt) are only remembered. Ids outside the vocabulary
    // represent embeddings, and reset the predictor.
    void on_tokens(const int32_t * tokens, int n) override {
        logits_.clear();
        if (std::any_of(tokens, tokens + n, [this](int token) { return token < 0 || token >= n_vocab_; })) {
            on_sequence();
            return;
        }
        if (n == 1) {
            step(tokens[0]);
        } else if (n > 1) {
            position_ = n_chunk_;
        }
        const int kept = std::min(n, n_window_);
        std::copy(recent_.begin() + kept, recent_.end(), recent_.begin());
        std::copy_n(tokens + n - kept, kept, recent_.end() - kept);
    }

    void on_routing(const Observation & seen) override {
        if (seen.il == layout_.moe_layers.back() && position_ == n_chunk_) { encode(); }
    }

    bool predict(int il, int, float * probabilities) override {
        if (logits_.empty()) { return false; }
        const float * of_layer = logits_.data() + size_t(layout_.row_of[il]) * layout_.n_expert_max;
        sigmoid(of_layer, layout_.layers[il].n_expert, probabilities);
        return true;
    }

  private:
    void embed(int token, const float * position, std::vector<float> & x) const {
        const int8_t * row = embedding_.weights + size_t(token) * n_embd_;
        x.resize(n_embd_);
        for (int i = 0; i < n_embd_; i++) { x[i] = row[i] * embedding_.scale[token] + position[i]; }
    }

    // Begins a chunk: encodes the window of tokens before it, to which all tokens of the chunk attend.
    void encode() {
        for (int i = 0; i < n_window_; i++) { embed(recent_[i], window_positions_ + size_t(i) * n_embd_, states_[i]); }
        for (EncoderBlock & block : encoder_) {
            for (int i = 0; i < n_window_; i++) {
                queries_[i] = states_[i];
                block.enter.run(queries_[i], i);
            }
            for (int i = 0; i < n_window_; i++) {
                block.leave.set_saved(states_[i]);
                states_[i] = queries_[i];
                block.leave.run(states_[i]);
            }
        }
        for (DecoderBlock & block : decoder_) {
            for (int i = 0; i < n_window_; i++) {
                x_ = states_[i];
                block.see_window.run(x_, i);
            }
        }
        position_ = 0;
    }

    void step(int token) {
        if (position_ == n_chunk_) { encode(); }
        embed(token, chunk_positions_ + size_t(position_) * n_embd_, logits_);
        for (DecoderBlock & block : decoder_) { block.step.run(logits_, position_); }
        heads_.run(logits_);
        position_ += 1;
    }

    const Layout & layout_;
    const int n_embd_, n_vocab_, n_window_, n_chunk_;
    // [n_vocab + 1] rows; the last row is the padding token, which stands for tokens before the request.
    ByteMatrix embedding_;
    const float * window_positions_;  // [n_window][n_embd]
    const float * chunk_positions_;   // [n_chunk][n_embd]
    std::list<EncoderBlock> encoder_; // lists, because networks keep pointers into their elements
    std::list<DecoderBlock> decoder_;
    Network heads_;               // computes the logits [n_moe_layers * n_expert_max]
    std::vector<int32_t> recent_; // [n_window] the last tokens, which the next encoding reads
    int position_;                // place of the next token in its chunk; n_chunk: the next token begins a new chunk
    std::vector<std::vector<float>> states_, queries_; // [n_window]
    std::vector<float> x_;                             // scratch
    std::vector<float> logits_;                        // logits of this pass's token; empty: there is no prediction
};

} // namespace

const PredictorType routing_path_predictor = {"routing-path", false, false, make_predictor<RoutingPath>};

} // namespace moegguf
