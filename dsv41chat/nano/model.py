"""The V4.1 architecture at the embedded model's size, differentiable, for one GPU (PyTorch). Forward only; the losses are in `train.py`.

Layout: N = B*T rows for everything that is per token, streams h [N, 4, D]; experts as one matmul w1, w3 [D, E*I], w2 [E*I, D] with the routing
weight in between (zero outside the picked two). Every function below is compiled on its own, so each sees one shape.
Caches are rounded as at run time, straight through: x + (round(x) - x) without gradient.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
import torch.nn.functional as F

from . import arch
from .arch import (
    BLOCK,
    CANDIDATE_BLOCKS,
    CANDIDATE_SIZE,
    CANDIDATE_SOURCE,
    ENGRAM_LAYERS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    INDEX_SOURCES,
    INDEX_TOPK,
    KV_SOURCES,
    NGRAM,
    O_GROUPS,
    RATIOS,
    ROPE_DIM,
    SINKHORN,
    STREAMS,
    TAPS,
    WINDOW,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
EPS = 1e-20
SAMPLED = 64  # rows per sequence on which the indexer's loss is taken


def compiled(function):
    """Compile for the GPU; the CPU tests run eagerly (so does anything under DSV41_EAGER=1)."""
    return function if DEVICE == "cpu" or os.environ.get("DSV41_EAGER") else torch.compile(function, dynamic=False)


# ---- rounding
def _pow2ceil(v):
    bits = v.view(torch.int32)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()) << 23).view(torch.float32)


def round_fp8(x, block: int = 32):
    z = x.unflatten(-1, (-1, block))
    s = _pow2ceil(z.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1 / 448))
    return ((z / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s).flatten(-2)


def _e2m1(v):
    a = v.abs()
    q = torch.where(a < 2, torch.round(a * 2) * 0.5, torch.where(a < 4, torch.round(a), torch.round(a * 0.5) * 2))
    return q * torch.sign(v)


def round_fp4(x, block: int = 32):
    z = x.unflatten(-1, (-1, block))
    s = _pow2ceil(z.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) * (1 / 6))
    return (_e2m1((z / s).clamp(-6, 6)) * s).flatten(-2)


def round_fp4_e4m3(x, block: int = 16):
    z = x.unflatten(-1, (-1, block))
    s = (z.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9) / 6).to(torch.float8_e4m3fn).float()
    return (_e2m1((z / s).clamp(-6, 6)) * s).flatten(-2)


_ROUND_CACHES = True


def cache_rounding(on: bool) -> None:
    """Switch the rounding of caches for a comparison with the engine's no_quant mode (eager runs only: compiled code keeps what it saw)."""
    global _ROUND_CACHES
    _ROUND_CACHES = on


def through(x, rounded):
    if not _ROUND_CACHES:
        return x
    return x + (rounded(x.detach()) - x.detach())


# ---- small pieces
def rms(x, weight=None):
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def rotate(x, cos, sin):
    """x [..., d] float; cos, sin broadcastable to [..., ROPE_DIM/2]."""
    head, tail = x[..., :-ROPE_DIM], x[..., -ROPE_DIM:].unflatten(-1, (-1, 2))
    p, q = tail[..., 0], tail[..., 1]
    return torch.cat([head, torch.stack([p * cos - q * sin, p * sin + q * cos], -1).flatten(-2)], -1)


