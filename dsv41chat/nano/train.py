"""The trainer: `python -m dsv41chat.nano.train --data FOLDER --out FOLDER --minutes 9` on one GPU.

FOLDER of --data is what `python -m dsv41chat.nano.corpus` wrote. Out come the four release shards, log.jsonl (curve and evaluations) and, with
--state, the float32 masters and Adam moments for a continuation (`--continue`) on the same machine. The schedule follows the clock: `f` is
the elapsed share of the minutes left after compilation, so a slower machine still ends with a finished run.

`--start PACK` goes on from the rounded weights of an exported pack instead: fresh moments, rounding and hard selection from the first step, a
rate that falls for most of the run; `--mix missed` gives the kinds that missed their bars more room. The best of the held-out evaluations of
such a run is what is exported, never a state that is worse than the start.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
import torch.nn.functional as F

from . import arch, corpus, evalset, export, model, report, tokenizer
from .generators.turns import KINDS
from .model import BLOCK, DEVICE, Model

SHORT, LONG = (128, 512), (16, 4096)  # rows x tokens of a step; both hold 65,536 tokens
ANCHORS = 32  # draft anchors per 512 tokens
USER_WEIGHT, KEY_WEIGHT = 0.02, 2.0
QUICK = ("definitions", "everyday", "commands", "geography", "sums_chat", "recall_near", "unknown_pseudo", "unknown_real", "out_of_scope")
# Sets whose items fill their rows: one batch of rows holds too few of them for a figure.
BATCHES = {"needle_4k": 8, "needle_2k": 4, "needle_1k": 3, "needle_512": 2, "recall_far": 4, "times_thinking": 2}


@dataclass(frozen=True)
class Stage:
    """What a moment of the schedule asks of a step."""

    dense: bool = False  # all visible entries are attended
    rounded: bool = True  # the weights are what the pack holds
    draft_weight: float = 0.5
    own_targets: bool = True  # the drafter learns what the trunk would say, not what the text says
    detached: bool = False  # its loss does not reach the trunk


def stage(f: float, started: bool = False) -> Stage:
    """At elapsed share f of a run from nothing, or of one that started from a trained pack."""
    if started:
        return Stage(detached=f >= 0.9)
    return Stage(f < 0.06, f >= 0.5, 0.25 if f < 0.1 else 0.5, f >= 0.6, f >= 0.9)


EVALUATION = Stage()


class Log:
    def __init__(self, path: Path | None):
        self.start, self.file = time.time(), open(path, "a") if path else None

    def __call__(self, **fields) -> None:
        line = json.dumps({"t": round(time.time() - self.start, 1), **fields})
        print(line, flush=True)
        if self.file:
            self.file.write(line + "\n")
            self.file.flush()


# ---- data
def _produce(queue, folder: str, seed: int, shape: tuple[int, int], mix: str) -> None:
    torch.set_num_threads(1)
    stream = corpus.Corpus(Path(folder), seed, mix=mix)
    while True:
        queue.put(stream.batch(*shape))


def start_producers(folder: Path, shape: tuple[int, int], count: int, seed: int, depth: int, mix: str):
    """Forked worker processes that fill a queue with batches; call before the accelerator is touched."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue(depth)
    workers = [context.Process(target=_produce, args=(queue, str(folder), seed + i, shape, mix), daemon=True) for i in range(count)]
    for worker in workers:
        worker.start()
    return queue, workers


def _eval_rows(job: tuple[str, str, int, int, int]):
    folder, name, rows, length, seed = job
    return evalset.rows(name, corpus.Corpus(Path(folder), seed, held=True), rows, length)


