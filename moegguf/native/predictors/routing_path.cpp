// routing_path.cpp: ExpertFlow's routing-path network (section 3.1): experts of all layers from a token's id and those
// before it, before the first layer. A small T5: an encoder over the `window` tokens before a chunk, a decoder over the
// chunk token by token, and a linear head per layer. moegguf/controller/predictors/routing_path.py is its definition.
//
// A token costs one step of the decoder, whose keys and values are kept. The encoder runs once per chunk, when the last
// layer of the chunk's last token has been routed, so that it does not keep the next token waiting.
// It writes its own memory only.
#include "predictors/predictor.h"

#include <cmath>

namespace moegguf {
namespace {

constexpr float norm_eps = 1e-6f;

// Scratch of products, which keeps its memory.
class Scratch {
  public:
    const float * multiplied(const ByteMatrix & w, const float * x, bool relu = false) {
        rounded_.round(x, w.n_cols);
        out_.resize(w.n_rows);
        multiply(w, rounded_, relu, out_.data());
        return out_.data();
    }
    // The same of T5's norm of x; its gain is part of the matrix.
    const float * of_normed(const ByteMatrix & w, const float * x, bool relu = false) {
        float sum = 0.0f;
        for (int i = 0; i < w.n_cols; i++) { sum += x[i] * x[i]; }
        const float scale = 1.0f / std::sqrt(sum / w.n_cols + norm_eps);
        normed_.resize(w.n_cols);
        std::transform(x, x + w.n_cols, normed_.begin(), [scale](float value) { return value * scale; });
        return multiplied(w, normed_.data(), relu);
    }
    std::vector<float> mixed, scores;

  private:
    RoundedVector rounded_;
    std::vector<float> normed_, out_;
};

// Keys and values [n][n_head * n_embd_head] of positions.
struct Memory {
    std::vector<float> keys, values;
    void resize(size_t n) { keys.resize(n), values.resize(n); }
};

struct Attention {
    int n_head, width; // width: of all heads
    ByteMatrix projection, memory, out;

    Attention(const Arrays & arrays, const std::string & name, int n_embd, bool cross)
        : n_head(arrays.integer(name + ".n_head")) {
        width = (int)(arrays.size(name + ".out.weights") / n_embd);
        if (n_head <= 0 || width <= 0 || width % n_head) {
            throw Error(MOEGGUF_INVALID, "the heads of an attention share its width evenly");
        }
        projection = arrays.matrix(name + ".projection", cross ? width : 3 * width, n_embd);
        if (cross) { memory = arrays.matrix(name + ".memory", 2 * width, n_embd); }
        out = arrays.matrix(name + ".out", n_embd, width);
    }

    void keep(Memory & of, int position, const float * key_and_value) const {
        std::copy_n(key_and_value, width, &of.keys[size_t(position) * width]);
        std::copy_n(key_and_value + width, width, &of.values[size_t(position) * width]);
    }

    // x += the n positions of a memory, as the query (already scaled) attends to them, projected.
    void attend(float * x, const float * query, const Memory & to, int n, Scratch & scratch) const {
        const int size = width / n_head;
        scratch.mixed.assign(width, 0.0f);
        scratch.scores.resize(n);
        float * scores = scratch.scores.data();
        for (int from = 0; from < width; from += size) {
            for (int i = 0; i < n; i++) {
                const float * key = &to.keys[size_t(i) * width + from];
                float sum = 0.0f;
                for (int j = 0; j < size; j++) { sum += query[from + j] * key[j]; }
                scores[i] = sum;
            }
            softmax(scores, n, 1.0f);
            for (int i = 0; i < n; i++) {
                const float * value = &to.values[size_t(i) * width + from];
                for (int j = 0; j < size; j++) { scratch.mixed[from + j] += scores[i] * value[j]; }
            }
        }
        add(x, scratch.multiplied(out, scratch.mixed.data()), out.n_rows);
    }
};

struct FeedForward {
    ByteMatrix up, down;

    FeedForward(const Arrays & arrays, const std::string & name, int n_embd) {
        const int n_ff = (int)(arrays.size(name + ".up.weights") / n_embd);
        up = arrays.matrix(name + ".up", n_ff, n_embd);
        down = arrays.matrix(name + ".down", n_embd, n_ff);
    }

