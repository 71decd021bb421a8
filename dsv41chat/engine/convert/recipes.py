"""What a recipe does with each matrix. Nothing but matrices is ever quantised; norms, routers, mixes and sinks keep their bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsv41chat.engine.errors import PackUnsupported


@dataclass(frozen=True)
class Rule:
    """kind: `native` (the stored bytes in MLX's layout), `float` (bfloat16 values) or `affine` with bits and group."""

    kind: str
    bits: int = 0
    group: int = 0

    def for_width(self, columns: int) -> Rule:
        """The same with a group that divides the input width; bfloat16 when none does."""
        if self.kind != "affine":
            return self
        found = next((g for g in (128, 64, 32) if g <= self.group and columns % g == 0), None)
        return Rule("float") if found is None else replace(self, group=found)


NATIVE, FLOAT = Rule("native"), Rule("float")


def affine(bits: int, group: int = 64) -> Rule:
    return Rule("affine", bits, group)


@dataclass(frozen=True)
class Recipe:
    """experts: routed ones of the trunk; draft_experts: of the drafter; attention: its projections; rest: every other matrix; small:
    compressors, index keys and index weights; table: Engram rows. gate: routed w1 where it differs."""

    name: str
    experts: Rule
    draft_experts: Rule
    attention: Rule
    rest: Rule
    small: Rule
    table: Rule = NATIVE
    gate: Rule | None = None


def _even(name: str, rule: Rule) -> Recipe:
    return Recipe(name, rule, rule, rule, rule, FLOAT)


def _mixed(name: str, table: Rule) -> Recipe:
    return Recipe(name, affine(4), affine(4), affine(8), affine(8), FLOAT, table)


RECIPES = {
    r.name: r
    for r in (
        Recipe("native", NATIVE, NATIVE, NATIVE, NATIVE, NATIVE),
        _even("affine-8", affine(8)),
        _even("affine-6", affine(6)),
        _even("affine-4", affine(4)),
        _mixed("mixed-4_8", NATIVE),
        _mixed("mixed-4_8-engram6", affine(6)),
        _mixed("mixed-4_8-engram4", affine(4)),
        Recipe("mixed-2.4", affine(2, 128), affine(3), affine(6, 128), affine(8), FLOAT),
        Recipe("2bit-dq", affine(2), affine(4), affine(4), affine(4), affine(4), gate=affine(2, 32)),
    )
}
TABLES = {"native": NATIVE, "8": affine(8), "6": affine(6), "4": affine(4)}
DRAFTERS = ("keep", "exact", "q8", "drop")
_SMALL = (".compressor.", ".indexer.wk.", ".indexer.weights_proj.")


@dataclass(frozen=True)
class Choice:
    """A recipe with the parts that were overridden. table: a key of TABLES or None; drafter: one of DRAFTERS; layers: of the trunk."""

    recipe: Recipe
    table: str | None
    drafter: str
    layers: int

    @classmethod
    def of(cls, name: str, table: str | None, drafter: str, layers: int) -> Choice:
        """Raises PackUnsupported for a recipe or an option that is not known."""
        if name not in RECIPES:
            raise PackUnsupported(f"{name!r} is no recipe", f"one of {', '.join(RECIPES)}")
        if (table is not None and table not in TABLES) or drafter not in DRAFTERS:
            raise PackUnsupported(f"--engram {table} --drafter {drafter}", f"--engram {'|'.join(TABLES)}, --drafter {'|'.join(DRAFTERS)}")
        return cls(RECIPES[name], table, drafter, layers)

    def rule(self, name: str, kind: str, columns: int) -> Rule:
        """name: of a matrix or table by release name; kind: as `Expected` has it."""
        r = self.recipe
        if kind == "table":
            found = TABLES[self.table] if self.table else r.table
            # Rows narrower than a group have one scale of their own.
            return (replace(found, group=min(found.group, columns)) if found.kind == "affine" else found).for_width(columns)
        if name.startswith("mtp."):
            return self._draft_rule(name).for_width(columns)
        if ".ffn.experts." in name:
            last = name.startswith(f"layers.{self.layers - 1}.")
            return (r.gate if r.gate and ".w1." in name and not last else r.experts).for_width(columns)
        return self._dense_rule(name).for_width(columns)

    def _draft_rule(self, name: str) -> Rule:
        routed = ".ffn.experts." in name
        if self.drafter == "exact":
            return NATIVE if routed else FLOAT
        if self.drafter == "q8":
            return affine(8)
        return self.recipe.draft_experts if routed else self._dense_rule(name)

    def _dense_rule(self, name: str) -> Rule:
        if any(part in name for part in _SMALL):
            return self.recipe.small
        return self.recipe.attention if ".attn." in name else self.recipe.rest
