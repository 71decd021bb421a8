"""The reference decoder of EXL3 in numpy, bit by bit: slow, exact, and without anything of the program.

A linear layer y = x @ W + bias, W is [in, out].  Stored tensors:
  trellis int16 [in/16, out/16, 16*K]   K = 1..8, or 1.5/2.5/3.5 (mul1 only)
  suh     f16   [in]     svh f16 [out]  (legacy: su/sv int16 sign bit fields)
  mcg / mul1 scalar int32 markers, bias f16 [out] optional
W = diag(suh) . H . T . H . diag(svh), H = blockwise 128 Hadamard / sqrt(128).
"""
from __future__ import annotations

import numpy as np

MCG_MULT = 0xCBAC1FED
MUL1_MULT = 0x83DCD12D
TILE = 16
HAD = 128


# ---------------------------------------------------------------- codebooks
def codebook(name: str) -> np.ndarray:
    """All 65536 values of one codebook as float16."""
    s = np.arange(65536, dtype=np.uint64)
    m32 = np.uint64(0xFFFFFFFF)
    if name in ("3inst", "mcg"):
        if name == "3inst":
            x = (s * np.uint64(89226354) + np.uint64(64248484)) & m32
        else:
            x = (s * np.uint64(MCG_MULT)) & m32
        x = (x.astype(np.uint32) & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
        lo = (x & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
        hi = (x >> np.uint32(16)).astype(np.uint16).view(np.float16)
        # f16 add: exact sum in f32, one rounding
        return (lo.astype(np.float32) + hi.astype(np.float32)).astype(np.float16)
    if name == "mul1":
        x = (s * np.uint64(MUL1_MULT)) & m32
        bs = sum(((x >> np.uint64(8 * i)) & np.uint64(255)) for i in range(4)).astype(np.int64)
        a = np.uint16(0x1EEE).view(np.float16).astype(np.float64)
        b = np.uint16(0xC931).view(np.float16).astype(np.float64)
        # f16 fma: exact in f64, one rounding
        return ((1024 + bs).astype(np.float64) * a + b).astype(np.float16)
    raise ValueError(name)


def codebook_of(keys) -> str:
    if "mcg" in keys:
        return "mcg"
    if "mul1" in keys:
        return "mul1"
    return "3inst"


# ---------------------------------------------------------------- tile order
def tile_perm() -> np.ndarray:
    """perm[i] = row-major position (16*r+c) of ring position i; r along in, c along out."""
    i = np.arange(256)
    t, j = i >> 3, i & 7
    r = (t & 3) * 2 + (j & 1) + ((j >> 1) & 1) * 8
    c = (t >> 2) + (j >> 2) * 8
    return r * 16 + c


def tile_perm_inv() -> np.ndarray:
    """inv[16*r+c] = ring position."""
    p = np.arange(256)
    r, c = p >> 4, p & 15
    t = ((c & 7) << 2) | ((r & 7) >> 1)
    j = ((c >> 3) << 2) | ((r >> 3) << 1) | (r & 1)
    return t * 8 + j


# ---------------------------------------------------------------- bit stream
def _ends(K: float) -> np.ndarray:
    """End bit S(i) of the window of ring position i."""
    i = np.arange(256)
    if float(K).is_integer():
        return (i + 1) * int(K)
    ka = int(K)                       # odd positions take ka+1 bits
    return (i + 1) * ka + (i + 1) // 2


def unpack_states(trellis: np.ndarray, K: float) -> np.ndarray:
    """int16 [..., 16K] -> uint16 states [..., 256] in ring order."""
    w = np.ascontiguousarray(trellis).view(np.uint16)
    assert w.shape[-1] == int(16 * K), (w.shape, K)
    lead = w.shape[:-1]
    w = w.reshape(*lead, -1, 2)[..., ::-1].reshape(*lead, -1)      # 16-bit halves of each LE u32, high first
    nb = w.shape[-1] * 16
    bits = ((w[..., None] >> np.arange(15, -1, -1, dtype=np.uint16)) & 1).reshape(*lead, nb).astype(np.uint8)
    ends = _ends(K)
    pos = (ends[:, None] - 16 + np.arange(16)) % nb                # MSB first, tail biting
    b = bits[..., pos].astype(np.uint32)
    return (b << np.arange(15, -1, -1, dtype=np.uint32)).sum(-1).astype(np.uint16)


def pack_states(states: np.ndarray, K: float) -> np.ndarray:
    """Inverse (keeps the D(i) low bits of each state)."""
    ends = _ends(K)
    starts = np.concatenate([[0], ends[:-1]])
    lead = states.shape[:-1]
    nb = int(ends[-1])
    bits = np.zeros((*lead, nb), np.uint32)
    for i in range(256):
        d = int(ends[i] - starts[i])
        for q in range(d):
            bits[..., starts[i] + q] = (states[..., i].astype(np.uint32) >> (d - 1 - q)) & 1
    w = (bits.reshape(*lead, nb // 16, 16) << np.arange(15, -1, -1, dtype=np.uint32)).sum(-1).astype(np.uint16)
    w = w.reshape(*lead, -1, 2)[..., ::-1].reshape(*lead, nb // 16)
    return np.ascontiguousarray(w).view(np.int16)


def is_tail_biting(states: np.ndarray, K: float) -> bool:
    return bool(np.array_equal(unpack_states(pack_states(states, K), K), states))


# ---------------------------------------------------------------- hadamard
def hadamard(n: int = HAD) -> np.ndarray:
    h = np.ones((1, 1), np.float64)
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    return h


def had_blocks(x: np.ndarray, axis: int) -> np.ndarray:
    """Blockwise orthonormal transform along axis (128 wide)."""
    x = np.moveaxis(x, axis, -1)
    s = x.shape
    y = x.reshape(*s[:-1], s[-1] // HAD, HAD) @ (hadamard() / np.sqrt(HAD))
    return np.moveaxis(y.reshape(s), -1, axis)


def unpack_signs(bf: np.ndarray) -> np.ndarray:
    """Legacy su/sv: bit j of word i -> element 16*i+j, 1 means -1."""
    b = (np.ascontiguousarray(bf).view(np.uint16)[:, None] >> np.arange(16, dtype=np.uint16)) & 1
    return (1.0 - 2.0 * b.reshape(-1)).astype(np.float16)


# ---------------------------------------------------------------- reconstruct
def inner(trellis: np.ndarray, cb: str) -> np.ndarray:
    """Rotated-basis matrix T [in, out] float16."""
    K = trellis.shape[-1] / 16
    kt, nt = trellis.shape[:2]
    vals = codebook(cb)[unpack_states(trellis, K)]                 # [kt, nt, 256]
    t = np.empty_like(vals)
    t[..., tile_perm()] = vals
    return t.reshape(kt, nt, 16, 16).transpose(0, 2, 1, 3).reshape(kt * 16, nt * 16)


def dense(trellis, suh, svh, cb: str) -> np.ndarray:
    """W [in, out] in float64 (exact algebra on the f16 table values)."""
    w = inner(trellis, cb).astype(np.float64)
    w = had_blocks(w, 0) * suh.astype(np.float64)[:, None]
    w = had_blocks(w, 1) * svh.astype(np.float64)[None, :]
    return w


def forward(x, trellis, suh, svh, cb: str, bias=None) -> np.ndarray:
    """y = ((x * suh) H) T H * svh, float64."""
    y = had_blocks(x.astype(np.float64) * suh.astype(np.float64), -1)
    y = y @ inner(trellis, cb).astype(np.float64)
    y = had_blocks(y, -1) * svh.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)
