"""Against transformers' own deepseek_v4: a model that it saves, loaded here, gives its logits. Needs torch and transformers >= 5.24.

Run with 5.24.0: one call and streamed, both layouts, at most 1.6e-5 apart, every argmax equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.v4 import golden as g
from tests.engine.v4 import tiny

pytestmark = pytest.mark.oracle
LENGTH = 150
CHUNKS = [40, 1, 3, 17, 60]
LAYOUTS = {
    "flash": (("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"), 1),
    "pro": (("heavily_compressed_attention", "heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"), 3),
}


@pytest.fixture(params=LAYOUTS)
def peer(request, tmp_path):
    """(folder of a saved random model, its logits in one call, its logits in chunks and then token by token)."""
    torch = pytest.importorskip("torch")
    v4 = pytest.importorskip("transformers.models.deepseek_v4")
    from transformers import DynamicCache

    kinds, hashed = LAYOUTS[request.param]
    own = ("architectures", "model_type", "compress_ratios", "num_hash_layers", "qk_rope_head_dim")
    config = v4.DeepseekV4Config(
        # 16 index heads: with few, entries whose heads are all negative tie at a score of 0, and torch breaks ties otherwise than we do.
        **({k: v for k, v in tiny.CONFIG.items() if k not in own} | {"index_n_heads": 16, "hc_sinkhorn_iters": 20}),
        layer_types=list(kinds),
        mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (len(kinds) - hashed),
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
        partial_rotary_factor=tiny.CONFIG["qk_rope_head_dim"] / tiny.CONFIG["head_dim"],
        attn_implementation="eager",
    )
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = v4.DeepseekV4ForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if name.endswith("tid2eid"):
                value.copy_(torch.stack([torch.randperm(config.n_routed_experts)[: config.num_experts_per_tok] for _ in range(len(value))]))
            elif value.ndim > 1 and "embed" not in name:
                value.copy_(torch.randn_like(value) * 1.3 * value.shape[-1] ** -0.5)
            elif name.endswith(("norm.weight", "layernorm.weight", ".scale", "hc_scale")):
                value.copy_(1 + 0.2 * torch.randn_like(value))
            else:
                value.copy_(0.5 * torch.randn_like(value))
        model.save_pretrained(tmp_path)
        ids = torch.randint(0, config.vocab_size, (1, LENGTH))
        whole = model(ids, use_cache=False).logits[0].numpy()
        cache, parts, at = DynamicCache(config=config), [], 0
        for n in CHUNKS + [1] * (LENGTH - sum(CHUNKS)):
            parts.append(model(ids[:, at : at + n], past_key_values=cache, use_cache=True).logits[0].numpy())
            at += n
    return tmp_path, ids[0].tolist(), whole, np.concatenate(parts)


def test_a_saved_transformers_model(peer):
    folder, ids, whole, streamed = peer
    trunk = build_trunk(open_pack(folder))
    for cuts, want in (([LENGTH], whole), (CHUNKS + [1] * (LENGTH - sum(CHUNKS)), streamed)):
        logits, _ = g.feed(trunk, ids, cuts)
        difference = np.abs(logits - want).max(-1)
        assert difference.max() <= g.ATOL
        assert (logits.argmax(-1) == want.argmax(-1)).all()