def rope_tables(length: int):
    """[(cos, sin)] for window layers and for layers with compressed entries (YaRN), [length, ROPE_DIM/2] each."""
    j = torch.arange(0, ROPE_DIM, 2, dtype=torch.float64) / ROPE_DIM
    pos, out = torch.arange(length, dtype=torch.float64), []
    for theta, yarn in ((1e4, False), (1.6e5, True)):
        f = theta**-j
        if yarn:

            def turn(x, theta=theta):
                return ROPE_DIM * math.log(65536 / (2 * math.pi * x)) / (2 * math.log(theta))

            low, high = max(math.floor(turn(32)), 0), min(math.ceil(turn(1)), ROPE_DIM - 1)
            ramp = ((torch.arange(ROPE_DIM // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
            f = f / 16 * ramp + f * (1 - ramp)
        phase = (pos.float()[:, None] * f.float()).double()
        out.append((phase.cos().float().to(DEVICE), phase.sin().float().to(DEVICE)))
    return out


# ---- compiled functions, hyper-connections first
@compiled
def half_in(h, w, norm, fn, base, scale):
    """Streams entering a sublayer -> its input, and pre, post, comb of this sublayer. Sinkhorn over 16 separate scalars, so that it fuses."""
    flat = h.flatten(1)
    m = linear(flat, fn).float() * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + 1e-6
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    raw = m[:, 8:] * scale[2] + base[8:]
    z = [[raw[:, 4 * j + k] for k in range(4)] for j in range(4)]
    for j in range(4):
        top = torch.maximum(torch.maximum(z[j][0], z[j][1]), torch.maximum(z[j][2], z[j][3])).detach()
        e = [torch.exp(v - top) for v in z[j]]
        q = 1 / (e[0] + e[1] + e[2] + e[3])
        z[j] = [v * q + 1e-6 for v in e]
    for sweep in range(SINKHORN):
        if sweep:
            for j in range(4):
                q = 1 / (z[j][0] + z[j][1] + z[j][2] + z[j][3] + 1e-6)
                z[j] = [v * q for v in z[j]]
        for k in range(4):
            q = 1 / (z[0][k] + z[1][k] + z[2][k] + z[3][k] + 1e-6)
            for j in range(4):
                z[j][k] = z[j][k] * q
    comb = torch.stack([z[j][k] for j in range(4) for k in range(4)], -1).view(-1, 4, 4)
    x = (w.unsqueeze(-1) * h.float()).sum(1)
    return rms(x, norm).to(h.dtype), pre, post, comb


@compiled
def half_out(y, h, post, comb):
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + (comb.unsqueeze(-1) * h.float().unsqueeze(2)).sum(1)).to(h.dtype)


@compiled
def collapse(h, w, norm):
    return rms((w.unsqueeze(-1) * h.float()).sum(1), norm).to(h.dtype)


@compiled
def stream_sum(h, w):
    return (w.unsqueeze(-1) * h.float()).sum(1)


@compiled
def moe(x, gate, bias, w1, w3, w2, s1, s3, s2):
    """-> output, load per expert (1 = even)."""
    experts = gate.shape[0]
    score = torch.sqrt(F.softplus(x.float() @ gate.t()) + 1e-12)
    v = (score + bias).detach()
    second = v.masked_fill(v >= v.amax(-1, keepdim=True), -1e30).amax(-1, keepdim=True)
    pick = (v >= second).float()
    w = score * pick
    w = w / (w.sum(-1, keepdim=True) + EPS) * 1.5
    load = pick.mean(0) * (experts / 2)
    k = w1.shape[1] + s1.shape[1]
    gu = x @ torch.cat([w1, s1, w3, s3], 1).to(x.dtype)
    g, u = gu[:, :k].float().clamp(max=10), gu[:, k:].float().clamp(-10, 10)
    weight = torch.cat([w, torch.ones_like(w[:, :1])], 1).unsqueeze(-1)
    act = ((F.silu(g) * u).unflatten(-1, (experts + 1, -1)) * weight).flatten(1).to(x.dtype)
    return act @ torch.cat([w2, s2], 0).to(x.dtype), load


@compiled
def qkv(x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin):
    qr = rms(linear(x, wq_a), q_norm).to(x.dtype)
    q = rotate(linear(qr, wq_b).float().unflatten(-1, (HEADS, HEAD_DIM)), cos.unsqueeze(1), sin.unsqueeze(1)).to(x.dtype)
    return qr, q, through(rotate(rms(linear(x, wkv), kv_norm), cos, sin), round_fp8).to(x.dtype)


@compiled
def context_kv(x, wkv, kv_norm, cos, sin):
    return through(rotate(rms(linear(x, wkv), kv_norm), cos, sin), round_fp8).to(x.dtype)


@compiled
def project_out(o, wo_a, wo_b, cos, sin):
    dtype = o.dtype
    o = rotate(o.float(), cos.unsqueeze(1), -sin.unsqueeze(1)).to(dtype).flatten(1).unflatten(-1, (O_GROUPS, -1))
    u = torch.bmm(o.transpose(0, 1), wo_a.to(dtype).transpose(1, 2))
    return linear(u.transpose(0, 1).flatten(1), wo_b)


def window_mask(conv, length: int):
    """[B, chunks, W, 2W]: a chunk of W rows sees its own and the previous chunk: the last W rows, same conversation only."""
    rows, n = conv.shape[0], length // WINDOW
    own = conv.view(rows, n, WINDOW)
    before = F.pad(conv, (WINDOW, 0), value=-1)[:, :length].view(rows, n, WINDOW)
    i = torch.arange(WINDOW, device=conv.device)
    j = torch.arange(2 * WINDOW, device=conv.device) - WINDOW
    near = (j[None] <= i[:, None]) & (j[None] > i[:, None] - WINDOW)
    return near & (torch.cat([before, own], 2)[:, :, None, :] == own[..., None])


def _window_scores(q, kv):
    rows, length = kv.shape[:2]
    n = length // WINDOW
    before = F.pad(kv, (0, 0, WINDOW, 0))[:, :length].view(rows, n, WINDOW, HEAD_DIM)
    keys = torch.cat([before, kv.view(rows, n, WINDOW, HEAD_DIM)], 2).view(rows * n, 2 * WINDOW, HEAD_DIM)
    return keys, torch.bmm(q.reshape(rows * n, WINDOW * HEADS, HEAD_DIM), keys.transpose(1, 2)).view(rows, n, WINDOW, HEADS, 2 * WINDOW)


@compiled
def attend_window(q, kv, mask, sink):
    rows, length = kv.shape[:2]
    n = length // WINDOW
    keys, s = _window_scores(q, kv)
    s = (s.float() * HEAD_DIM**-0.5).masked_fill(~mask.unsqueeze(3), -1e30)
    sink = sink.view(1, 1, 1, -1, 1)
    top = torch.maximum(s.amax(-1, keepdim=True), sink).detach()
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sink - top)
    return torch.bmm((p / total).to(q.dtype).view(rows * n, WINDOW * HEADS, 2 * WINDOW), keys).view(rows * length, HEADS, HEAD_DIM)


@compiled
def attend_both(q, kv, latent, mask, picked, sink):
    """Window rows and picked compressed entries under one softmax. -> output, log-sum-exp per head [B, T, H]."""
    rows, length = kv.shape[:2]
    n = length // WINDOW
    keys, s = _window_scores(q, kv)
    s = (s.float() * HEAD_DIM**-0.5).masked_fill(~mask.unsqueeze(3), -1e30).view(rows, length, HEADS, -1)
    e = torch.bmm(q.reshape(rows, length * HEADS, HEAD_DIM), latent.transpose(1, 2)).view(rows, length, HEADS, -1).float() * HEAD_DIM**-0.5
    e = e.masked_fill(~picked.unsqueeze(2), -1e30)
    sink = sink.view(1, 1, -1, 1)
    top = torch.maximum(torch.maximum(s.amax(-1, keepdim=True), e.amax(-1, keepdim=True)), sink).detach()
    p, z = torch.exp(s - top), torch.exp(e - top)
    total = p.sum(-1, keepdim=True) + z.sum(-1, keepdim=True) + torch.exp(sink - top)
    o = torch.bmm((p / total).to(q.dtype).reshape(rows * n, WINDOW * HEADS, 2 * WINDOW), keys).view(rows, length * HEADS, HEAD_DIM)
    o = o + torch.bmm((z / total).to(q.dtype).reshape(rows, length * HEADS, -1), latent)
    return o.view(rows * length, HEADS, HEAD_DIM), (top + torch.log(total)).detach().squeeze(-1)


@compiled
def compress(x, wkv, gate, norm, ik, ik_norm, cos, sin):
    """x [B, T, D]; cos, sin at the first position of each entry. -> entries, index keys."""
    k = linear(x, wkv).float()
    if gate is not None:
        g = linear(x, gate).float().unflatten(1, (-1, 2)).softmax(2)
        k = (g * k.unflatten(1, (-1, 2))).sum(2)
    latent = rms(k, norm)
    key = through(rotate(rms(linear(latent.detach().to(x.dtype), ik), ik_norm), cos, sin), round_fp4).to(x.dtype)
    return through(rotate(latent, cos, sin), round_fp4_e4m3).to(x.dtype), key


@compiled
def index_query(qr, x, iq, iw, cos, sin):
    q = linear(qr, iq).float().unflatten(-1, (INDEX_HEADS, INDEX_DIM))
    q = through(rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2)), round_fp4).to(x.dtype)
    return q, linear(x, iw).float() * (INDEX_DIM * INDEX_HEADS) ** -0.5


