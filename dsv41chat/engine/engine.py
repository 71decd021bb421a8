"""`Engine`: one loaded build. Weights are shared, sessions are independent."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from dsv41chat.engine.admission import Admission, admit, plan_memory
from dsv41chat.engine.backend import backend_info
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.device import Machine, device_kind, read_machine
from dsv41chat.engine.draft.load import DraftModel
from dsv41chat.engine.draft.shared import Drafting
from dsv41chat.engine.engram.calibrate import calibrate, wants_calibration
from dsv41chat.engine.engram.os_layer import PosixLayer
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings
from dsv41chat.engine.errors import ContextOutOfRange, PackDamaged
from dsv41chat.engine.events import Loading, Residency
from dsv41chat.engine.invariance import rows_verdict
from dsv41chat.engine.pack.build import Pack, build_drafter, build_trunk, open_pack, stays_packed
from dsv41chat.engine.session import Session
from dsv41chat.engine.trial import Trunk

_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "effort")
_PREFILL_CHUNK = {"cpu": 128, "metal": 512, "cuda": 2048}


@dataclass(frozen=True)
class PackInfo:
    """A build by its headers alone. bytes, table_bytes: on disk; resident_bytes: in memory, once loaded. context: the most the config
    allows, in tokens; drafter: dspark, mtp or None; formats: matrices by format; admission: what fits here and now."""

    name: str
    folder: Path
    family: str
    fingerprint: str
    bytes: int
    resident_bytes: int
    table_bytes: int
    context: int
    drafter: str | None
    has_tokenizer: bool
    notes: tuple[str, ...]
    formats: dict[str, int]
    admission: Admission


def probe_pack(
    folder: str | Path, *, context: int | None = None, tables_resident: bool = False, margin: int | None = None, machine: Machine | None = None,
    routes: str = "auto",
) -> PackInfo:  # fmt: skip
    """Read a build's config and headers, run the strict gate and see what fits. Raises PackError; reads no weights.

    context, tables_resident, margin, routes: as it would be opened. machine: instead of this one.
    """
    pack = open_pack(folder)
    plan = plan_memory(pack, tables_resident=tables_resident, routes=routes)
    admission = admit(plan, machine or read_machine(), pack.config.max_position_embeddings, context, margin)
    total = sum(path.stat().st_size for path in pack.index.files)
    tokenizer = (pack.folder / "tokenizer.json").is_file()
    return PackInfo(
        pack.folder.resolve().name, pack.folder, pack.config.family, pack.fingerprint, total, plan.resident, pack.table_bytes,
        pack.config.max_position_embeddings, pack.drafter, tokenizer, pack.notes, pack.formats, admission,
    )  # fmt: skip


class Engine:
    """family, name, fingerprint: of the pack. context_limit: tokens a session may hold. tokenizer: None when the pack has none.

    numeric_options: options of this loading that change bits of a state. facts: measured verdicts, by key.

    drafting: what its sessions share for drafting. admission: how it was found to fit.
    """

    def __init__(
        self,
        pack: Pack,
        trunk: Trunk,
        tokenizer: ChatTokenizer | None,
        context_limit: int,
        draft_model: DraftModel | None = None,
        exact: str = "on",
        facts: MutableMapping[str, str] | None = None,
        admission: Admission | None = None,
    ):
        self.pack, self.trunk, self.tokenizer = pack, trunk, tokenizer
        self.family, self.name, self.fingerprint = pack.config.family, pack.folder.resolve().name, pack.fingerprint
        self.context_limit, self.admission = context_limit, admission
        self.prefill_chunk = _PREFILL_CHUNK[device_kind()]
        self.device, self.mlx_version = backend_info()
        self.generation_defaults = _generation_defaults(pack.folder)
        self.numeric_options: dict[str, object] = {}
        self.facts: MutableMapping[str, str] = facts if facts is not None else {}
        self.drafting = Drafting(
            trunk,
            draft_model,
            exact=exact,
            facts=self.facts,
            build=f"{pack.fingerprint[:16]}.{trunk.dtype}.{trunk.routes.identity}",
            machine=f"{self.device}.{self.mlx_version}",
            fault=pack.found.fault,
        )

    def new_session(self) -> Session:
        return Session(self, self.drafting.new_drafter(), self.drafting.new_policy())

    @property
    def tables(self) -> EngramReader | None:
        return self.trunk.tables

    @property
    def row_invariant(self) -> bool:
        """Whether a row's bits are known not to depend on the rows beside it."""
        return rows_verdict(self)

    def residency(self) -> Residency:
        return Residency(self.tables.residency() if self.tables is not None else ())

    def table_counters(self) -> dict[str, int]:
        """Rows and bytes read from the tables since the engine was opened; cold rows: read while the table was not warm."""
        found = {"cold_rows": 0, "warm_rows": 0, "bytes_read": 0}
        for counters in self.tables.counters().values() if self.tables is not None else ():
            for name, key in (("cold_rows", "cold_rows"), ("warm_rows", "warm_rows"), ("bytes_read", "bytes")):
                found[name] += counters.get(key, 0)
        return found

    def table_stats(self) -> dict[str, dict]:
        """All counters of the tables, by table name, for `/stats` (engram/counters.py names them)."""
        return self.tables.counters() if self.tables is not None else {}

    def memory(self) -> tuple[int, int]:
        """Bytes that MLX holds for this process now, and the most it has held. Any thread may ask."""
        return mx.get_active_memory() + mx.get_cache_memory(), mx.get_peak_memory()

    def calibrate_tables(self, cancel: Callable[[], bool] = lambda: False) -> bool:
        """Measure the read paths of large tables on a volume of which nothing is known; for idle moments. Did it measure?"""
        if self.tables is None or not wants_calibration(self.tables):
            return False
        calibrate(self.tables, cancel)
        return True

    def close(self) -> None:
        """Stop the table reader's threads and close its files; the engine is not used again."""
        if self.tables is not None:
            self.tables.close()


