"""Slurs and sexual terms that the model shall not explain, stored rot13 so that nobody meets them by reading the source.

A lemma that is on the list, or whose gloss contains one of the stems, is not taught; asked for it, the model says that it does not know it.
"""
from __future__ import annotations

import codecs
import re

_WORDS = """
avttre avttref snttbg snt qlxr xvxr fcvp jbc jrgonpx puvax wnc tbbx fdhnj unysoerrq zhynggb dhnqebba bpgbebba zbatbybvq ergneq ergneqrq pergva fcnfgvp
pbba oynpxnzbbe phag gjng shpx shpxre shpxvat zbgureshpxre fuvg ohyyfuvg juber fyhg uneybg uneybgel fgehzcrg gebyybc cebfgvghgr cebfgvghgvba oebgury
obeqryyb onjqlubhfr pngubhfr cvzc cnaqre ovgpu onfgneq nefr nefrubyr nffubyr cvff gheq gvg gvgf gvggl obbo obbof avccyr cravf intvan ihyin pyvgbevf
fpebghz grfgvpyr grfgvpyrf grfgvf grfgrf frzra fcrez chovp chorf chqraqhz travgny travgnyf travgnyvn nahf nany ohggbpx ohggbpxf erpghz rwnphyngr
rwnphyngvba betnfz znfgheongr znfgheongvba pbvghf pbchyngr pbchyngvba vagrepbhefr sbeavpngr sbeavpngvba rerpgvba rebgvp rebgvpn rebgvpvfz cbeabtencul
cbeabtencuvp cbea cbeab fbqbzl fbqbzvgr fbqbzvmr ohttrel crqrenfg crqrenfgl crqbcuvyr crqbcuvyvn vaprfg vaprfghbhf encr encvfg enivfu qrsybjre zbyrfg
zbyrfgre qvyqb pbaqbz frk frkhny frkhnyvgl frkhnyyl frkl frkrq yrfovna ubzbfrkhny ubzbfrkhnyvgl alzcub alzcubznavnp phpxbyq yrpure yrpurel yrpurebhf
yrjq ynfpvivbhf enaql ubeal ehggvfu fnqvfz fnqvfg znfbpuvfz znfbpuvfg sryyngvb phaavyvathf fgevccre fgevcgrnfr ahqr ahqvgl chffl jnax ohttre cbbs
avttn qnexl qnexvr fnzob xnssve ulzvr lvq qntb vawha cnxv gehyy qbkl
"""
_STEMS = r"""
frk frkrf frkhny\w* frkl vagrepbhefr travgny\w* rebgvp\w* cbeab\w* cebfgvghg\w* juber\w* betnfz\w* znfgheong\w* pbchyng\w* cravf intvan\w* frzra
grfgvpyr\w* rwnphyng\w* encr[qf]? yrfovna\w* ubzbfrkhny\w* ynfpvivbhf\w* fyhef? bssrafvir bofprar\w* ihytne avccyrf? vaprfg\w* crqbcuvy\w* zbyrfg\w*
oebgury nahf ohggbpxf fbqbz\w* rguavp_fyhe qvfcnent\w*_grez
"""


def _plain(text: str) -> list[str]:
    """rot13 back, keeping the `\\w` of a pattern; an underscore stands for a space."""
    return [codecs.decode(p.replace(r"\w", "\0"), "rot13").replace("\0", r"\w").replace("_", " ") for p in text.split()]


WORDS: frozenset[str] = frozenset(_plain(_WORDS))
_STEM = re.compile(r"\b(" + "|".join(_plain(_STEMS)) + r")\b", re.I)


def blocked(lemma: str, gloss: str = "") -> bool:
    """True when this entry must not be taught."""
    return lemma in WORDS or bool(_STEM.search(gloss)) or bool(_STEM.fullmatch(lemma))
