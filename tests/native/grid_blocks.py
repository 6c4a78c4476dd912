"""Generates weights of the ggml types whose quantiser takes seconds to start.

The weights are random codes. All blocks have the same scale d.
"""

from __future__ import annotations

import zlib

import numpy as np

from tools.width_check import Array, Ggml

GRIDS = ("iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m")
D = 0x2C00  # the scale 1/16 in half precision


class GridBlocks(Ggml):
    """ggml, but with random blocks instead of quantised values for the types of GRIDS.
    Equal rows become equal blocks."""

    def quantized(self, ggml_type: int, values: Array) -> bytes:
        """Returns the bytes of weights in the shape of `values` [..., n].

        For a type in GRIDS, the values only seed the random blocks. Other types are
        quantised by ggml.
        """
        name = self.type_name(ggml_type)
        if name not in GRIDS:
            return super().quantized(ggml_type, values)
        rows = np.asarray(values, np.float32).reshape(-1, values.shape[-1])
        n_bytes = self.row_bytes(ggml_type, rows.shape[1])
        content = b"".join(
            np.random.default_rng(zlib.crc32(row.tobytes())).bytes(n_bytes)
            for row in rows
        )
        blocks = np.frombuffer(bytearray(content), np.uint8).reshape(
            -1, self.row_bytes(ggml_type, 256)
        )
        # The top four bits of each of four 16-bit words hold a quarter of d.
        if name == "iq1_m":
            nibbles = D >> np.array([0, 4, 8, 12]) & 15
            blocks[:, 49::2] = blocks[:, 49::2] & 15 | nibbles << 4
        else:
            blocks[:, :2] = D & 255, D >> 8
        return blocks.tobytes()