def open_engine(
    folder: str | Path,
    *,
    dtype: str | None = None,
    cache_quant: bool = True,
    linear_input_fp8: bool = False,
    qat_sim: bool = False,
    exact: str = "on",
    routes: str = "auto",
    context: int | None = None,
    cache_dir: Path | None = None,
    facts: MutableMapping[str, str] | None = None,
    recheck: bool = False,
    engram: EngramSettings | None = None,
    os_layer: PosixLayer | None = None,
    force: bool = False,
    margin: int | None = None,
    machine: Machine | None = None,
    progress: Callable[[Loading], None] = lambda event: None,
    cancel: Callable[[], bool] = lambda: False,
) -> Engine:
    """Check a pack, see that it fits, and load it. Nothing is read before it is admitted.

    dtype: float32 or bfloat16, by default the device's. cache_quant, linear_input_fp8: the fake quantisation of V4.1.
    qat_sim: that of V4; a build ignores the options of the other family.
    exact: on, or fast: drafted text may differ from plain text at near-ties, see `Drafting`.
    routes: auto, stock or the name of one; what computes the hot operations, see `kernels.routes`.
    context: tokens, at most the pack's maximum; None: as many as memory admits. force: load although it does not fit.
    margin: bytes left to others, None by size. machine: the memory there is, instead of this machine's; for tests.
    cache_dir: where derived token maps are kept. facts: measured verdicts, by key. recheck: do not trust those about routes.
    engram: how tables are read. os_layer: what the tables' reads ask instead of this system; for tests.
    Raises PackError, DoesNotFit, RouteUnavailable or Cancelled.
    """
    pack = open_pack(folder)
    limit = pack.config.max_position_embeddings
    if context is not None and not 0 < context <= limit:
        raise ContextOutOfRange(f"a context of {context:,} tokens was asked for; this build holds 1 to {limit:,}", f"--context {limit}")
    resident = engram is not None and engram.mode == "resident"
    plan = plan_memory(pack, dtype=getattr(mx, dtype) if dtype else None, tables_resident=resident, routes=routes)
    admission = admit(plan, machine or read_machine(), limit, context, margin)
    if not force:
        admission.demand(pack.folder.resolve().name)
    path = pack.folder / "tokenizer.json"
    tokenizer = ChatTokenizer.from_file(path) if path.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > pack.config.vocab_size:
        raise PackDamaged(f"{path} has {tokenizer.vocab_size:,} ids, the weights {pack.config.vocab_size:,}", "copy the tokenizer of this very build")
    trunk = build_trunk(
        pack,
        dtype=getattr(mx, dtype) if dtype else None,
        cache_quant=cache_quant,
        linear_input_fp8=linear_input_fp8,
        qat_sim=qat_sim,
        routes=routes,
        cache_dir=cache_dir,
        engram_settings=engram,
        facts=facts,
        recheck=recheck,
        os_layer=os_layer,
        progress=progress,
        cancel=cancel,
    )
    progress(Loading("drafter", 0, pack.drafter_bytes, "bytes"))
    rounded = qat_sim if pack.config.family == "v4" else cache_quant
    model = build_drafter(pack, trunk, rounded=rounded, linear_input_fp8=linear_input_fp8, facts=None if recheck else facts)
    progress(Loading("ready", len(pack.plan), len(pack.plan), "layers"))
    engine = Engine(pack, trunk, tokenizer, context or admission.context or limit, model, exact, facts, admission)
    rounded = {"qat_sim": qat_sim} if engine.family == "v4" else {"cache_quant": cache_quant, "linear_input_fp8": linear_input_fp8}
    engine.numeric_options = {**rounded, "packed": stays_packed(pack), "exact": exact, "routes": trunk.routes.identity}
    return engine


def _generation_defaults(folder: Path) -> dict:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {k: values[k] for k in _GENERATION_KEYS if k in values}
    except (OSError, ValueError, TypeError) as error:
        raise PackDamaged(f"{path} cannot be read as JSON: {error}", "delete or repair the file") from error