def to_device(batch: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
    """Small dtypes travel from pinned memory and are widened on the device."""
    tensors = [torch.from_numpy(a) for a in batch]
    if DEVICE == "cuda":
        tensors = [t.pin_memory().to(DEVICE, non_blocking=True) for t in tensors]
    return [t if i == 1 else t.long() for i, t in enumerate(tensors)]


# ---- one forward with all losses
class Trainer:
    def __init__(self, folder: Path, args: argparse.Namespace):
        self.args = args
        path = folder / "tokenizer.json"
        token_map, ids = tokenizer.compressed_map(path), tokenizer.marker_ids(path)
        self.model = Model(token_map, ids[arch.SYSTEM], args.seed, args.long_shape[1])
        self.eos = ids[arch.EOS]
        groups: list[list] = [[], [], []]
        for name, p in self.model.p.items():
            groups[2 if name.endswith("table") else 0 if p.dim() > 1 and not name.endswith(("q_weight", "k_weight")) else 1].append(p)
        lr = args.lr
        self.optimizer = torch.optim.AdamW(
            [
                dict(params=groups[0], weight_decay=0.05, base=lr),
                dict(params=groups[1], weight_decay=0.0, base=lr),
                dict(params=groups[2], weight_decay=0.0, base=lr * 5),
            ],
            lr=lr,
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=DEVICE == "cuda",
        )
        self.all = [p for g in groups for p in g]
        self.fade = (0.8 ** torch.arange(BLOCK)).to(DEVICE)

    def _drop(self, code) -> torch.Tensor:
        """Positions of user text whose rows are replaced from some n-gram order on: unseen n-grams must be harmless."""
        rows, length = code.shape
        share = torch.where(torch.rand(rows, 1, device=DEVICE) < 0.25, 0.8, self.args.row_noise)
        hit = ((code & 7) == corpus.USER_TEXT) & (torch.rand(rows, length, device=DEVICE) < share)
        return torch.where(hit, torch.randint(2, arch.NGRAM + 1, (rows, length), device=DEVICE), 0)

    def forward(self, batch, stage: Stage = EVALUATION, train: bool = True) -> tuple[torch.Tensor, dict]:
        """Total loss and what the log and the evaluation need. batch: arrays of `Corpus.pack` on the device."""
        full, code, conv, reply = batch
        ids, conv = full[:, :-1].contiguous(), conv[:, :-1].contiguous()
        rows, length = ids.shape
        target, after = full[:, 1:].contiguous(), code[:, 1:].long()
        part = after & 7
        weight = torch.where(
            part == corpus.KEY, KEY_WEIGHT, torch.where(part > corpus.USER_TEXT, 1.0, torch.where(part == corpus.USER_TEXT, USER_WEIGHT, 0.0))
        )
        drop = self._drop(code[:, :-1]) if train and self.args.row_noise else None
        x, taps, kl = self.model.trunk(ids, conv, stage.dense, train, drop)
        ce, best = model.next_token_loss(x, self.model.p["head"], target.view(-1))
        best = best.view(rows, length)
        lm = (ce * weight.view(-1)).sum() / weight.sum()
        chance = (part[:, : length - BLOCK - 1] > corpus.USER_TEXT).float() + 1e-6
        noise = -(-torch.rand_like(chance).clamp_min(1e-20).log()).clamp_min(1e-20).log()
        anchor = (chance.log() + noise).topk(ANCHORS * length // 512, -1).indices
        target5 = best if stage.own_targets else target
        taps_ = taps.detach() if stage.detached else taps
        dl, cb, d = self.drafts(full, ids, conv, taps_, anchor, target5, part)
        loss = lm + 0.3 * kl + stage.draft_weight * dl + 0.1 * cb
        return loss, dict(lm=lm, kl=kl, dl=dl, ce=ce, best=best, target=target, part=part, kind=after >> 3, reply=reply[:, 1:], taps=taps, **d)

    def drafts(self, full, ids, conv, taps, anchor, target, part):
        """Draft losses at the anchors: pending token ids[anchor], proposals for the five tokens after it."""
        following = torch.stack([full.gather(1, anchor + d) for d in range(BLOCK + 1)], -1)
        wanted = torch.stack([target.gather(1, anchor + d) for d in range(BLOCK)], -1)
        valid = torch.stack([part.gather(1, anchor + d) > corpus.USER_TEXT for d in range(BLOCK)], -1).float().cumprod(-1)
        ce, guess, conf = self.model.draft(ids, conv, taps, anchor, following, wanted)
        w = self.fade * valid
        hit = (guess.view(valid.shape) == wanted).float()
        cb = (F.binary_cross_entropy_with_logits(conf.view(valid.shape), hit, reduction="none") * valid).sum() / (valid.sum() + 1e-6)
        return (
            (ce.view(valid.shape) * w).sum() / (w.sum() + 1e-6),
            cb,
            dict(anchor=anchor, hit=hit.detach(), valid=valid, conf=conf.detach().view(valid.shape)),
        )

    def step(self, batch, stage: Stage, rate: float) -> tuple[torch.Tensor, dict, torch.Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * rate
        keep = self.model.round_weights() if stage.rounded else None
        loss, info = self.forward(batch, stage)
        loss.backward()
        if keep is not None:
            self.model.restore(keep)
        norm = torch.nn.utils.clip_grad_norm_(self.all, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for prefix, load in self.model.load.items():
                self.model.bias[prefix + "ffn.bias"] += 1e-3 * torch.sign(1 - load)
        return loss.detach(), {k: v.detach() for k, v in info.items()}, norm

    # ---- evaluation: whole replies, the key, what follows the key
    def evaluate(self, batches: dict[str, list], rounded: bool, accept: bool = False) -> dict:
        keep = self.model.round_weights() if rounded else None
        out = {}
        try:
            for name, several in batches.items():
                total = {}
                for batch in several:
                    loss, info = self.forward(batch, train=False)
                    info = {k: v.detach() for k, v in info.items()}
                    del loss
                    counts = self._score(info) | (self.rounds(batch, info) if accept else {})
                    for key, value in counts.items():
                        total[key] = total[key] + value if key in total else value
                out[name] = _rates({k: v.tolist() if torch.is_tensor(v) else v for k, v in total.items()})
        finally:
            if keep is not None:
                self.model.restore(keep)
        return out

    def _score(self, info: dict) -> dict[str, torch.Tensor]:
        """Counts and sums of one batch, as `_rates` divides them."""
        reply, part, ok = info["reply"].reshape(-1), info["part"].reshape(-1), (info["best"] == info["target"]).reshape(-1)
        n = int(reply.max()) + 1

        def every(v):
            return torch.ones(n, device=DEVICE).scatter_reduce(0, reply, v.float(), "amin")

        def some(v):
            return torch.zeros(n, device=DEVICE).scatter_reduce(0, reply, v.float(), "amax") > 0

        counted, fact = part > corpus.USER_TEXT, part == corpus.FACT
        done = some((info["target"].reshape(-1) == self.eos) & counted)
        done[0] = False
        keyed = some(part == corpus.KEY) & done
        out = dict(n=done.sum(), exact=(every(ok | ~counted) * done).sum(), tokens=counted.sum(), loss=info["ce"][counted].double().sum())
        out |= dict(keyed=keyed.sum(), key=(every(ok | (part != corpus.KEY)) * keyed).sum(), fact=(every(ok | ~fact) * keyed).sum())
        out |= dict(fact_tokens=fact.sum(), fact_loss=info["ce"][fact].double().sum())
        full = info["valid"].sum(-1) >= BLOCK
        hit, chance = info["hit"][full], torch.sigmoid(info["conf"][full])
        kept = hit.cumprod(-1)
        before = torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], 1)
        return out | dict(blocks=full.sum(), accepted=kept.sum(), tried=before.sum(0), gap=((chance - hit) * before).sum(0))

    def rounds(self, batch, info: dict) -> dict[str, int]:
        """Greedy drafting over every reply that the trunk itself would write: -> tokens written and verifies.

        The first token of a reply comes from prefill and is not counted."""
        full, _, conv, _ = batch
        ids, conv = full[:, :-1].contiguous(), conv[:, :-1].contiguous()
        rows, length = ids.shape
        per = ANCHORS * length // 512
        accept = torch.zeros(rows, length, dtype=torch.long, device=DEVICE)
        for first in range(0, length, per):
            anchor = (torch.arange(first, first + per, device=DEVICE).clamp(max=length - BLOCK - 2))[None].expand(rows, -1).contiguous()
            _, _, d = self.drafts(full, ids, conv, info["taps"], anchor, info["best"], info["part"])
            accept.scatter_(1, anchor, (d["hit"] * d["valid"]).cumprod(-1).sum(-1).long())
        ok = (info["best"] == info["target"]).cpu().numpy()
        reply, accept = info["reply"].cpu().numpy(), accept.cpu().numpy()
        tokens = verifies = 0
        for row in range(rows):
            numbers = reply[row]
            for number in np.unique(numbers[numbers > 0]):
                at = np.flatnonzero(numbers == number)  # target positions: token at[i] + 1 of the row
                if at[-1] - at[0] + 1 != len(at) or not ok[row, at].all() or at[-1] >= length - BLOCK - 2:
                    continue
                pending, last = at[0] + 1, at[-1] + 1  # the first token of the reply is pending after prefill
                while pending < last:
                    gain = min(int(accept[row, pending]) + 1, last - pending)
                    tokens, verifies, pending = tokens + gain, verifies + 1, pending + gain
        return dict(drafted=tokens, verifies=verifies)


def _rates(c: dict) -> dict:
    """Counts of `Trainer._score` and `rounds`, summed over batches -> rates for the log."""
    part = lambda a, b: round(c[a] / c[b], 4) if c[b] else None
    perplexity = lambda a, b: round(math.exp(c[a] / c[b]), 4) if c[b] else None
    out = dict(n=c["n"], exact=part("exact", "n"), perplexity=perplexity("loss", "tokens"))
    if c["keyed"]:
        out |= dict(key=part("key", "keyed"), fact=part("fact", "keyed"), fact_perplexity=perplexity("fact_loss", "fact_tokens"))
    if c["blocks"]:
        gaps = [round(g / max(1.0, t), 3) for g, t in zip(c["gap"], c["tried"])]
        out |= dict(accepted=round(c["accepted"] / c["blocks"], 3), confidence_gap=gaps)
    if "verifies" in c:
        out["tokens_per_verify"] = [round(c["drafted"] / max(1, c["verifies"]), 3), c["verifies"]]
    return out


def schedule(f: float, fall: float, step: int = 0, started: bool = False) -> float:
    """Rate factor at elapsed share f: warm-up (of 3 %, or 100 steps on a started run), plateau, from `fall` on linear decay to 2 %."""
    warm = min(1, (step + 1) / 100) if started else min(1, f / 0.03 + 1e-3)
    return warm * (1 if f < fall else max(0.02, 1 - (f - fall) / (1 - fall) * 0.98))


def standing(results: dict[str, dict]) -> float:
    """One figure for "better": how far sets lie under their bars counts ten times as much as the mean of all."""
    gaps = [min(0.0, r["exact"] - evalset.SETS[name][1]) for name, r in results.items() if r["n"]]
    return (10 * sum(gaps) + sum(r["exact"] for r in results.values() if r["n"])) / max(1, len(gaps))


class Best:
    """The best state of a started run by its held-out evaluations (rounded weights), kept on the device."""

    def __init__(self, t: Trainer, log: Log, sets: dict[str, list]):
        self.t, self.log, self.sets, self.value, self.at, self.kept = t, log, sets, -math.inf, 0.0, None

    def look(self, f: float) -> None:
        results = self.t.evaluate(self.sets, True)
        value = standing(results)
        better = value > self.value
        self.log(quick=round(f, 2), standing=round(value, 4), best=better, **{k: [v["exact"], v.get("key"), v["n"]] for k, v in results.items()})
        if better:
            self.value, self.at = value, f
            self.kept = [{k: v.detach().clone() for k, v in source.items()} for source in (self.t.model.p, self.t.model.bias)]

    def restore(self) -> None:
        _fill(self.t, *self.kept)
        self.log(exported=round(self.at, 2), standing=round(self.value, 4))


def _fill(t: Trainer, weights: dict, bias: dict) -> None:
    with torch.no_grad():
        for values, own in ((weights, t.model.p), (bias, t.model.bias)):
            for name, value in values.items():
                own[name].copy_(value if torch.is_tensor(value) else torch.from_numpy(np.ascontiguousarray(value)))


def _sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def train(
    t: Trainer, args: argparse.Namespace, log: Log, short, long, sets: dict[str, list], before: float = 0.0, first: int = 0, best: Best | None = None
) -> tuple[int, float]:
    """The training loop, from `before` seconds and `first` steps of earlier commands on; -> steps and seconds so far.

    best: keeps the best state of a run that started from a pack."""
    start, it, snapshot, bad, scale = time.time(), first, None, 0, 1.0
    room = args.minutes * 60 - (start - log.start) - args.reserve
    total = args.total if args.total > before + room else before + room
    quick_at = [q for q in (0.25, 0.5, 0.75, 0.9) if q > before / total]
    started = best is not None
    if started:
        best.look(0.0)
        quick_at, start = [0.5, 0.75], time.time()
        total = room = args.minutes * 60 - (start - log.start) - args.reserve
    kinds = torch.zeros(len(KINDS), 2, device=DEVICE)
    tick, ticks, waited = time.time(), 0, 0.0
    while True:
        f = it / args.steps if args.steps else (before + time.time() - start) / total
        if f >= 1 or (not args.steps and time.time() - start > room):
            break
        is_long = long is not None and f > args.long_from and it % args.long_every == args.long_every - 1
        at = time.time()
        batch = to_device((long if is_long else short).get())
        waited += time.time() - at
        loss, info, norm = t.step(batch, stage(f, started), scale * schedule(f, args.fall, it, started))
        it, ticks = it + 1, ticks + 1
        with torch.no_grad():
            m = (info["part"] > corpus.USER_TEXT).float().view(-1)
            kind = info["kind"].view(-1)
            kinds[:, 0].index_add_(0, kind, info["ce"] * m)
            kinds[:, 1].index_add_(0, kind, m)
        if it % args.log_every == 0:
            _sync()
            value, spent = float(loss), time.time() - tick
            per = (kinds[:, 0] / kinds[:, 1].clamp_min(1)).tolist()
            loads = torch.stack([x for x in t.model.load.values()])
            log(
                step=it,
                f=round(f, 3),
                loss=round(value, 4),
                lm=round(float(info["lm"]), 4),
                kl=round(float(info["kl"]), 3),
                draft=round(float(info["dl"]), 3),
                norm=round(float(norm), 2),
                kinds={KINDS[i]: round(v, 3) for i, v in enumerate(per) if v},
                load=[round(float(loads.min()), 2), round(float(loads.max()), 2)],
                gate=[round(float(g), 3) for g in t.model.gate.values()],
                tok_s=int(ticks * args.short_shape[0] * args.short_shape[1] / spent),
                wait=round(waited, 2),
            )
            kinds.zero_()
            tick, ticks, waited = time.time(), 0, 0.0
            if not math.isfinite(value):
                bad, scale = bad + 1, scale * 0.5
                log(nonfinite=bad)
                if snapshot is None or bad > 3:
                    break
                with torch.no_grad():
                    for name, kept in snapshot.items():
                        t.model.p[name].copy_(kept)
                t.optimizer.state.clear()
            elif it % (4 * args.log_every) == 0:
                snapshot = {k: p.detach().clone() for k, p in t.model.p.items()}
        if quick_at and f >= quick_at[0]:
            if started:
                best.look(f)
            else:
                r = t.evaluate({k: sets[k] for k in QUICK if k in sets}, False)
                log(quick=round(f, 2), **{k: [v["exact"], v.get("key"), v["n"]] for k, v in r.items()})
            quick_at.pop(0)
            tick, ticks, waited = time.time(), 0, 0.0
    _sync()
    seconds = time.time() - start
    batch_tokens = args.short_shape[0] * args.short_shape[1]
    log(trained=it, share=round(f, 4), seconds=round(before + seconds, 1), tokens=it * batch_tokens, tok_s=int((it - first) * batch_tokens / seconds))
    return it, before + seconds


def final_evaluation(t: Trainer, log: Log, sets: dict[str, list]) -> None:
    for name, result in t.evaluate(sets, True, accept=True).items():
        log(final=name, weights="rounded", **result)
    some = {k: sets[k] for k in ("definitions", "everyday", "geography") if k in sets}
    for name, result in t.evaluate(some, False).items():
        log(final=name, weights="float32", **result)
    for mode in ("off", "shuffled"):
        t.model.engram_mode = mode
        for name, result in t.evaluate({k: sets[k] for k in ("definitions", "geography", "commands") if k in sets}, True).items():
            log(final=name, weights="rounded", engram=mode, **result)
    t.model.engram_mode, t.model.entries = "on", False
    for name, result in t.evaluate({k: sets[k] for k in ("needle_4k", "needle_2k", "recall_far") if k in sets}, True).items():
        log(final=name, weights="rounded", entries="masked", **result)
    t.model.entries = True


def save(t: Trainer, folder: Path) -> dict[str, str]:
    """The release shards of the masters (the exporter rounds exactly as `round_weights`)."""
    p = {k: v.detach().float().cpu().numpy() for k, v in t.model.p.items()}
    return export.write_weights(folder, p, {k: v.cpu().numpy() for k, v in t.model.bias.items()})


def options() -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__)
    add = a.add_argument
    add("--data", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--state", type=Path)
    add("--minutes", type=float, default=9.0)
    add("--reserve", type=float, default=45.0, help="seconds kept for the evaluation and the export")
    add("--total", type=float, default=0.0, help="training seconds of all commands together, when this one is not the last")
    add("--resume", action="store_true", help="go on with the schedule where --state stopped")
    add("--start", type=Path, help="a pack to go on from, with fresh moments")
    add("--mix", choices=[*corpus.MIXES], default="even", help="shares of the kinds in the training stream")
    add("--lr", type=float, default=2e-3)
    add("--fall", type=float, default=0.6, help="share of the schedule from which the rate falls")
    add("--row-noise", type=float, default=0.2)
    add("--long-from", type=float, default=0.12)
    add("--long-every", type=int, default=4)
    add("--workers", type=int, default=11)
    add("--seed", type=int, default=arch.SEED)
    add("--stream-seed", type=int, default=1000)
    add("--steps", type=int, default=0, help="fixed number of steps instead of the clock (tests)")
    add("--log-every", type=int, default=50)
    add("--tiny", action="store_true", help="small rows, for a test on the CPU")
    args = a.parse_args()
    args.short_shape, args.long_shape = ((4, 128), (1, 512)) if args.tiny else (SHORT, LONG)
    return args


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "log.jsonl")
    log(
        command=" ".join(["python -m dsv41chat.nano.train", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        corpus=json.loads((args.data / "corpus.json").read_text()),
    )
    short, workers = start_producers(args.data, args.short_shape, args.workers, args.stream_seed, 48, args.mix)
    long, more = start_producers(args.data, args.long_shape, max(1, args.workers // 5), args.stream_seed + 500, 10, args.mix)
    workers += more
    names = list(evalset.SETS) if not args.tiny else ["definitions", "sums_chat"]
    shapes = {n: args.short_shape if evalset.SETS[n][2] == 512 else args.long_shape for n in names}
    pool = multiprocessing.get_context("fork").Pool(4 if not args.tiny else 1)
    # The first batch of every set is that of earlier runs.
    jobs = [(n, 990 + i + 100 * k) for i, n in enumerate(names) for k in range(1 if args.tiny else BATCHES.get(n, 1))]
    made = pool.map_async(_eval_rows, [(str(args.data), n, *shapes[n], seed) for n, seed in jobs], chunksize=1)
    try:
        if DEVICE == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        _dynamo_limits()
        t = Trainer(args.data, args)
        count = lambda test: sum(p.numel() for k, p in t.model.p.items() if test(k))
        log(
            device=torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
            torch=torch.__version__,
            python=sys.version.split()[0],
            cores=os.cpu_count(),
            trunk=count(lambda k: "table" not in k and not k.startswith("mtp")),
            tables=count(lambda k: "table" in k),
            drafter=count(lambda k: k.startswith("mtp")),
        )
        _warm(t, log, short, long)
        if args.start:
            _fill(t, *export.read_weights(args.start))
        before, first = _resume(t, args, log) if args.resume else (0.0, 0)
        sets: dict[str, list] = {n: [] for n in names}
        for (n, _), rows in zip(jobs, made.get()):
            sets[n].append(to_device(rows))
        best = Best(t, log, sets) if args.start else None
        steps, elapsed = train(t, args, log, short, long, sets, before, first, best)
        if best:
            best.look(1.0)
            best.restore()
        log(shards=save(t, args.out), steps=steps)
        if args.total > elapsed:  # another command follows
            args.state.mkdir(parents=True, exist_ok=True)
            torch.save(
                dict(
                    p={k: v.detach() for k, v in t.model.p.items()},
                    bias=t.model.bias,
                    optimizer=t.optimizer.state_dict(),
                    elapsed=elapsed,
                    steps=steps,
                ),
                args.state / "state.pt",
            )
            log(state="saved")
        else:
            final_evaluation(t, log, sets)
            report.write(args.out)
        log(done=True, seconds=round(time.time() - log.start, 1))
    finally:
        for worker in workers:
            worker.terminate()
        pool.terminate()


def _dynamo_limits() -> None:
    import torch._dynamo as dynamo

    for name in ("cache_size_limit", "recompile_limit", "accumulated_cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(dynamo.config, name):
            setattr(dynamo.config, name, 256)


def _warm(t: Trainer, log: Log, short, long) -> None:
    """Compile every shape with rate 0 before the clock of the schedule starts; leaves no trace in weights, moments or biases."""
    for name, queue in (("512", short), ("4096", long)):
        at = time.time()
        batch = to_device(queue.get())
        loss, info, norm = t.step(batch, EVALUATION, 0.0)
        _sync()
        log(
            warm=name,
            seconds=round(time.time() - at, 1),
            loss=round(float(loss), 3),
            norm=round(float(norm), 3),
            memory=round(torch.cuda.max_memory_allocated() / 2**30, 1) if DEVICE == "cuda" else 0,
        )
    t.optimizer.state.clear()
    with torch.no_grad():
        for bias in t.model.bias.values():
            bias.zero_()


def _resume(t: Trainer, args: argparse.Namespace, log: Log) -> tuple[float, int]:
    """Masters, router biases and moments of --state; -> training seconds and steps so far."""
    state = torch.load(args.state / "state.pt", map_location=DEVICE)
    _fill(t, state["p"], state["bias"])
    t.optimizer.load_state_dict(state["optimizer"])
    log(resumed=state["steps"], elapsed=round(state["elapsed"], 1))
    return state["elapsed"], state["steps"]


def main() -> None:
    code = 0
    try:
        run(options())
    except BaseException:  # the traceback must reach the log before the workers are gone
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
