"""The projector of a vision model (an mmproj file), through libmtmd: tokenizes prompts
with images, and evaluates images.

An image becomes one span of tokens, or several spans (tiles) with texts between them.
In a list of tokens, an image's tokens are PLACEHOLDERs. A span has a cell of the KV
cache for each of its tokens. In models with M-RoPE, where all tokens of an image share
a time step, a span usually has fewer positions than tokens. At most one decoded image
is held in memory.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moegguf.engine.error_log import mtmd_log
from moegguf.errors import ModelFormatError, OptionError
from moegguf.gguf.projector import DECODED_BYTES
from moegguf.gguf.reader import StrPath
from moegguf.native import library
from moegguf.text import to_utf8

if TYPE_CHECKING:
    from moegguf.engine.upstream import UpstreamLlama

PLACEHOLDER = -1  # stands for an image token; no token of any model has this id
STEP_BYTES = 64 << 10
# Maximum number of markers that are read to find the first frame.
MAX_JPEG_SEGMENTS = 4096
# Markers of the kinds of frames that are decoded; 0xC2 is progressive.
JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
# markers that may precede a frame: application data, tables, restart interval, comment
_JPEG_TABLES = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xDD, 0xFE)
# JPEG's end marker, which does not occur in compressed data.
_END_OF_IMAGE = b"\xff\xd9"
_GIF_IMAGE, _GIF_EXTENSION, _GIF_TRAILER = 0x2C, 0x21, 0x3B
_MARKER = re.compile(rb"\xff[^\xff]", re.DOTALL)


@dataclass(frozen=True)
class Image:
    """The bytes of an image file, with the width and height in pixels from its
    header."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of an image, or of one tile of an image: `n_tokens` tokens from index
    `begin` on. Spans with the same `key` have the same embeddings.

    image: the image's index in the prompt. chunk: libmtmd's index for this part of the
    image.
    """

    begin: int
    n_tokens: int
    n_positions: int
    key: str
    image: int
    chunk: int

    @property
    def end(self) -> int:
        """The index of the first token after the span."""
        return self.begin + self.n_tokens


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt in which texts and images alternate, beginning and ending with a text.
    `tokens` holds the tokens of texts and images; `spans` locates the image tokens,
    which are PLACEHOLDERs."""

    texts: tuple[str, ...]
    images: tuple[Image, ...]
    tokens: list[int]
    spans: tuple[ImageSpan, ...]

    def after(self, tokens: Sequence[int], n_dropped: int = 0) -> ImagePrompt:
        """Returns a prompt that consists of `tokens`, followed by this prompt without
        its first `n_dropped` tokens."""
        shift = len(tokens) - n_dropped
        spans = tuple(replace(span, begin=span.begin + shift) for span in self.spans)
        return replace(self, tokens=[*tokens, *self.tokens[n_dropped:]], spans=spans)


