"""Which builds there are, which one answers, and what their headers say. Nothing is loaded here."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv41chat.engine.errors import BackendMissing, EngineError, PackMissing, RouteUnavailable
from dsv41chat.settings import config_path
from dsv41chat.store import EMBEDDED, StoreError, clean_name, free_name
from dsv41chat.ui.engine_thread import EngineThread
from dsv41chat.ui.turn_events import BuildRef, BuildView
from dsv41chat.ui.units import size

if TYPE_CHECKING:
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer
    from dsv41chat.engine.engram.table import EngramSettings
    from dsv41chat.settings import Settings
    from dsv41chat.store import Store

log = logging.getLogger(__name__)

_ANNOUNCED = "ui.embedded_announced"
DEFAULT_KEYS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "effort")


class BuildAmbiguous(EngineError):
    """A prefix that several builds share. Exit 4, though the code is `ambiguous`."""

    code = "ambiguous"
    status = 4


class Builds:
    """The part of EngineHost that finds and probes. view: the build that is loaded; _info: (device, MLX version), once asked."""

    settings: Settings
    store: Store | None
    thread: EngineThread
    view: BuildView | None
    _prober: Callable[[Path], Any]
    _embedded: Callable[[], Path]
    _backend: Callable[[], tuple[str, str]]
    _info: tuple[str, str] | None

    def builds(self) -> list[BuildRef]:
        """Registered builds, the sub-folders of engine.model_dirs that hold a config.json, and the embedded pack (last)."""
        found: dict[str, BuildRef] = {}
        for row in self.store.builds.list() if self.store is not None else ():
            found[row.name] = BuildRef(row.name, Path(row.folder), registered=True)
        folders = {ref.folder.resolve() for ref in found.values()}
        for parent in self.settings.engine.model_dirs:
            for config in sorted(Path(parent).expanduser().glob("*/config.json")):
                if config.parent.resolve() not in folders:
                    name = free_name(clean_name(config.parent.name), {*found, EMBEDDED})
                    found[name] = BuildRef(name, config.parent)
                    folders.add(config.parent.resolve())
        listed = sorted(found.values(), key=lambda ref: ref.name.casefold())
        return [*listed, BuildRef(EMBEDDED, self._embedded(), embedded=True)]

    def find(self, argument: str) -> BuildRef:
        """A folder with a config.json, an exact name, or a unique prefix, in this order.

        Raises PackMissing (none) or BuildAmbiguous (several, with the candidates).
        """
        builds = self.builds()
        folder = Path(argument).expanduser()
        if (folder / "config.json").is_file():
            known = [ref for ref in builds if ref.folder.resolve() == folder.resolve()]
            return known[0] if known else BuildRef(clean_name(folder.resolve().name), folder)
        for ref in builds:
            if ref.name == argument:
                return ref
        matches = [ref for ref in builds if argument and ref.name.startswith(argument)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(ref.name for ref in matches)
            raise BuildAmbiguous(f"{argument!r} is the start of several builds: {names}.", hint=f"dsv41chat --model {matches[0].name}")
        what = "has no config.json" if folder.is_dir() else "is neither a folder nor the name of a build"
        raise PackMissing(f"{argument!r} {what}.", hint="dsv41chat models list")

    def resolve(self, argument: str | None = None, conversation: Any = None) -> BuildRef:
        """The build that answers: `argument`, else the conversation's, else engine.model, else the last used, else the embedded."""
        if argument:
            return self.find(argument)
        absent = ""
        wanted = (conversation.settings or {}).get("build") if conversation is not None else None
        if wanted:
            try:
                return self.find(wanted)
            except EngineError as error:
                log.info("the conversation's build %s is not there any more: %s", wanted, error)
                absent = wanted
        if self.settings.engine.model:
            return replace(self.find(self.settings.engine.model), absent=absent)
        for row in self.store.builds.last_used() if self.store is not None else ():
            if row.folder is None:
                break
            if (row.folder / "config.json").is_file():
                return BuildRef(row.name, row.folder, registered=True, absent=absent)
            absent = absent or row.name
        return BuildRef(EMBEDDED, self._embedded(), embedded=True, absent=absent)

    def absent_notice(self, ref: BuildRef) -> str | None:
        """One line, once per start and build, when another build answers because its folder is not there (a disk that is not mounted)."""
        if not ref.absent or ref.absent in self._told_absent:
            return None
        self._told_absent.add(ref.absent)
        return f"{ref.absent} is not where it was; {ref.name} answers. `dsv41chat models list` says where it should be."

    def note_use(self, build: BuildView) -> None:
        """Remember that `build` answers: it is the default of later starts."""
        if self.store is None or self.store.readonly:
            return
        try:
            if build.embedded:
                self.store.builds.touch(EMBEDDED)
            else:
                self.store.builds.use(build.folder, family=build.family, fingerprint=build.fingerprint)
        except StoreError as error:
            log.warning("the use of %s could not be noted: %s", build.name, error)

    def first_start_notice(self, build: BuildView) -> str | None:
        """One line, once per data folder, that says which small model answers and how to add a real build."""
        if not build.embedded or (self.store is not None and _ANNOUNCED in self.store.facts):
            return None
        if self.store is not None and not self.store.readonly:
            self.store.facts[_ANNOUNCED] = build.fingerprint
        return f"{build.name} answers: {card_line(build.folder)} Add a real build: dsv41chat models add DIR"

    def probe(self, ref: BuildRef) -> BuildView:
        """Read the headers of a build, no weights. Waits for the engine thread, which lays the build out. Raises PackError."""
        if self.view is not None and self.view.folder == ref.folder:
            return self.view
        info = self.thread.call(self._prober, ref.folder)
        return BuildView(
            ref.name, ref.folder, info.family, info.fingerprint, ref.embedded, context=info.context, drafter=info.drafter,
            resident_bytes=info.resident_bytes, table_bytes=info.table_bytes, bytes=info.bytes, has_tokenizer=info.has_tokenizer,
            notes=tuple(info.notes), defaults=pack_defaults(ref.folder), formats=info.formats, admission=info.admission,
        )  # fmt: skip

    def _margin(self) -> int | None:
        margin = self.settings.engine.memory_margin
        return None if margin == "auto" else margin

    def _probe_pack(self, folder: Path) -> Any:
        from dsv41chat.engine.backend import require_backend

        require_backend()  # the modules that read headers are also those that make arrays of them
        from dsv41chat.engine import probe_pack

        context = self.settings.engine.context
        resident = table_settings(self.settings).mode == "resident"
        routes = self.settings.engine.routes
        return probe_pack(folder, context=None if context == "auto" else context, tables_resident=resident, margin=self._margin(), routes=routes)

    def load_tokenizer(self, ref: BuildRef) -> ChatTokenizer:
        """Read a build's tokenizer without its weights. Raises PackError."""
        from dsv41chat.engine.chat.tokenizer import ChatTokenizer

        return ChatTokenizer.from_file(ref.folder / "tokenizer.json")

    def routes(self) -> list[str]:
        """What would compute here, in words; each is checked when a build is opened. Raises RouteUnavailable."""
        return self.thread.call(_preview_routes, self.settings.engine.routes)

    def device_kind(self) -> str | None:
        """metal, cuda or cpu, where `backend` was asked or a build was opened; None before: a screen waits for nothing."""
        if self._info is None:
            return None
        return "cpu" if self._info[0] == "cpu" else "metal" if sys.platform == "darwin" else "cuda"

    def refuse_routes(self) -> None:
        """Raise RouteUnavailable where engine.routes names what can compute no build on this machine. Waits for the engine thread."""
        wanted = self.settings.engine.routes
        if wanted not in ("auto", "stock") and (error := self.thread.call(route_problem, wanted)) is not None:
            raise self.as_set(error)

    def as_set(self, error: RouteUnavailable) -> RouteUnavailable:
        """The same error; where engine.routes does not come from the usual file, with what takes it away from where it stands."""
        settings = self.settings
        usual = settings.origin("engine.routes") != "env" and settings.paths.config == config_path()
        return error if usual else RouteUnavailable(str(error), settings.remedy("engine.routes"))

    def verify(self, ref: BuildRef, goldens: Path, **options: Any) -> Any:
        """`engine.verify_goldens` on the engine thread."""
        return self.thread.call(_verify_goldens, ref.folder, goldens, **options)

    PUBLISHED = (("V4-Flash", "mixed-2.4"), ("V4-Flash", "native"), ("V4.1-Flash", "mixed-2.4"), ("V4.1-Flash", "native"))

    def machine(self) -> str:
        """Memory and disk of this machine in a line. Waits for the engine thread. Raises BackendMissing."""
        machine = self.thread.call(_read_machine)
        free = shutil.disk_usage(self.settings.paths.data.parent if self.settings.paths.data.parent.is_dir() else Path.home()).free
        held = "" if machine.kind == "cpu" else f", {size(machine.device)} usable by the GPU"
        return f"Machine: {size(machine.total)} memory{held}, {size(free)} of disk free."

    def published(self, name: str, recipe: str) -> str:
        """A published build that fits here, with its size; "" for one that does not. Waits for the engine thread. Raises BackendMissing."""
        build, verdict = self.thread.call(_published, name, recipe)
        return "" if verdict == "no" else f"{name} {recipe} ({size(build.plan.resident)}{', tight' if verdict == 'tight' else ''})"

    def backend(self) -> tuple[str, str]:
        """(device, MLX version). Raises BackendMissing with the install command."""
        if self._info is None:
            self._info = self.thread.call(self._backend)
        return self._info


