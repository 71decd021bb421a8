"""Formulas as Unicode approximations: what a terminal can show of TeX. Unknown commands stay as they are."""

from __future__ import annotations

import re

_SPAN = re.compile(
    r"(?P<code>(?P<ticks>`+)(?:(?!`).|\n)+?(?P=ticks)(?!`))"
    r"|\$\$(?P<display>(?:[^$]|\\\$)+?)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<![\\$\w])\$(?P<inline>(?:[^$\n\\]|\\.)+?)\$(?![\w$])",
    re.DOTALL,
)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "zeta": "ζ", "eta": "η", "theta": "θ", "iota": "ι",
    "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "φ",
    "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π",
    "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω",
}  # fmt: skip
SYMBOLS = GREEK | {
    "times": "×", "cdot": "·", "div": "÷", "pm": "±", "mp": "∓", "ast": "∗", "star": "⋆", "circ": "∘", "bullet": "•", "oplus": "⊕", "otimes": "⊗",
    "odot": "⊙", "sum": "∑", "prod": "∏", "int": "∫", "iint": "∬", "oint": "∮", "partial": "∂", "nabla": "∇", "infty": "∞", "leq": "≤", "le": "≤",
    "geq": "≥", "ge": "≥", "neq": "≠", "ne": "≠", "approx": "≈", "equiv": "≡", "sim": "∼", "simeq": "≃", "cong": "≅", "propto": "∝", "ll": "≪",
    "gg": "≫", "in": "∈", "notin": "∉", "ni": "∋", "subset": "⊂", "subseteq": "⊆", "supset": "⊃", "supseteq": "⊇", "cup": "∪", "cap": "∩",
    "setminus": "∖", "emptyset": "∅", "varnothing": "∅", "forall": "∀", "exists": "∃", "neg": "¬", "lnot": "¬", "land": "∧", "wedge": "∧",
    "lor": "∨", "vee": "∨", "to": "→", "rightarrow": "→", "leftarrow": "←", "leftrightarrow": "↔", "Rightarrow": "⇒", "Leftarrow": "⇐",
    "Leftrightarrow": "⇔", "implies": "⇒", "iff": "⇔", "mapsto": "↦", "uparrow": "↑", "downarrow": "↓", "ldots": "…", "cdots": "⋯", "dots": "…",
    "vdots": "⋮", "ddots": "⋱", "angle": "∠", "perp": "⊥", "parallel": "∥", "mid": "∣", "langle": "⟨", "rangle": "⟩", "lceil": "⌈", "rceil": "⌉",
    "lfloor": "⌊", "rfloor": "⌋", "ell": "ℓ", "hbar": "ℏ", "Re": "ℜ", "Im": "ℑ", "aleph": "ℵ", "prime": "′", "degree": "°", "dagger": "†",
    "therefore": "∴", "because": "∵", "models": "⊨", "vdash": "⊢", "quad": "  ", "qquad": "    ", "lbrace": "{", "rbrace": "}", "backslash": "\\",
    "Vert": "‖", "vert": "|", "lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "triangle": "△", "square": "□", "blacksquare": "■",
}  # fmt: skip
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim limsup liminf max min sup inf arg argmax argmin det dim ker gcd "
    "mod Pr deg hom rank softmax sign".split()
)
UPRIGHT = frozenset("text textbf textit textrm textsf texttt mathrm mathbf mathit mathsf mathtt boldsymbol bm operatorname mbox mathop".split())
DROPPED = frozenset(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle scriptstyle limits nolimits nonumber notag hfill".split()
)
ACCENTS = {
    "hat": "\u0302", "bar": "\u0304", "tilde": "\u0303", "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308", "overline": "\u0304",
    "widehat": "\u0302",
}  # fmt: skip
BLACKBOARD = dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ"))
SUPERS = dict(
    zip(
        "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWαβγδεθφχ∗′",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵅᵝᵞᵟᵋᶿᵠᵡ*′",
    )
)
SUBS = dict(zip("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ"))

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|[{}^_]|\s+|[^\\{}^_\s]", re.DOTALL)


def show_formulas(source: str) -> str:
    """Markdown source with every formula replaced by its Unicode form; code and prices stay."""
    if "$" not in source and "\\(" not in source and "\\[" not in source:
        return source
    return _SPAN.sub(_replaced, source)


def _replaced(match: re.Match) -> str:
    if match["code"]:
        return match[0]
    content = next(text for name in ("display", "bracket", "paren", "inline") if (text := match[name]) is not None)
    if match["inline"] is not None and not is_formula(content):
        return match[0]
    return _MARKDOWN.sub(r"\\\1", formula(content))