    void add_to(float * x, Scratch & scratch) const {
        const float * found = scratch.of_normed(up, x, true);
        scratch.mixed.assign(found, found + up.n_rows);
        add(x, scratch.multiplied(down, scratch.mixed.data()), down.n_rows);
    }
};

struct EncoderBlock {
    Attention self;
    FeedForward feed;
};

struct DecoderBlock {
    Attention self, cross;
    FeedForward feed;
    Memory past, window; // keys and values of the chunk so far, and of the encoder's states
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
            throw Error(MOEGGUF_INVALID, "a routing-path network has sizes above 0");
        }
        embedding_ = arrays.matrix("embedding", n_vocab_ + 1, n_embd_);
        window_positions_ = arrays.floats("window", size_t(n_window_) * n_embd_);
        chunk_positions_ = arrays.floats("chunk", size_t(n_chunk_) * n_embd_);
        for (int i = 0; i < arrays.integer("n_encoder"); i++) {
            const std::string name = "encoder." + std::to_string(i);
            encoder_.push_back({{arrays, name + ".self", n_embd_, false}, {arrays, name + ".feed", n_embd_}});
        }
        for (int i = 0; i < arrays.integer("n_decoder"); i++) {
            const std::string name = "decoder." + std::to_string(i);
            decoder_.push_back({{arrays, name + ".self", n_embd_, false},
                                {arrays, name + ".cross", n_embd_, true},
                                {arrays, name + ".feed", n_embd_},
                                {},
                                {}});
            decoder_.back().past.resize(size_t(n_chunk_) * decoder_.back().self.width);
            decoder_.back().window.resize(size_t(n_window_) * decoder_.back().cross.width);
        }
        heads_ = arrays.matrix("heads", layout.n_moe_layers * layout.n_expert_max, n_embd_);
        recent_.resize(n_window_);
        on_sequence();
    }

    void on_sequence() override {
        std::fill(recent_.begin(), recent_.end(), n_vocab_); // what came before: the padding token
        position_ = n_chunk_;
        logits_.clear();
    }

    // Prompts are remembered, and predicted nothing. Embeddings in place of tokens begin anew.
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
    void embed(int token, const float * position, float * x) const {
        const int8_t * row = embedding_.weights + size_t(token) * n_embd_;
        for (int i = 0; i < n_embd_; i++) { x[i] = row[i] * embedding_.scale[token] + position[i]; }
    }

    // Begins a chunk: what its tokens attend to of the window before it.
    void encode() {
        states_.resize(size_t(n_window_) * n_embd_);
        for (int i = 0; i < n_window_; i++) { embed(recent_[i], window_positions_ + size_t(i) * n_embd_, state(i)); }
        for (const EncoderBlock & block : encoder_) {
            const int width = block.self.width;
            around_.resize(size_t(n_window_) * width);
            queries_.resize(size_t(n_window_) * width);
            for (int i = 0; i < n_window_; i++) {
                const float * projected = scratch_.of_normed(block.self.projection, state(i));
                std::copy_n(projected, width, &queries_[size_t(i) * width]);
                block.self.keep(around_, i, projected + width);
            }
            for (int i = 0; i < n_window_; i++) {
                block.self.attend(state(i), &queries_[size_t(i) * width], around_, n_window_, scratch_);
                block.feed.add_to(state(i), scratch_);
            }
        }
        for (DecoderBlock & block : decoder_) {
            for (int i = 0; i < n_window_; i++) {
                block.cross.keep(block.window, i, scratch_.of_normed(block.cross.memory, state(i)));
            }
        }
        position_ = 0;
    }

    void step(int token) {
        if (position_ == n_chunk_) { encode(); }
        x_.resize(n_embd_);
        float * x = x_.data();
        embed(token, chunk_positions_ + size_t(position_) * n_embd_, x);
        for (DecoderBlock & block : decoder_) {
            const int width = block.self.width;
            const float * projected = scratch_.of_normed(block.self.projection, x);
            block.self.keep(block.past, position_, projected + width);
            queries_.assign(projected, projected + width);
            block.self.attend(x, queries_.data(), block.past, position_ + 1, scratch_);
            projected = scratch_.of_normed(block.cross.projection, x);
            queries_.assign(projected, projected + block.cross.width);
            block.cross.attend(x, queries_.data(), block.window, n_window_, scratch_);
            block.feed.add_to(x, scratch_);
        }
        const float * found = scratch_.of_normed(heads_, x);
        logits_.assign(found, found + heads_.n_rows);
        position_ += 1;
    }

    float * state(int i) { return &states_[size_t(i) * n_embd_]; }

    const Layout & layout_;
    const int n_embd_, n_vocab_, n_window_, n_chunk_;
    ByteMatrix embedding_;           // [n_vocab + 1], the last row of what came before the request
    const float * window_positions_; // [n_window][n_embd]
    const float * chunk_positions_;  // [n_chunk][n_embd]
    std::vector<EncoderBlock> encoder_;
    std::vector<DecoderBlock> decoder_;
    ByteMatrix heads_;            // [n_moe_layers * n_expert_max][n_embd]
    std::vector<int32_t> recent_; // [n_window] tokens
    int position_;                // of the next token in its chunk; n_chunk: one begins
    std::vector<float> states_, queries_, x_;
    Memory around_;
    std::vector<float> logits_; // of this token; none: it is not known
    Scratch scratch_;
};

} // namespace

const PredictorType routing_path_predictor = {"routing-path", false, false, make_predictor<RoutingPath>};

} // namespace moegguf