class Projector:
    """A loaded projector, for a loaded text model. Any thread may call `tokenize` at
    any time; the other methods are not thread-safe. Close the projector before the
    model.

    Raises ModelFormatError if libmtmd cannot use the projector with this model, or if
    the projector is not for images.
    """

    def __init__(self, path: StrPath, llm: UpstreamLlama) -> None:
        self._mtmd = mtmd = library.mtmd()
        self._log = mtmd_log()
        self._no_callback = mtmd.mtmd_helper_post_decode_callback()
        # Prompt, index of its decoded image, libmtmd's chunks.
        self._held: tuple[ImagePrompt, int, int] | None = None
        params = mtmd.mtmd_context_params_default()
        params.n_threads = llm.n_threads_batch
        params.print_timings = False
        self._log.forget()
        self._context = mtmd.mtmd_init_from_file(os.fsencode(path), llm.model, params)
        if not self._context:
            raise ModelFormatError(
                f"{os.fspath(path)} cannot be used for images of this model: {self._log.reason()}; give the mmproj file"
                " that belongs to it, or use a newer moegguf if the projector's type is unknown."
            )
        if not mtmd.mtmd_support_vision(self._context):
            self.close()
            raise ModelFormatError(
                f"{os.fspath(path)} is not an image projector; give the mmproj file of a vision model."
            )

    def tokenize(self, texts: Sequence[str], images: Sequence[Image]) -> ImagePrompt:
        """Returns the prompt of `texts` with one of `images` between each pair of
        neighbouring texts, so there is one fewer image than texts. Does not decode the
        images. Raises OptionError if libmtmd cannot read the prompt."""
        chunks = self._tokenized(texts, images)
        try:
            tokens, spans = self._read_chunks(chunks, images)
        finally:
            self._mtmd.mtmd_input_chunks_free(chunks)
        return ImagePrompt(tuple(texts), tuple(images), tokens, spans)

    def _read_chunks(
        self, chunks: int, images: Sequence[Image]
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        mtmd = self._mtmd
        tokens = list[int]()
        spans = list[ImageSpan]()
        keys = [hashlib.sha256(image.data).hexdigest() for image in images]
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            n_tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                size = c.c_size_t()
                tokens += mtmd.mtmd_input_chunk_get_tokens_text(chunk, c.byref(size))[
                    : size.value
                ]
                continue
            image = int(mtmd.mtmd_input_chunk_get_id(chunk))
            tile = sum(span.image == image for span in spans)
            n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
            spans.append(
                ImageSpan(
                    len(tokens),
                    n_tokens,
                    n_positions,
                    f"{keys[image]}/{tile}",
                    image,
                    i,
                )
            )
            tokens += [PLACEHOLDER] * n_tokens
        return tokens, tuple(spans)

    def evaluate(
        self,
        context: Any,
        prompt: ImagePrompt,
        span: ImageSpan,
        position: int,
        n_batch: int,
        n_ubatch: int,
    ) -> None:
        """Evaluates a span in llama.cpp's `context`, from `position` on. Frees the
        decoded image after its last span, and after an exception.

        Raises OptionError for a damaged image, and for an image that needs a longer
        pass than `n_ubatch`. Raises RuntimeError with llama_decode's code, as the
        bindings do.
        """
        mtmd = self._mtmd
        goes_on = False
        try:
            chunk = mtmd.mtmd_input_chunks_get(
                self._decoded(prompt, span.image), span.chunk
            )
            if mtmd.mtmd_decode_use_non_causal(self._context, chunk):
                if span.n_tokens > n_ubatch:
                    raise OptionError(
                        f"this model reads an image of {span.n_tokens} tokens in one pass, but was loaded for passes of"
                        f" {n_ubatch}; load it with n_ubatch={span.n_tokens} and more memory for experts"
                        " (--expert-cache)."
                    )
                n_batch = n_ubatch
            self._log.forget()
            if mtmd.mtmd_encode_chunk(self._context, chunk) != 0:
                raise OptionError(
                    f"the projector cannot read this image: {self._log.reason()}; send another one."
                )
            embeddings = mtmd.mtmd_get_output_embd(self._context)
            end = c.c_int32()
            code = mtmd.mtmd_helper_decode_image_chunk(
                self._context,
                context,
                chunk,
                embeddings,
                position,
                0,
                n_batch,
                c.byref(end),
                self._no_callback,
                None,
            )
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code}")
            goes_on = any(
                other.image == span.image and other.begin > span.begin
                for other in prompt.spans
            )
        finally:
            # The image's last span was evaluated, or an exception was raised.
            if not goes_on:
                self.release()

    def _decoded(self, prompt: ImagePrompt, image: int) -> int:
        """Returns libmtmd's chunks of the prompt, with the pixels of one image. The
        chunks are kept until `release` is called or another image is decoded. Raises
        OptionError for a damaged image."""
        if self._held is None or self._held[0] is not prompt or self._held[1] != image:
            self.release()
            chunks = self._tokenized(prompt.texts, prompt.images, decoded=image)
            self._held = prompt, image, chunks
            if [s.n_tokens for s in self._read_chunks(chunks, prompt.images)[1]] != [
                s.n_tokens for s in prompt.spans
            ]:
                raise OptionError(
                    f"the data of image {image + 1} of the request do not match its header; send another image."
                )
        return self._held[2]

    def _tokenized(
        self, texts: Sequence[str], images: Sequence[Image], decoded: int | None = None
    ) -> int:
        """Returns libmtmd's chunks for these texts and images. Only image number
        `decoded` has pixels; None: no image has pixels. The caller must free the
        chunks. Raises OptionError."""
        mtmd = self._mtmd
        bitmaps = list[int]()
        self._log.forget()
        try:
            for i, image in enumerate(images):
                bitmaps.append(self._bitmap(image, with_pixels=i == decoded))
                mtmd.mtmd_bitmap_set_id(bitmaps[-1], str(i).encode())
            inputs = [
                mtmd.mtmd_input_text(utf8, len(utf8), False, True)
                for utf8 in map(to_utf8, texts)
            ]
            parts = [mtmd.mtmd_input_part(c.pointer(inputs[0]), None)]
            for bitmap, text in zip(bitmaps, inputs[1:], strict=True):
                parts += [
                    mtmd.mtmd_input_part(None, bitmap),
                    mtmd.mtmd_input_part(c.pointer(text), None),
                ]
            pointers = (c.POINTER(mtmd.mtmd_input_part) * len(parts))(
                *map(c.pointer, parts)
            )
            chunks = mtmd.mtmd_input_chunks_init()
            if (
                mtmd.mtmd_tokenize_from_parts(
                    self._context, chunks, pointers, len(parts), False
                )
                != 0
            ):
                mtmd.mtmd_input_chunks_free(chunks)
                raise OptionError(
                    f"the projector cannot read these images: {self._log.reason()}; send others."
                )
            return int(chunks)
        finally:
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)

    def _bitmap(self, image: Image, *, with_pixels: bool) -> int:
        mtmd = self._mtmd
        if not with_pixels:
            return int(mtmd.mtmd_bitmap_init(image.width, image.height, None))
        data = (c.c_uint8 * len(image.data)).from_buffer_copy(image.data)
        bitmap = None
        # Half of DECODED_BYTES is for inflated data, and half for pixels. Each row of a
        # PNG file has one additional byte: its filter.
        if has_end(image.data) and inflates_within(
            image.data, DECODED_BYTES // 2 + image.height
        ):
            bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(
                self._context, data, len(data), False
            )
        if not bitmap:
            raise OptionError(
                "an image cannot be decoded: its data are damaged or incomplete, or too large when decompressed; save"
                " the image again, and send the new file."
            )
        return int(bitmap)

    def release(self) -> None:
        """Frees the decoded image, if there is one."""
        if self._held is not None:
            self._mtmd.mtmd_input_chunks_free(self._held[2])
            self._held = None

    def close(self) -> None:
        """Frees the projector. A second call does nothing."""
        self.release()
        if self._context:
            self._mtmd.mtmd_free(self._context)
            self._context = None