def is_formula(content: str) -> bool:
    """Whether text between single dollars is mathematics and not an amount of money."""
    stripped = content.strip()
    if content != stripped:
        return False
    return any(mark in content for mark in "\\^_") or (len(stripped) == 1 and stripped.isalpha())


def formula(source: str) -> str:
    """TeX as one line of Unicode text; what is not well formed comes back as it is."""
    tokens = _TOKEN.findall(source.strip())
    depth = 0
    for token in tokens:
        depth += (token == "{") - (token == "}")
        if depth < 0:
            return source
    if depth or (tokens and (tokens[-1] in "^_" or tokens[-1].lstrip("\\") in ("frac", "dfrac", "tfrac", "sqrt"))):
        return source
    text, _ = _sequence(tokens, 0)
    return re.sub(r"[ \n]+", " ", text).strip()


def _sequence(tokens: list[str], at: int) -> tuple[str, int]:
    out: list[str] = []
    while at < len(tokens):
        token = tokens[at]
        if token == "}":
            return "".join(out), at + 1
        if token in "^_":
            text, at = _argument(tokens, at + 1)
            out.append(_script(text, SUPERS if token == "^" else SUBS, token))
        else:
            text, at = _one(tokens, at)
            out.append(text)
    return "".join(out), at


def _argument(tokens: list[str], at: int) -> tuple[str, int]:
    """The next group or the next single item."""
    while at < len(tokens) and tokens[at].isspace():
        at += 1
    if at >= len(tokens):
        return "", at
    return _one(tokens, at)


def _one(tokens: list[str], at: int) -> tuple[str, int]:
    token = tokens[at]
    if token == "{":
        return _sequence(tokens, at + 1)
    if not token.startswith("\\"):
        return ("−" if token == "-" else token), at + 1
    name = token[1:].rstrip("*")
    if name in SYMBOLS:
        return SYMBOLS[name], at + 1
    if name in FUNCTIONS:
        return name + (" " if at + 1 < len(tokens) and tokens[at + 1][:1].isalnum() else ""), at + 1
    if name in DROPPED:
        at += 1
        return ("", at + 1) if at < len(tokens) and tokens[at] == "." else ("", at)
    if name in ("frac", "dfrac", "tfrac"):
        over, at = _argument(tokens, at + 1)
        under, at = _argument(tokens, at)
        return f"{_grouped(over)}/{_grouped(under)}", at
    if name == "sqrt":
        return _root(tokens, at + 1)
    if name in UPRIGHT or name in ("mathcal", "mathscr", "mathfrak"):
        return _argument(tokens, at + 1)
    if name == "mathbb":
        text, at = _argument(tokens, at + 1)
        return "".join(BLACKBOARD.get(character, character) for character in text), at
    if name in ACCENTS:
        text, at = _argument(tokens, at + 1)
        return (text + ACCENTS[name] if len(text) == 1 else f"{name}({text})"), at
    if name in (",", ";", ":", " ", "!"):
        return ("" if name == "!" else " "), at + 1
    if token == "\\\\":
        return "; ", at + 1
    if len(token) == 2 and not token[1].isalpha():
        return {"|": "‖"}.get(token[1], token[1]), at + 1
    at += 1
    while at < len(tokens) and tokens[at] == "{":
        text, at = _sequence(tokens, at + 1)
        token += f"{{{text}}}"
    return token, at


def _root(tokens: list[str], at: int) -> tuple[str, int]:
    degree = ""
    if at < len(tokens) and tokens[at] == "[":
        end = tokens.index("]", at) if "]" in tokens[at:] else at
        degree, at = "".join(tokens[at + 1 : end]), end + 1
    text, at = _argument(tokens, at)
    sign = {"": "√", "2": "√", "3": "∛", "4": "∜"}.get(degree) or _script(degree, SUPERS, "^") + "√"
    return sign + (text if len(text) == 1 or text.isdigit() else f"({text})"), at


def _grouped(text: str) -> str:
    """In parentheses unless it is one number, name or symbol."""
    return text if len(text) <= 1 or text.isalnum() else f"({text})"


def _script(text: str, table: dict[str, str], mark: str) -> str:
    text = text.replace("−", "-")
    if text and all(character in table for character in text):
        return "".join(table[character] for character in text)
    return f"{mark}{text}" if len(text) == 1 else f"{mark}({text})"