@compiled
def index_scores(q, w, key, visible):
    rows, n = q.shape[:2]
    s = torch.bmm(q.reshape(rows, n * INDEX_HEADS, INDEX_DIM), key.transpose(1, 2)).view(rows, n, INDEX_HEADS, -1).float()
    return (s.relu() * w.unsqueeze(-1)).sum(2).masked_fill(~visible, -1e30)


@compiled
def index_loss(score, q, latent, lse, picked):
    """KL between the layer's own attention over the picked entries (heads summed, detached) and the softmax of the index scores."""
    rows, n = score.shape[:2]
    s = torch.bmm(q.reshape(rows, n * HEADS, HEAD_DIM), latent.transpose(1, 2)).view(rows, n, HEADS, -1).float() * HEAD_DIM**-0.5
    t = torch.exp(s - lse.unsqueeze(-1)).masked_fill(~picked.unsqueeze(2), 0.0).sum(2).detach()
    t = t / (t.sum(-1, keepdim=True) + 1e-9)
    log_p = score.masked_fill(~picked, -1e30).log_softmax(-1).clamp_min(-60)
    ok = (picked.sum(-1) > 1).float()
    return ((t * ((t + 1e-9).log() - log_p)).sum(-1) * ok).sum() / (ok.sum() + 1)


