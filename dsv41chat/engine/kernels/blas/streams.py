"""Hyper-connections: spreading, coefficients, collapse and norm of all streams in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.blas.dense import filled, host, multiply, turned
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import Site, bare
from dsv41chat.engine.nn.hyper_connection import HyperConnection, HyperHead


class Coefficients:
    """(streams [n, S, D]) -> pre [n, S], post [n, S], comb [n, S, S] of one sublayer."""

    def __init__(self, module: HyperConnection, trunk: Any):
        s = self.streams = round((1 + module.fn.shape[0]) ** 0.5) - 1
        self.fn, self.width = filled(module, trunk, "fn"), module.fn.shape[0]
        scale = np.array(module.scale)
        self.scale = np.repeat(scale, [s, s, s * s])
        self.base, self.iterations, self.eps, self.norm_eps = np.array(module.base), module.iterations, np.float32(module.eps), module.norm_eps

    def __call__(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, s = h.shape[0], self.streams
        m = scores(h, self.fn, self.norm_eps)[:, : self.width]
        m *= self.scale
        m += self.base
        gates = sigmoid(m[:, : 2 * s])
        pre, post = gates[:, :s] + self.eps, 2 * gates[:, s:]
        comb = m[:, 2 * s :].reshape(n, s, s)
        comb = np.exp(comb - np.maximum.reduce(comb, axis=2, keepdims=True))
        comb /= np.add.reduce(comb, axis=2, keepdims=True)
        comb += self.eps
        self._columns(comb)
        for _ in range(self.iterations - 1):
            total = np.add.reduce(comb, axis=2, keepdims=True)
            total += self.eps
            comb /= total
            self._columns(comb)
        return pre, post, comb

    def _columns(self, comb: np.ndarray) -> None:
        total = np.add.reduce(comb, axis=1, keepdims=True)
        total += self.eps
        comb /= total


def scores(h: np.ndarray, fn: np.ndarray, eps: float) -> np.ndarray:
    """Products of the normed flat streams with fn [S * D, K] -> [n, K]; the norm's factor is applied to the result."""
    flat = h.reshape(h.shape[0], -1)
    m = multiply(flat, fn)
    m *= inverse_root(flat, eps)[:, None]
    return m


def inverse_root(x: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(x^2) + eps) over the last axis."""
    mean = np.vecdot(x, x)
    mean /= np.float32(x.shape[-1])
    mean += np.float32(eps)
    return np.reciprocal(np.sqrt(mean))


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a large positive number overflows to infinity, whose reciprocal is the right 0.
    with np.errstate(over="ignore"):
        return np.reciprocal(1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """A new array: RMS norm over the last axis."""
    y = x * inverse_root(x, eps)[..., None]
    if weight is not None:
        y *= weight
    return y


def spread(y: np.ndarray, h: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
    out = np.matmul(comb.transpose(0, 2, 1), h)
    out += post[:, :, None] * y[:, None, :]
    return out


def collapse(h: np.ndarray, pre: np.ndarray) -> np.ndarray:
    return np.matmul(pre[:, None, :], h)[:, 0]


def enter(site: Site) -> Callable:
    layer = site.owner
    into_attention = site.field == "into_attention"
    mixed = Coefficients(bare(layer.attn_mix if into_attention else layer.ffn_mix), site.trunk)
    weight, eps = host(layer.attn_norm if into_attention else layer.ffn_norm), layer.eps

    def call(h, before, y, post, comb):
        streams = host(h)
        if y is not None:
            streams = spread(host(y), streams, host(post), host(comb))
        pre, post, comb = mixed(streams)
        x = norm(collapse(streams, host(before) if layer.lagged else pre), weight, eps)
        return streams, x, pre, post, comb

    return call


def mix(site: Site) -> Callable:
    """For callers that collapse and spread themselves (drafters)."""
    mixed = Coefficients(site.stock, site.trunk)
    return lambda h: mixed(host(h))


def head_collapse(module: HyperHead, trunk: Any) -> Callable[[np.ndarray], np.ndarray]:
    fn, scale, base = filled(module, trunk, "fn"), np.array(module.scale), np.array(module.base)

    def call(streams: np.ndarray) -> np.ndarray:
        weights = sigmoid(scores(streams, fn, module.norm_eps)[:, : len(base)] * scale + base) + np.float32(module.eps)
        return collapse(streams, weights)

    return call


def head_mix(site: Site) -> Callable:
    collapsed = head_collapse(site.stock, site.trunk)
    return lambda h: collapsed(host(h))


def settle(site: Site) -> Callable:
    def call(h, before, y, post, comb):
        return host(h) if y is None else spread(host(y), host(h), host(post), host(comb))

    return call


def begin(site: Site) -> Callable:
    """Embedding rows, once per stream; with the coefficients of V4.1."""
    trunk = site.owner
    if not isinstance(trunk.embed, mx.array):
        raise Declined("the embedding stays packed")
    table, count = host(trunk.embed), trunk.config.hc_mult
    first = np.zeros((1, count), np.float32)
    first[0, 0] = 1

    def call(ids):
        rows = table[host(ids)]
        h = np.repeat(rows[:, None], count, axis=1)
        return (h, np.repeat(first, len(rows), axis=0)) if trunk.config.family == "v41" else h

    return call


def tap(site: Site) -> Callable:
    def call(h):
        streams = host(h)
        return np.add.reduce(streams, axis=1) / np.float32(streams.shape[1])

    return call


def logits(site: Site) -> Callable:
    """The last collapse, norm and head."""
    trunk = site.owner
    head, weight, eps = turned(bare(trunk.head), site.trunk), host(trunk.norm), trunk.config.rms_norm_eps
    learned = head_collapse(bare(trunk.head_mix), trunk) if trunk.config.family == "v4" else None

    def call(h, pre=None):
        streams = host(h)
        x = collapse(streams, host(pre)) if learned is None else learned(streams)
        return multiply(norm(x, weight, eps), head)

    return call


def engram(site: Site) -> Callable:
    """The gate of table rows, as `nn.engram.Engram`."""
    module = site.stock
    weight, qk, eps = turned(bare(module.wkv), site.trunk), host(module.qk), module.eps

    def call(h, table_rows, dead):
        x = host(h)
        n, s, d = x.shape
        kv = multiply(host(table_rows), weight)
        key, value = kv[:, : s * d].reshape(n, s, d), kv[:, s * d :]
        dot = np.vecdot(x * qk, key) * inverse_root(x, eps) * inverse_root(key, eps) * np.float32(d**-0.5)
        root = np.copysign(np.sqrt(np.maximum(np.abs(dot), np.float32(1e-6))), dot)
        gate = np.where(host(dead)[:, None], np.float32(0), sigmoid(root))
        return x + gate[..., None] * value[:, None, :]

    return call