def card_line(folder: Path) -> str:
    """The first paragraph of a pack's MODEL_CARD.md below its heading, on one line; "" if there is none."""
    try:
        text = (Path(folder) / "MODEL_CARD.md").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return next((part for part in paragraphs if part and not part.startswith(("#", "---"))), "")


def pack_defaults(folder: Path) -> dict[str, Any]:
    """The sampling defaults of a pack's generation_config.json; keys that the application does not know are ignored."""
    try:
        data = json.loads((Path(folder) / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: data[key] for key in DEFAULT_KEYS if key in data} if isinstance(data, dict) else {}


def table_settings(settings: Settings) -> EngramSettings:
    """The `[engram]` section and engine.engram as the reader takes them."""
    from dsv41chat.engine.engram.table import EngramSettings

    t = settings.engram
    return EngramSettings(
        mode=settings.engine.engram, scales=t.scales, access=t.access, path=t.path, cache_budget=t.cache_budget, row_cache=t.row_cache
    )


def _read_machine() -> Any:
    from dsv41chat.engine.backend import require_backend

    require_backend()
    from dsv41chat.engine import read_machine

    return read_machine()


def _published(name: str, recipe: str) -> tuple[Any, str]:
    from dsv41chat.engine import paper_builds

    (build,) = paper_builds([name], [recipe])
    return build, build.on(_read_machine()).verdict


def _preview_routes(wanted: str) -> list[str]:
    from dsv41chat.engine.kernels.routes import preview

    return preview(wanted)


def route_problem(wanted: str) -> RouteUnavailable | None:
    """Why no build could be opened with engine.routes = `wanted` on this machine. Imports MLX; None without a back end, which says so itself."""
    from dsv41chat.engine.backend import require_backend

    try:
        require_backend()
    except BackendMissing:
        return None
    from dsv41chat.engine.kernels.routes import problem

    return problem(wanted)


def _verify_goldens(folder: Path, goldens: Path, **options: Any) -> Any:
    from dsv41chat.engine import verify_goldens

    return verify_goldens(folder, goldens, **options)


def embedded_folder() -> Path:
    from dsv41chat.nano import embedded_pack

    return embedded_pack()


def backend_of() -> tuple[str, str]:
    from dsv41chat.engine.backend import backend_info

    return backend_info()