@compiled
def engram(h, rows, wkv, q_weight, k_weight):
    """rows [N, columns, width]: gathered table rows. -> streams, mean gate."""
    kv = linear(through_weights(rows).flatten(1).to(h.dtype), wkv).float()
    key = kv[:, : STREAMS * HIDDEN].unflatten(-1, (STREAMS, HIDDEN))
    x = h.float()
    dot = (x * (q_weight * k_weight) * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + EPS) * torch.rsqrt(key.square().mean(-1) + EPS) * HIDDEN**-0.5
    gate = torch.sigmoid(torch.where(dot >= 0, 1.0, -1.0) * dot.abs().clamp_min(1e-6).sqrt())
    return (x + gate.unsqueeze(-1) * kv[:, None, STREAMS * HIDDEN :]).to(h.dtype), gate.detach().mean()


def through_weights(rows):
    """Table rows are always seen as the pack stores them."""
    return rows + (round_fp8(rows.detach()) - rows.detach())


@compiled
def next_token_loss(x, head, target):
    """-> cross entropy [N], argmax [N]"""
    logits = linear(x, head).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.detach().argmax(-1)


@compiled
def attend_draft(q, context, block, mask, sink):
    """q [M, 5, H, HD], context rows [M, W, HD], block rows [M, 5, HD]: no causal mask inside the block."""
    m = q.shape[0]
    k = torch.cat([context, block], 1)
    s = torch.bmm(q.reshape(m, -1, HEAD_DIM), k.transpose(1, 2)).view(m, BLOCK, HEADS, -1).float() * HEAD_DIM**-0.5
    s = s.masked_fill(~mask[:, None, None], -1e30)
    sink = sink.view(1, 1, -1, 1)
    top = torch.maximum(s.amax(-1, keepdim=True), sink).detach()
    p = torch.exp(s - top)
    p = p / (p.sum(-1, keepdim=True) + torch.exp(sink - top))
    return torch.bmm(p.to(q.dtype).view(m, BLOCK * HEADS, -1), k).view(m * BLOCK, HEADS, HEAD_DIM)


@compiled
def draft_loss(z, mark, norm, head, m2, target, conf):
    """-> cross entropy, argmax, confidence logit, all [M * 5]"""
    logits = linear(torch.cat([rms(z, norm).to(mark.dtype), mark], -1), torch.cat([head, m2], 1)).float()
    ce = F.cross_entropy(logits, target, reduction="none")
    return ce, logits.detach().argmax(-1), (torch.cat([z.detach().float(), mark.detach().float()], -1) * conf).sum(-1)


@compiled
def draft_context(taps, weight, norm):
    return rms(linear(taps, weight), norm).to(taps.dtype)


def _best(score, count: int):
    """Indices of the best scores. On the CPU ties go to the smaller index, as in the engine; on the GPU (faster) to any: exact ties are zeros."""
    count = min(count, score.shape[-1])
    if DEVICE == "cpu":
        return torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :count]
    return score.topk(count, -1, sorted=False).indices