class ContextImages:
    """The images in sequence 0 of a context, with the indices of their tokens."""

    def __init__(self) -> None:
        self.spans: list[ImageSpan] = []

    def truncate(self, n_tokens: int) -> None:
        """Discards the images that do not end within the first `n_tokens` tokens."""
        self.spans = [span for span in self.spans if span.end <= n_tokens]

    def position(self, n_tokens: int) -> int:
        """Returns the position of the token after the first `n_tokens`. Images may have
        fewer positions than tokens."""
        return n_tokens - sum(
            span.n_tokens - span.n_positions
            for span in self.spans
            if span.end <= n_tokens
        )

    def common_prefix(self, n_tokens: int, spans: Sequence[ImageSpan]) -> int:
        """Compares the images of this context with `spans`, the images of a prompt
        whose first `n_tokens` tokens equal the context's. Returns how many of these
        tokens also have equal images.

        The equal tokens end before the first image that differs, or that is not
        complete.
        """
        mine = {span.begin: span for span in self.spans}
        for span in spans:
            known = mine.get(span.begin)
            same = known is not None and (known.key, known.n_tokens) == (
                span.key,
                span.n_tokens,
            )
            if span.begin < n_tokens and (not same or span.end > n_tokens):
                return span.begin
        return n_tokens


def has_end(data: bytes) -> bool:
    """Returns False for a JPEG or GIF file that lacks its end marker, and for a JPEG
    file that has no decodable frame. Returns True for all other files.

    stb_image does not report a missing end, and fills in the missing pixels.
    """
    if data.startswith(b"\xff\xd8"):
        frame = jpeg_frame(data)
        return frame >= 0 and data.find(_END_OF_IMAGE, frame) >= 0
    try:
        return not data.startswith(b"GIF8") or _gif_has_end(data)
    except IndexError:
        return False


def jpeg_frame(data: bytes) -> int:
    """Returns the index of the marker byte (one of JPEG_FRAMES) of a JPEG file's first
    frame. Frames of thumbnails are skipped.

    Returns -1 if none of the first MAX_JPEG_SEGMENTS markers is such a frame, or if a
    marker before it is not in _JPEG_TABLES.
    """
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[0][-1] not in (*JPEG_FRAMES, *_JPEG_TABLES):
            break
        if marker[0][-1] in JPEG_FRAMES:
            return marker.end() - 1
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return -1


def _gif_has_end(data: bytes) -> bool:
    """Reads all blocks of a GIF file up to the end marker, and returns True. Bytes
    between two blocks are skipped, as other decoders do. Raises IndexError if the
    marker is missing."""
    at = 13 + _table_bytes(data[10])
    while (kind := data[at]) != _GIF_TRAILER:
        at += 1
        if kind == _GIF_IMAGE:
            at += 10 + _table_bytes(data[at + 8])
        elif kind == _GIF_EXTENSION:
            at += 1
        else:
            continue
        while size := data[at]:
            at += 1 + size
        at += 1
    return True


def _table_bytes(flags: int) -> int:
    """Returns the size in bytes of a GIF colour table with these flags; 0 if there is
    none."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def inflates_within(data: bytes, most_bytes: int) -> bool:
    """Returns True if a PNG's data inflate to at most `most_bytes`; stb_image inflates
    all of them at once.

    Returns True for another kind of file, and False for data that cannot be inflated.
    """
    inflater = zlib.decompressobj()
    n_bytes = 0
    try:
        for part in _compressed(data):
            while part and n_bytes <= most_bytes:
                n_bytes += len(inflater.decompress(part, STEP_BYTES))
                part = inflater.unconsumed_tail
    except zlib.error:
        return False
    return n_bytes <= most_bytes


def _compressed(data: bytes) -> Iterator[bytes]:
    """Yields the compressed data of all IDAT chunks of a PNG file, in parts of at most
    STEP_BYTES bytes. Yields nothing for another kind of file."""
    at = 8 if data.startswith(b"\x89PNG") else len(data)
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            for begin in range(at + 8, min(at + 8 + size, len(data)), STEP_BYTES):
                yield data[begin : min(begin + STEP_BYTES, at + 8 + size)]
        at += size + 12
