"""The registry of routes, and their installation: chosen when a trunk is built, checked there, never asked again in the token path.

A route builds, for sites of the operations it knows, a callable that takes the stock operation's place. Each is compared with the stock
operation on small random inputs, with the module's own weights; one whose results lie beyond the route's stated tolerance is refused
with that reason. `stock` installs nothing. `auto` takes what passes and says why the rest is stock. A route that is demanded by name
is installed in full or not at all: RouteUnavailable says why, and no other route comes in its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.device import device_kind
from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels import joined
from dsv41chat.engine.kernels.launch import MOST_ROWS
from dsv41chat.engine.kernels.sites import INNER, Routed, Site, sites
from dsv41chat.engine.kernels.verdicts import Verdicts

_log = logging.getLogger(__name__)
STOCK = "stock"
AUTO_HINT, STOCK_HINT = (f"dsv41chat config set engine.routes {name}" for name in ("auto", STOCK))
# A device that waits for a whole step to be built is idle for a quarter of it; setting it running costs about as much as building a layer.
AHEAD = 2
# Of a long call these first layers are set running one by one, and the half of the first before its attention by itself: until the device has work
# it waits for every line of the host, and afterwards the host is ahead of it.
AT_ONCE = 4
# Of a recorded step to one that is built of the same kernels. Lists of entries are cut elsewhere, and a choice of experts can fall otherwise.
REPLAY_LIMIT = 2e-2
CHECK_ROWS = (1, 5)
# A call of the last number of rows is compared with calls of its first rows, to learn whether a row's bits depend on its call.
ALIKE_ROWS = (1, 2, 5, 8, 33)


class Declined(Exception):
    """Raised by a builder for a site that its route is not meant for (another format, a small matrix): the site stays as it is."""


@dataclass(frozen=True)
class Route:
    """One way to compute some operations.

    builders: by op (`kernels.sites` lists them): site -> callable with the stock operation's arguments and results. It reads weights
    from `site.stock` or `site.owner`, and raises Declined with the reason where it is not meant for that site.
    devices: kinds of device it is for. tolerance: by op, the largest relative L2 distance of any float result; 0 asks for the same
    bits. Whole numbers and booleans must be equal. missing: what this machine lacks, None if nothing. rows_alike: whether a row's
    bits are the same in calls of any width, as the stock operations of the CPU have it. identity: what else its bits depend on.
    auto_on: devices where `auto` considers it, None for all of its own. reference: what it is compared with; the stock operation as it
    is, or in float32. check_rows: of the calls that are compared. suits: why it is not for a trunk, None if it is. copies: bytes
    that it keeps beside the weights of some modules and their trunk. joins: the halves of a layer become compiled graphs of its kernels
    (`kernels.joined`). replays: (trunk, refused sites) -> what plays its decode steps (`kernels.replay`) instead; raises Declined. prepare:
    called with one site of each key before they are built, to compile side by side what they will need.

    host: its builders return numpy arrays and take either kind. Then nothing but numpy arrays passes between the operations of a trunk,
    its lanes are numpy's, and operations that stay stock are called through copies. Inside operations and in MTP MLX arrays stay.
    """

    name: str
    devices: frozenset[str]
    builders: Mapping[str, Callable[[Site], Callable]]
    tolerance: Mapping[str, float]
    rows_alike: bool
    missing: Callable[[], str | None] = lambda: None
    identity: Callable[[], str] = lambda: ""
    auto_on: frozenset[str] | None = None
    reference: Callable[[Site], Callable] = lambda site: site.stock
    check_rows: tuple[int, ...] = CHECK_ROWS
    suits: Callable[[Any], str | None] = lambda trunk: None
    host: bool = False
    copies: Callable[[list[Any], Any], int] = lambda modules, trunk: 0
    joins: bool = False
    replays: Callable[[Any, Mapping[tuple[str, str], str]], Any] | None = None
    prepare: Callable[[list[Site]], None] = lambda found: None

    def takes(self, wanted: str, device: str) -> bool:
        """Whether it is a candidate where `wanted` is asked for."""
        if wanted == "auto":
            return device in (self.devices if self.auto_on is None else self.auto_on)
        return wanted == self.name and device in self.devices


@dataclass(frozen=True)
class Choice:
    """What computes the sites of one key. error: the worst relative distance to stock. reason: why another route is not here.

    alike: whether a row had the same bits in calls of several widths. checked: the date of the check, None: at this opening.
    """

    op: str
    key: str
    route: str
    count: int
    error: float | None = None
    reason: str | None = None
    alike: bool = True
    checked: str | None = None


@dataclass
class KernelRoutes:
    """The choice of one trunk. wanted: auto, stock or a route's name.

    replay: plays recorded decode steps, None where each step is built anew; built: why, in words. draft_replay, draft_built: likewise
    of the drafter's passes; all None without recorded steps or without a drafter.
    ahead: after how many layers each the device is set running while the rest is still being built; 0: it starts when all is built. at_once: how
    many of the first layers of a long call do not wait for others.
    """

    wanted: str = STOCK
    device: str = "cpu"
    choices: list[Choice] = field(default_factory=list)
    rows_alike: bool = True
    identity: str = STOCK
    host: bool = False
    ahead: int = 0
    replay: Any = None
    built: str | None = None
    draft_replay: Any = None
    draft_built: str | None = None
    at_once: int = AT_ONCE

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({c.route for c in self.choices if c.route != STOCK}))

    def set_running(self, layer: int, arrays: tuple[mx.array | None, ...]) -> None:
        """Start on what a layer left, every `ahead` layers."""
        if self.ahead and ((layer + 1) % self.ahead == 0 or (layer < self.at_once and arrays[0].shape[0] > MOST_ROWS)):
            mx.async_eval([a for a in arrays if a is not None])

    def begin_running(self, layer: int, arrays: tuple[mx.array | None, ...]) -> None:
        """Start on what the half of the first layer before its attention left, in a long call."""
        if layer == 0 and self.ahead and self.at_once and arrays[0].shape[0] > MOST_ROWS:
            mx.async_eval([a for a in arrays if a is not None])

    def by_op(self) -> dict[str, str]:
        """op -> the route of its sites; several where they differ."""
        found: dict[str, dict[str, None]] = {}
        for c in self.choices:
            found.setdefault(c.op, {})[c.route] = None
        return {op: "+".join(routes) for op, routes in sorted(found.items())}

    @property
    def checked(self) -> str:
        """In words, when the installed routes were compared with stock."""
        mine = [c for c in self.choices if c.route != STOCK]
        days = sorted({c.checked for c in mine if c.checked is not None})
        if not days:
            return "checked now"
        now = sum(c.checked is None for c in mine)
        return f"checked before on {' and '.join(days)}" + (f", {now} of {len(mine)} now" if now else "")

    def summary(self) -> list[str]:
        """Lines for `doctor` and `models info`."""
        names = ", ".join(self.names) or STOCK
        asked = f" (engine.routes = {self.wanted})"
        alike = "a row's bits do not depend on its call" if self.rows_alike else "prompt rows and decode rows differ in low bits"
        lines = [f"{names}{asked}: {alike}" + (f"; {self.checked}" if self.names else "")]
        if self.replay is not None:
            lines.append("decode steps are recorded once and played again")
        elif self.built:
            lines.append(f"decode steps are built anew: {self.built}")
        if self.draft_words:
            lines.append(self.draft_words)
        for op, route in self.by_op().items():
            mine = [c for c in self.choices if c.op == op]
            errors = [c.error for c in mine if c.error is not None]
            text = f"{op}: {route}" + (f", within {max(errors):.1e} of stock" if errors else "")
            text += "" if all(c.alike for c in mine) else ", rows depend on their call"
            reasons = {c.reason for c in mine if c.reason}
            lines.append(text + (f"; {'; '.join(sorted(reasons))}" if reasons else ""))
        return lines

    @property
    def draft_words(self) -> str | None:
        """In words, how the drafter's passes run where the trunk's steps are recorded."""
        if self.draft_replay is not None:
            return "passes of the drafter are recorded once and played again"
        return f"passes of the drafter are built anew: {self.draft_built}" if self.draft_built else None

    def facts(self) -> dict[str, Any]:
        """For receipts."""
        reasons = {f"{c.op}, {c.key}": c.reason for c in self.choices if c.reason}
        found = {"wanted": self.wanted, "identity": self.identity, "rows_alike": self.rows_alike, "by_op": self.by_op(), "refused": reasons}
        steps = "recorded" if self.replay is not None else f"built: {self.built}" if self.built else "built"
        passes = "recorded" if self.draft_replay is not None else f"built: {self.draft_built}" if self.draft_built else "built"
        return found | {"checked": self.checked if self.names else None, "decode_steps": steps, "draft_passes": passes}


def known_routes() -> tuple[Route, ...]:
    """All routes, the preferred one first. Each lives in its own module."""
    from dsv41chat.engine.kernels import cuda, metal
    from dsv41chat.engine.kernels.blas import ROUTE as blas
    from dsv41chat.engine.kernels.compiled import ROUTE as compiled

    return blas, metal.metal_route(), cuda.cuda_route(), compiled


def names() -> tuple[str, ...]:
    """What `engine.routes` may be."""
    return ("auto", STOCK, *(route.name for route in known_routes()))


def problem(wanted: str, device: str | None = None) -> RouteUnavailable | None:
    """What `install` would refuse `wanted` with, whatever the build is; None where it depends on that or nothing is wrong."""
    try:
        route = None if wanted in ("auto", STOCK) else _demanded(wanted, known_routes(), device or device_kind())
    except RouteUnavailable as error:
        return error
    return _unusable(wanted, reason) if route is not None and (reason := route.missing()) else None


def preview(wanted: str = "auto", device: str | None = None) -> list[str]:
    """In words, what `install` would try on this device; nothing is built. Raises RouteUnavailable."""
    device = device or device_kind()
    if wanted == STOCK:
        return ["stock: MLX's own operations"]
    found = known_routes() if wanted == "auto" else (_demanded(wanted, known_routes(), device),)
    lines = []
    for route in found:
        if route.takes(wanted, device):
            lines.append(f"{route.name}: {route.missing() or 'for ' + ', '.join(sorted(route.builders))}")
    return lines or [f"stock: there is no other route for {device}"]


def copied_bytes(modules: list[Any], trunk: Any, wanted: str, device: str | None = None) -> int:
    """Bytes that routes will keep beside the weights of a trunk and its drafter, which may be outlines without values."""
    device = device or device_kind()
    found = [r for r in known_routes() if r.takes(wanted, device)]
    return sum(r.copies(modules, trunk) for r in found if not (r.missing() or r.suits(trunk)))


def install(
    module: Any, trunk: Any, wanted: str = "auto", *, routes: tuple[Route, ...] | None = None, device: str | None = None,
    verdicts: Verdicts | None = None,
) -> KernelRoutes:  # fmt: skip
    """Choose, check and put in place the routes of a trunk or a drafter. routes: instead of the known ones; for tests.

    verdicts: of earlier checks of this build; None: everything is checked.
    Raises RouteUnavailable when a demanded route cannot be installed; then everything is stock again.
    """
    device = device or device_kind()
    routes = known_routes() if routes is None else routes
    candidates = [] if wanted == STOCK else [r for r in routes if r.takes("auto", device)]
    if wanted not in ("auto", STOCK):
        candidates = [_demanded(wanted, routes, device)]
    reasons = {r.name: r.missing() or r.suits(trunk) for r in candidates}
    strict = wanted not in ("auto", STOCK)
    if strict and reasons[wanted]:
        raise _unusable(wanted, reasons[wanted])
    decided: dict[tuple[str, str], Decision] = {}
    counts: dict[tuple[str, str], int] = {}
    placed: list[Site] = []
    found = list(sites(module, trunk))
    for route in candidates:
        if not reasons[route.name]:
            route.prepare(list({(s.op, s.key): s for s in found if s.op in route.builders}.values()))
    try:
        for site in found:
            if not any(site.op in r.builders for r in candidates):
                continue
            key = site.op, site.key
            counts[key] = counts.get(key, 0) + 1
            if key not in decided:
                decided[key] = _decide(site, candidates, reasons, strict, verdicts)
            route = decided[key].route
            if route is not None:
                placed.append(site)
                built = route.builders[site.op](site)
                inside = module is not trunk or site.op in INNER
                inner = _bridge(built, to_mlx, lambda a: a) if route.host and inside else built
                setattr(site.owner, site.field, Routed(route.name, inner, site.stock, built if route.host else None))
        host = module is trunk and any(d.route is not None and d.route.host for d in decided.values())
        for site in found if host else ():
            if not isinstance(site.value, Routed) and site.op not in INNER:
                placed.append(site)
                setattr(site.owner, site.field, Routed(STOCK, _bridge(site.stock, to_host, to_mlx), site.stock))
        replay, built = _replay(trunk, decided, strict, verdicts) if module is trunk else (None, None)
        joins = replay is None and any(d.route is not None and d.route.joins for d in decided.values())
        if module is trunk and joins:
            joined.join(trunk)
    except BaseException:
        remove(placed)
        raise
    ahead = AHEAD if joins or replay is not None else 0
    if verdicts is not None:
        verdicts.save()
    choices = [Choice(*key, d.route.name if d.route else STOCK, counts[key], d.error, d.reason, d.alike, d.checked) for key, d in decided.items()]
    used = [r for r in candidates if any(c.route == r.name for c in choices)]
    rows_alike = all(r.rows_alike for r in used) and all(c.alike for c in choices)
    return KernelRoutes(wanted, device, choices, rows_alike, _identity(choices, used), host, ahead, replay, built)


def _replay(trunk: Any, decided: dict[tuple[str, str], Decision], strict: bool, verdicts: Verdicts | None) -> tuple[Any, str | None]:
    """(what plays the trunk's decode steps, None) or (None, why they are built anew). Raises RouteUnavailable where it plays them wrongly and
    the route was demanded."""
    route = next((d.route for d in decided.values() if d.route is not None and d.route.replays is not None), None)
    if route is None:
        return None, None
    refused = {key: d.reason for key, d in decided.items() if d.route is None and d.reason}
    try:
        replay = route.replays(trunk, refused)
    except Declined as reason:
        return None, str(reason)
    what = route.name, route.identity(), "replay", replay.key
    if verdicts is not None and verdicts.get(*what) is not None:
        return replay, None
    error = replay.check()
    if error > REPLAY_LIMIT:
        words = f"{route.name}: a recorded step is {error:.1e} from one that is built, at most {REPLAY_LIMIT:.0e} is allowed"
        if strict:
            raise RouteUnavailable(words, STOCK_HINT)
        _log.warning("%s", words)
        return None, words
    if verdicts is not None:
        verdicts.put(*what, error, True)
    return replay, None


def nearest(distance: Callable[[int], float], tries: int) -> float:
    """The first of the distances of seeds 0, 1, ... that a recorded step may have of one that is built, else the least of them all."""
    found = []
    for seed in range(tries):
        found.append(distance(seed))
        if found[-1] <= REPLAY_LIMIT:
            return found[-1]
    return min(found)


def extend(chosen: KernelRoutes, module: Any, trunk: Any, verdicts: Verdicts | None = None, *, routes: tuple[Route, ...] | None = None) -> None:
    """The same choice for a drafter of the same engine; its sites are counted with the others. Where the trunk's steps are recorded, its
    passes are too, if they are kernels and right. routes: as of `install`."""
    more = install(module, trunk, chosen.wanted, routes=routes, device=chosen.device, verdicts=verdicts)
    chosen.choices += more.choices
    chosen.rows_alike &= more.rows_alike
    if chosen.replay is not None:
        refused = {(c.op, c.key): c.reason for c in more.choices if c.route == STOCK and c.reason}
        chosen.draft_replay, chosen.draft_built = _draft_replay(chosen, module, refused, verdicts)
        if chosen.draft_replay is not None:
            module.replay = chosen.draft_replay


def _draft_replay(chosen: KernelRoutes, model: Any, refused: dict[tuple[str, str], str], verdicts: Verdicts | None) -> tuple[Any, str | None]:
    """(what plays the drafter's passes, None) or (None, why they are built anew)."""
    from dsv41chat.engine.kernels.replay_draft import DraftReplay

    try:
        replay = DraftReplay(chosen.replay, model, refused)
    except Declined as reason:
        _log.info("passes of the drafter are built anew: %s", reason)
        return None, str(reason)
    what = "+".join(chosen.names), chosen.identity, "replay of a drafter", replay.key
    if verdicts is not None and verdicts.get(*what) is not None:
        return replay, None
    error = replay.check()
    if not error <= REPLAY_LIMIT:
        words = f"a recorded pass is {error:.1e} from one that is built, at most {REPLAY_LIMIT:.0e} is allowed"
        _log.warning("passes of the drafter are built anew: %s", words)
        return None, words
    if verdicts is not None:
        verdicts.put(*what, error, True)
        verdicts.save()
    return replay, None


def to_mlx(value: Any) -> Any:
    return mx.array(value) if isinstance(value, np.ndarray) else tuple(map(to_mlx, value)) if isinstance(value, tuple) else value


def to_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, mx.array) else tuple(map(to_host, value)) if isinstance(value, tuple) else value


def _bridge(call: Callable, after: Callable, before: Callable) -> Callable:
    return lambda *args: after(call(*map(before, args)))


def remove(placed: list[Site]) -> None:
    """Back to stock."""
    for site in placed:
        stock = site.stock
        if getattr(stock, "__self__", None) is site.owner and site.field in vars(site.owner):
            delattr(site.owner, site.field)
        else:
            setattr(site.owner, site.field, stock)


def distance(got: Any, want: Any) -> float:
    """The largest relative L2 distance of corresponding arrays; inf for another shape, dtype, whole number, or a value that is not finite."""
    pairs = list(zip(got, want, strict=True)) if isinstance(want, tuple) else [(got, want)]
    worst = 0.0
    for mine, theirs in pairs:
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return float("inf")
        if not mx.issubdtype(theirs.dtype, mx.floating):
            if not bool(mx.all(mine == theirs)):
                return float("inf")
            continue
        a, b = (np.array(v.astype(mx.float32), np.float64) for v in (mine, theirs))
        with np.errstate(invalid="ignore"):
            gap = np.linalg.norm(np.where(a == b, 0, a - b))
        if not np.isfinite(gap):
            return float("inf")
        worst = max(worst, float(gap / max(np.linalg.norm(b[np.isfinite(b)]), 1e-30)))
    return worst


def _unusable(name: str, reason: str) -> RouteUnavailable:
    return RouteUnavailable(f"the route {name} cannot be used: {reason}", AUTO_HINT)


def _demanded(name: str, routes: tuple[Route, ...], device: str) -> Route:
    for route in routes:
        if route.name == name:
            if device not in route.devices:
                raise RouteUnavailable(f"the route {name} is for {', '.join(sorted(route.devices))}, this device is {device}", AUTO_HINT)
            return route
    raise RouteUnavailable(f"there is no route {name!r}", f"engine.routes is one of auto, {STOCK}, {', '.join(r.name for r in routes)}")


@dataclass(frozen=True)
class Decision:
    """route: None for stock. The rest is as `Choice` has it."""

    route: Route | None
    error: float | None = None
    reason: str | None = None
    alike: bool = True
    checked: str | None = None


def _decide(site: Site, candidates: list[Route], reasons: dict[str, str | None], strict: bool, verdicts: Verdicts | None) -> Decision:
    why = None
    for route in candidates:
        if site.op not in route.builders:
            continue
        if reasons[route.name]:
            why = f"{route.name}: {reasons[route.name]}"
            continue
        what = route.name, f"{route.identity()} within {route.tolerance[site.op]} of {route.check_rows}", site.op, site.key
        known = verdicts.get(*what) if verdicts is not None else None
        if known is not None:
            return Decision(route, known.error, None, known.alike, known.checked)
        try:
            error, alike = _check(site, route)
        except Declined as reason:
            why = f"{route.name}: {reason}" if str(reason) else why
            continue
        except RouteUnavailable as refusal:
            if strict:
                raise
            why = str(refusal)
            _log.warning("%s", refusal)
            continue
        if verdicts is not None:
            verdicts.put(*what, error, alike)
        return Decision(route, error, None, alike)
    return Decision(None, reason=why)


def _check(site: Site, route: Route) -> tuple[float, bool]:
    """The distance to stock of a route at a site, and whether rows are alike where the route says so.

    Raises Declined, or RouteUnavailable when it fails or is too far.
    """
    limit, worst = route.tolerance[site.op], 0.0
    where = f"{route.name} for {site.op}, {site.key}"
    built = route.builders[site.op](site)
    rng = np.random.default_rng(list(hashlib.sha256(site.key.encode()).digest()[:8]))
    for rows in route.check_rows:
        args = site.inputs(rows, rng)
        want = route.reference(site)(*args)
        try:
            got = to_mlx(built(*args))
            mx.eval(got)
        except Declined:
            raise
        except Exception as error:
            raise RouteUnavailable(f"{where}: it fails with {type(error).__name__}: {error}", STOCK_HINT) from error
        worst = max(worst, distance(got, want))
    if worst > limit:
        raise RouteUnavailable(f"{where}: its result is {worst:.1e} from the stock operation's, at most {limit:.0e} is allowed", STOCK_HINT)
    return worst, not route.rows_alike or site.op == "pool" or _alike(site, built, rng)


def _alike(site: Site, call: Callable, rng: np.random.Generator) -> bool:
    args = site.inputs(ALIKE_ROWS[-1], rng)
    part = lambda m: call(*(a if k in site.shared else rows_of(a, 0, m) for k, a in enumerate(args)))
    whole = row_bytes(part(ALIKE_ROWS[-1]), ALIKE_ROWS[-2])
    return all(row_bytes(part(m), m) == whole[:m] for m in ALIKE_ROWS[:-1])


def rows_of(value: Any, a: int, b: int) -> Any:
    """Rows [a, b) of an argument; of each array of a tuple."""
    if isinstance(value, tuple):
        return tuple(rows_of(v, a, b) for v in value)
    return value[a:b] if isinstance(value, (mx.array, np.ndarray)) else value


def row_bytes(result: Any, rows: int = 1) -> list[bytes]:
    """The bytes of the first rows of a result, which is an array or a tuple of arrays."""
    arrays = [np.asarray(a.astype(mx.float32)) if isinstance(a, mx.array) else a for a in (result if isinstance(result, tuple) else (result,))]
    return [b"".join(a[i].tobytes() for a in arrays) for i in range(rows)]


def _identity(choices: list[Choice], used: list[Route]) -> str:
    """Stands for everything about routes that can change a bit of a state."""
    if not used:
        return STOCK
    what = sorted([c.op, c.key, c.route] for c in choices if c.route != STOCK), {r.name: r.identity() for r in used}
    return f"{'+'.join(sorted(r.name for r in used))}.{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]}"