class Model:
    """Parameters by trainer name in `p` (float32 masters), router biases in `bias`, and the two forwards."""

    def __init__(self, token_map: list[int], noise_id: int, seed: int = arch.SEED, length: int = 4096):
        start, bias = arch.initial(seed)
        self.p = {k: torch.from_numpy(np.ascontiguousarray(v)).to(DEVICE).requires_grad_() for k, v in start.items()}
        self.bias = {k: torch.from_numpy(v).to(DEVICE) for k, v in bias.items()}
        self.map = torch.tensor(token_map, device=DEVICE)
        self.pad = int(token_map[2])
        self.noise_id = noise_id
        self.primes, self.mult = arch.primes(), arch.multipliers(len(set(token_map)))
        self.rope = rope_tables(length + 16)
        self.load: dict[str, torch.Tensor] = {}
        self.gate: dict[int, torch.Tensor] = {}
        self.engram_mode = "on"  # "on", "off", "shuffled" (rows of other buckets)
        self.entries = True  # False: compressed entries masked (negative control)

    def _w(self, prefix: str, *names: str):
        return [self.p[prefix + n] for n in names]

    def engram_rows(self, ids, conv, drop=None):
        """Row numbers [N-gram columns] per engram layer; `drop` [B, T]: order from which on a position's rows are random (0 = none)."""
        comp = self.map[ids]
        terms = [comp]
        for k in range(1, NGRAM):
            same = F.pad(conv, (k, 0), value=-1)[:, :-k] == conv
            terms.append(torch.where(same, F.pad(comp, (k, 0))[:, :-k], self.pad))
        out = []
        for mult, primes in zip(self.mult, self.primes):
            acc, columns, base = terms[0] * mult[0], [], 0
            for k in range(1, NGRAM):
                acc = acc ^ (terms[k] * mult[k])
                for head in range(arch.ENGRAM_HEADS):
                    prime = primes[(k - 1) * arch.ENGRAM_HEADS + head]
                    bucket = acc % prime
                    if drop is not None:
                        bucket = torch.where((drop > 0) & (k + 1 >= drop), torch.randint_like(bucket, prime), bucket)
                    if self.engram_mode == "shuffled":
                        bucket = (bucket * 7919 + 13) % prime
                    columns.append(bucket + base)
                    base += prime
            out.append(torch.stack(columns, -1))
        return out

    def _block(self, prefix: str, h, pre, core):
        x, a_pre, post, comb = half_in(h, pre, *self._w(prefix + "a.", "norm", "fn", "base", "scale"))
        h = half_out(core(x), h, post, comb)
        x, f_pre, post, comb = half_in(h, a_pre, *self._w(prefix + "f.", "norm", "fn", "base", "scale"))
        z = prefix + "ffn."
        y, self.load[prefix] = moe(x, self.p[z + "gate"], self.bias[z + "bias"], *self._w(z, "w1", "w3", "w2", "s1", "s3", "s2"))
        return half_out(y, h, post, comb), f_pre

    def trunk(self, ids, conv, dense: bool = False, kl: bool = True, drop=None):
        """ids, conv [B, T] -> hidden rows before the head [N, D], taps [N, 3*D], indexer loss. `dense`: all visible entries are attended."""
        rows, length = ids.shape
        n, p = rows * length, self.p
        zero = p["norm"].sum() * 0
        h = F.embedding(ids, p["embed"]).to(DTYPE).view(n, 1, HIDDEN).expand(n, STREAMS, HIDDEN).contiguous()
        pre = torch.zeros(n, STREAMS, device=DEVICE)
        pre[:, 0] = 1
        pre = pre + zero
        table_rows, mask = self.engram_rows(ids, conv, drop), window_mask(conv, length)
        at = torch.arange(length, device=DEVICE)
        taps, losses, shared = [], [], {}
        angles = [[t[:length].repeat(rows, 1) for t in pair] for pair in self.rope]
        sample = torch.randint(0, length, (rows, SAMPLED), device=DEVICE)

        def take(t):
            return t.gather(1, sample.view(rows, -1, *[1] * (t.dim() - 2)).expand(-1, -1, *t.shape[2:]))

        for i in range(arch.LAYERS):
            prefix, ratio = f"layers.{i}.", RATIOS[i]
            z = prefix + "attn."
            if i in ENGRAM_LAYERS and self.engram_mode != "off":
                e = F.embedding(table_rows[ENGRAM_LAYERS.index(i)].view(n, -1), p[prefix + "engram.table"])
                h, self.gate[i] = engram(h, e, *self._w(prefix + "engram.", "wkv", "q_weight", "k_weight"))
            if i in TAPS:
                taps.append(h.float().mean(1).to(DTYPE))

            def core(x, i=i, z=z, ratio=ratio):
                cos, sin = angles[1 if ratio else 0]
                qr, q, kv = qkv(x, *self._w(z, "wq_a", "q_norm", "wq_b", "wkv", "kv_norm"), cos, sin)
                kv = kv.view(rows, length, -1)
                if not ratio:
                    o = attend_window(q, kv, mask, p[z + "sink"])
                    return project_out(o, *self._w(z, "wo_a", "wo_b"), cos, sin)
                x3 = x.view(rows, length, -1)
                if i in KV_SOURCES:
                    first = [t[:length:ratio] for t in self.rope[1]]
                    shared["latent"], shared["key"] = compress(x3, p[z + "cwkv"], p.get(z + "cgate"), *self._w(z, "cnorm", "ik", "iknorm"), *first)
                    owner = conv[:, ::ratio].contiguous()
                    closed = torch.arange(length // ratio, device=DEVICE)[None, None] < ((at + 1) // ratio)[None, :, None]
                    shared["visible"] = closed & (owner[:, None] == conv[:, :, None])
                visible = shared["visible"]
                if i in INDEX_SOURCES:
                    shared["picked"] = visible if dense else self._select(i, z, qr.view(rows, length, -1), x3, shared, at)
                picked = shared["picked"] if self.entries else torch.zeros_like(shared["picked"])
                o, lse = attend_both(q, kv, shared["latent"], mask, picked, p[z + "sink"])
                if i in INDEX_SOURCES and kl:
                    some = [t[sample] for t in self.rope[1]]
                    iq, iw = index_query(take(qr.detach().view(rows, length, -1)), take(x3.detach()), *self._w(z, "iq", "iw"), *some)
                    score = index_scores(iq, iw, shared["key"], take(visible))
                    losses.append(
                        index_loss(score, take(q.detach().view(rows, length, HEADS, HEAD_DIM)), shared["latent"].detach(), take(lse), take(picked))
                    )
                return project_out(o, *self._w(z, "wo_a", "wo_b"), cos, sin)

            h, pre = self._block(prefix, h, pre, core)
        return collapse(h, pre, p["norm"]), torch.cat(taps, -1), sum(losses) / len(INDEX_SOURCES) if losses else zero

    @torch.no_grad()
    def _select(self, i: int, z: str, qr, x, shared: dict, at):
        """Mask of the entries picked for every row."""
        length, visible = x.shape[1], shared["visible"]
        q, w = index_query(qr, x, *self._w(z, "iq", "iw"), self.rope[1][0][:length], self.rope[1][1][:length])
        m = index_scores(q, w, shared["key"], visible)
        if i == CANDIDATE_SOURCE:
            blocks = m.unflatten(-1, (-1, CANDIDATE_SIZE)).amax(-1)
            newest = (at // CANDIDATE_SIZE).view(1, length, 1).expand(x.shape[0], -1, 1)
            blocks = blocks.scatter(-1, newest, 1e30)
            best = _best(blocks, CANDIDATE_BLOCKS)
            shared["candidates"] = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, best, True).repeat_interleave(CANDIDATE_SIZE, -1)
        elif i > CANDIDATE_SOURCE:
            m = m.masked_fill(~shared["candidates"], -1e30)
        picked = torch.zeros_like(visible).scatter(-1, _best(m, INDEX_TOPK), True) & visible
        return picked & shared["candidates"] if i > CANDIDATE_SOURCE else picked

    def draft(self, ids, conv, taps, anchor, following, target):
        """anchor [B, A]: position of the pending token; following [B, A, 6]: ids there and after; target [B, A, 5].

        -> cross entropy, argmax and confidence logit, [M * 5] each."""
        rows, length = ids.shape
        m, p = rows * anchor.shape[1], self.p
        zero = p["mtp.mnorm"].sum() * 0
        context = draft_context(taps, p["mtp.main"], p["mtp.mnorm"])
        cos, sin = [t[:length].repeat(rows, 1) for t in self.rope[0]]
        block = torch.full((rows, anchor.shape[1], BLOCK), self.noise_id, device=DEVICE)
        block[..., 0] = following[..., 0]
        h = (F.embedding(block.view(-1), p["embed"].detach()) + zero).to(DTYPE).unsqueeze(1).expand(-1, STREAMS, -1).contiguous()
        pre = torch.zeros(m * BLOCK, STREAMS, device=DEVICE)
        pre[:, 0] = 1
        pre = pre + zero
        at = (anchor[..., None] + torch.arange(BLOCK, device=DEVICE)).view(-1)
        b_cos, b_sin = self.rope[0][0][at], self.rope[0][1][at]
        before = anchor[..., None] - WINDOW + torch.arange(WINDOW, device=DEVICE)
        ok = before >= 0
        before = before.clamp_min(0).view(rows, -1)
        ok = ok & (conv.gather(1, before).view(rows, anchor.shape[1], -1) == conv.gather(1, anchor)[..., None])
        mask = torch.cat([ok.view(m, -1), torch.ones(m, BLOCK, dtype=torch.bool, device=DEVICE)], 1)
        for s in range(arch.STAGES):
            z = f"mtp.{s}.attn."

            def core(x, z=z):
                _, q, own = qkv(x, *self._w(z, "wq_a", "q_norm", "wq_b", "wkv", "kv_norm"), b_cos, b_sin)
                kc = context_kv(context, *self._w(z, "wkv", "kv_norm"), cos, sin).view(rows, length, -1)
                kc = kc.gather(1, before[..., None].expand(-1, -1, HEAD_DIM)).view(m, WINDOW, -1)
                o = attend_draft(q.view(m, BLOCK, HEADS, HEAD_DIM), kc, own.view(m, BLOCK, -1), mask, p[z + "sink"])
                return project_out(o, *self._w(z, "wo_a", "wo_b"), b_cos, b_sin)

            h, pre = self._block(f"mtp.{s}.", h, pre, core)
        z = stream_sum(h, pre)
        mark = F.embedding(following[..., :BLOCK].reshape(-1), p["mtp.m1"]).to(DTYPE)
        return draft_loss(z, mark, p["mtp.dnorm"], p["head"].detach(), p["mtp.m2"], target.reshape(-1), p["mtp.conf"])

    # ---- rounding of the weights
    def _formats(self) -> tuple[list[str], list[str], list[str]]:
        """Names stored as fp8 tiles, as fp4 groups, as bf16 (tables round row by row as they are gathered; the rest stays float32)."""
        last = {k: k.rsplit(".", 1)[-1] for k in self.p}
        fp8 = [k for k in self.p if last[k] in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "iq", "main", "s1", "s3", "s2")]
        fp4 = [k for k in self.p if last[k] in ("w1", "w3", "w2")]
        exact = ("fn", "base", "scale", "sink", "table")
        return fp8, fp4, [k for k in self.p if k not in fp8 and k not in fp4 and last[k] not in exact]

    @torch.no_grad()
    def round_weights(self) -> dict[str, torch.Tensor]:
        """Overwrite the weights by what the pack will hold; -> the masters, for `restore`."""
        fp8, fp4, bf16 = self._formats()
        keep = {k: self.p[k].detach().clone() for k in fp8 + fp4 + bf16}
        tiles, shapes = [], []
        for k in fp8:
            w = keep[k].reshape(-1, keep[k].shape[-1])
            t = w.view(w.shape[0] // 32, 32, -1, 32).transpose(1, 2)
            shapes.append(t.shape)
            tiles.append(t.reshape(-1, 1024))
        q, start = round_fp8(torch.cat(tiles), 1024), 0
        for k, s in zip(fp8, shapes):
            count = s[0] * s[1]
            self.p[k].data.copy_(q[start : start + count].view(s[0], s[1], 32, 32).transpose(1, 2).reshape(keep[k].shape))
            start += count
        q, start = round_fp4(torch.cat([keep[k].reshape(-1, 32, keep[k].shape[1]).transpose(1, 2).reshape(-1, 32) for k in fp4])), 0
        for k in fp4:  # groups of 32 inputs are rows here: the matrices are stored [in, out]
            w = keep[k]
            count = w.numel() // 32
            self.p[k].data.copy_(q[start : start + count].view(-1, w.shape[1], 32).transpose(1, 2).reshape(w.shape))
            start += count
        for k in bf16:
            self.p[k].data.copy_(keep[k].to(torch.bfloat16).float())
        return keep

    @torch.no_grad()
    def restore(self, keep: dict[str, torch.Tensor]) -> None:
        torch._foreach_copy_([self.p[k].data for k in keep], list(keep.values()))
