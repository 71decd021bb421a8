"""The bench arm of kernels on the CPU shim: what it compares and what it says. No timing is judged here."""

from __future__ import annotations

import argparse
from dataclasses import replace

import mlx.core as mx

from dsv41chat.bench import kernels
from dsv41chat.engine.kernels.gpu import gpu_route
from dsv41chat.engine.kernels.routes import install
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.nano import embedded_pack
from tests.engine.kernels.shim import Shim, needs_compiler


@needs_compiler
def test_every_kind_of_routed_operation_is_compared():
    trunk = build_trunk(open_pack(embedded_pack()), dtype=mx.bfloat16, packed=True, engram=False)
    trunk = replace(trunk, layers=[replace(layer, engram=None) for layer in trunk.layers[:1]], plan=trunk.plan[:1])
    unit = Shim("metal")
    trunk.routes = install(trunk, trunk, "metal", routes=(gpu_route("metal", unit, lambda: None, frozenset({"cpu"})),), device="cpu")
    unit.launches.clear()
    found = kernels.measure(trunk, [1], chain=2, repeats=1)
    assert {entry["op"] for entry in found} >= {"mix", "enter", "project", "latent", "gathered", "router", "experts", "matrix"}
    assert all(entry["route"] == "metal" and set(entry["microseconds"]["1"]) == {"stock", "route"} for entry in found)
    assert unit.launches.count("experts_down") == 4 and "experts    x1" in kernels.table(found), "a warm-up and one chain of two"


def test_without_a_route_it_says_so(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    kernels.add_options(parser)
    assert kernels.run_options(parser.parse_args(["--route", "stock", "-o", str(tmp_path)])) == 1
    assert "every operation is stock here" in capsys.readouterr().out and not list(tmp_path.iterdir())
