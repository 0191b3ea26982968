"""Reads the final answer of a text, and numbers with units, without evaluating them."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from fractions import Fraction

MARK = "####"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
LONGEST = 1000  # characters of a number; a longer one has no value
LONGEST_UNIT = 60  # characters of a number's unit
PLACES = 6  # decimal places, and significant digits, of a decimal that may stand for a number that is no decimal

# What \boxed may hold without braces: a number, a command with its arguments or a letter, before the end of a formula, line or
# clause, or before a word.
BARE = (
    r"\s*([-+]?(?:\\[A-Za-z]+(?:\{[^{}]*\})+|[0-9.][0-9,.]*(?:/[0-9]+)?(?:\\?%)?|[A-Za-z](?![A-Za-z])))"
    r"(?=\s*(?:[$\n]|\\[)\]]|[.,;:!?](?:\s|$)|\Z)|\s+[A-Za-z])"
)
BRACES = re.compile(
    rf"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*(\{{)|{BARE})|\\\\(?!boxed|fbox)|\\?[{{}}]"
)

LATEX_COMMA = re.compile(r"\{,\}|,\\!|(?<=[0-9])\\,(?=[0-9]{3})")  # 1{,}234 and 1\,234 are 1,234
_FRACTION = r"\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
MIXED, FRACTION = re.compile(rf"(?<=[0-9])\s*{_FRACTION}"), re.compile(_FRACTION)
# A number does not start inside a word or another number ("m2", "CO2").
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = (
    rf"(?<![A-Za-z_0-9])(?:(?P<cycle>[0-9]*\.[0-9]*)\\(?:overline|bar)\s?\{{(?P<repeated>[0-9]+)\}}"
    rf"|(?:(?P<whole>{_WHOLE}) )?(?P<above>{_DECIMAL})\s?/\s?(?P<below>{_DECIMAL})(?![0-9]|\.[0-9]|\s?/)"
    rf"|(?P<value>{_DECIMAL})(?:[eE](?P<e>[-+]?[0-9]{{1,3}})(?![0-9A-Za-z])"
    rf"|\s?(?:\\times|\\cdot|[×*])\s?10\s?\^\s?(?P<ten>\{{\s?[-+]?[0-9]{{1,3}}\s?\}}|[0-9]+))?)"
)
NUMBER = re.compile(_NUMBER)
CURRENCY = "$€£¥\\ "
MONEY = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "": ""}
AMOUNT = re.compile(
    rf"(?P<before>[^0-9.$€£¥₹+\\-]*)(?P<sign>[-+]?) ?(?P<money>\\\$|[€£¥₹]|) ?(?P<inner>[-+]?) ?{_NUMBER}(?P<after>.*)"
)

# LaTeX and Markdown that change the look of an answer, and not what it is.
LOOKS = (
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\$|\\[()\[\]]"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]|(?<!\\)\\$|\\q?quad(?![A-Za-z])|(?<=[0-9A-Za-z}])~|\s+"), " "),
    (re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf)|[mh]box)\s*\{"), r"\\text{"),
    (re.compile(r"(?<!\\)\\([%#])"), r"\1"),
    (re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)(?![A-Za-z])\s*"), "°"),
    (re.compile("[−–]"), "-"),
    (re.compile(r"  +"), " "),
)
TEXT = re.compile(r"\\text\{([^{}]*)\}")
WRAPPED = re.compile(r"(?:\\text)?\{([^{}]*)\}")
WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
BETWEEN = re.compile(r"[ .,:=]*")  # what may be around the words of an amount

# The units that a number may have, each with its other spellings; "_" is a space, and plurals in "s" are understood.
UNITS = """metre meter m mtr|decimetre decimeter dm|centimetre centimeter cm|millimetre millimeter mm
kilometre kilometer km|inch inches in|foot feet ft|yard yd|mile|gram gramme g gm|kilogram kg kilo|milligram mg|tonne ton
pound lb|ounce oz|litre liter l|millilitre milliliter ml|gallon gal|quart|pint|cup|acre|hectare|second sec s|minute min
hour hr h|day|week|month|year yr|decade|century centuries|dollar usd buck|cent ¢ penny pennies pence|euro eur €|rupee rs
yen ¥|yuan rmb|degree deg °|radian rad|degree_celsius degrees_celsius °c|degree_fahrenheit degrees_fahrenheit °f
percent % pct percentage|unit|watt|volt|ohm|joule|newton|hertz hz|mile/hour mph|kilometre/hour kmh kmph kph|person people
student|child children|man men|woman women|boy|girl|way|point|page|book|coin|card|ball|ticket|game|item"""


SPELLINGS = {  # spelling -> name
    f"{word}{ending}".replace("_", " "): words[0].replace("_", " ")
    for words in map(str.split, UNITS.replace("\n", "|").split("|"))
    for word in words
    for ending in (("", "s") if len(word) > 1 else ("",))
}
POWERED = re.compile(
    r"(?:(square|sq|cubic|cu) )?(.+?) ?(?:\^ ?\{? ?([23]) ?\}?|([²³])|(squared|cubed))?"
)
SQUARE, CUBIC = ("square", "sq", "squared", "²"), ("cubic", "cu", "cubed", "³")
POWERS = dict.fromkeys(SQUARE, "2") | dict.fromkeys(CUBIC, "3")
PERCENT = "percent"
SCALES = ("celsius", "fahrenheit")


@dataclass(frozen=True)
class Amount:
    """A number with the unit that is written with it, "" without one.

    `places`: of a decimal that may stand for a number that is no decimal, as 0.333333 does for 1/3; else 0.
    """

    value: Fraction
    unit: str = ""
    places: int = 0


def visible(prompt: str, completion: str) -> str:
    """The completion after its reasoning: the text after the last </think>, or all of it without one.

    Empty when the completion or the end of the prompt opens a <think> that is never closed.
    """
    _, is_closed, answer = completion.rpartition(CLOSE_THINK)
    is_open = OPEN_THINK in completion or prompt.rstrip().endswith(OPEN_THINK)
    return answer if is_closed or not is_open else ""


def after_thoughts(completion: str) -> str:
    """The text after the last </think>; without one the whole completion, even if it is unclosed reasoning."""
    return completion.rpartition(CLOSE_THINK)[2]


def marked(text: str) -> str | None:
    """The answer that a text marks: the content of its last \\boxed{...}, else the rest of the line after the last "####".

    A "####" after the box counts when one amount follows it; else it is a heading. None without a mark.
    """
    found, end = last_box(text)
    head, mark, tail = text.rpartition(MARK)
    line = tail.strip().partition("\n")[0].strip() if mark else None
    if not found.strip() or (mark and len(head) >= end and amount(line) is not None):
        return line
    return found


def last_box(text: str) -> tuple[str, int]:
    """The content of the last \\boxed{...} or \\fbox{...} whose braces balance, or of \\boxed 5, and where it ends.

    ("", 0) without one. One pass over the text.
    """
    last = (-1, 0, 0)  # start, and the content's first and last character
    opened: list[int] = []  # of each open brace: where the content of its box starts, or -1
    for match in BRACES.finditer(text):
        if match[1] or match[0] == "{":
            opened.append(match.end() if match[1] else -1)
        elif match[2]:
            end = match.start(2) + len(match[2].rstrip(".,"))
            last = max(last, (match.start(2), match.start(2), end))
        elif match[0] == "}" and opened and (start := opened.pop()) >= 0:
            last = max(last, (start, start, match.start()))
    _, start, end = last
    return text[start:end], end


def final_number(text: str) -> Fraction | None:
    """The final number of a text, marked or not; None without one, and when it has no value, such as 1/0.

    The first number after the last "####", else the last number in the last \\boxed{...}, else the last number of the text.
    "-$1,234.50" is -1234.5, "1/2" one number; the "-" of "5-3" is a minus between two numbers.
    """
    _, mark, tail = text.rpartition(MARK)
    for part, index in [(tail, 0)] if mark else [(last_box(text)[0], -1), (text, -1)]:
        plain = _plain_fractions(LATEX_COMMA.sub(",", part))
        if found := list(NUMBER.finditer(plain)):
            return _signed(plain, found[index])
    return None


def amount(text: str, words: Container[str] = ()) -> Amount | None:
    """The amount that a text is: one number with its currency and unit, and nothing else; None for any other text.

    `words` (lower case) may be around it, too. "$1,234.50", "3/4", "1\\frac{1}{2} \\text{ hours}", "6.5e3", "50\\%" and
    "90^\\circ" are amounts; "5 thirds", "2^{10}", "10:30", "1 or 3" are not.
    """
    if len(text) > LONGEST:
        return None
    text = cleaned(text)
    if words:
        text = re.sub(r"^[A-Za-z] ?= ?", "", text)
    match = AMOUNT.fullmatch(_plain_fractions(text))
    if not match or (match["sign"] and match["inner"]):
        return None
    value = _value(match)
    unit = unit_of(match["after"])
    if unit is None and words and _are_known(match["after"], words):
        unit = ""
    is_alone = match["before"].strip() in ("", "=") or (
        words and _are_known(match["before"], words)
    )
    if value is None or unit is None or not is_alone:
        return None
    value = -value if "-" in (match["sign"], match["inner"]) else value
    return Amount(value, unit or MONEY[match["money"]], _places(match["value"] or ""))


def reference(text: str) -> Amount | None:
    """The number that a reference answer is: marked, or alone; None for any other text."""
    return amount(marked(text) or text)


def same(one: Amount, other: Amount) -> bool:
    """Whether two amounts are equal: their values, exactly, and their units where both have one.

    A percentage equals its number and its hundredth: 50% is 50 and 1/2. A decimal of at least 6 places and significant
    digits equals the number that it is rounded from, or cut from.
    """
    if not are_compatible(one.unit, other.unit):
        return False
    is_share = one.unit == PERCENT != other.unit, other.unit == PERCENT != one.unit
    return (
        stands_for(one, other.value)
        or stands_for(other, one.value)
        or one.value / 100 ** is_share[0] == other.value / 100 ** is_share[1]
    )


def are_compatible(unit: str, other: str) -> bool:
    """Whether two units are the same, or one is unknown, or a degree of no scale."""
    names = {unit, other}
    return (
        len(names) == 1
        or "" in names
        or names in ({"degree", f"degree {scale}"} for scale in SCALES)
    )


def stands_for(one: Amount, value: Fraction) -> bool:
    """Whether an amount has this value, or is a long decimal that is rounded or cut from it."""
    if one.value == value or not one.places:
        return one.value == value
    last, more = Fraction(1, 10**one.places), abs(value) - abs(one.value)
    return (one.value > 0) == (value > 0) and (2 * abs(more) <= last or 0 <= more < last)


def cleaned(text: str) -> str:
    """An answer without Markdown, outer dollars and full stop, LaTeX in one spelling: \\text{ cm}, °, %, -, single spaces."""
    text = LATEX_COMMA.sub(",", text.strip().lstrip("#").strip("*_` "))
    for pattern, plain in LOOKS:
        text = pattern.sub(plain, text)
    text = text.strip("*_` ").removesuffix(".").strip("*_` ")
    wrapped = WRAPPED.fullmatch(text)
    return wrapped[1].strip() if wrapped else text


def split_unit(text: str) -> tuple[str, str]:
    """A cleaned text without the known unit at its end, and the unit; ("", text) never."""
    for start in range(max(1, len(text) - LONGEST_UNIT), len(text)):
        if text[start - 1].isalpha() and text[start].isalpha() or text[start - 1] in "\\{":
            continue
        if text[start] in " ^{}²³" or not text[:start].strip():
            continue
        if unit := unit_of(text[start:]):
            return text[:start].rstrip(), unit
    return text, ""


def unit_of(text: str) -> str | None:
    """The unit that a cleaned text spells, as its own name; "" for no text, None for any other text."""
    if not text.strip() or len(text) > LONGEST_UNIT:
        return None if text.strip() else ""
    bare = TEXT.sub(" ", text)
    if re.search(r"(?<![A-Za-z/°])[A-Za-z](?![A-Za-z])", bare):
        return None  # a variable: only \text{ m} is a metre
    flat = " ".join(TEXT.sub(r" \1 ", text).lower().replace(".", "").split()).replace("° ", "°")
    above, per, below = (part.strip() for part in re.sub(r" per |/", "\0", flat).partition("\0"))
    if not per or flat in SPELLINGS:
        return _power(flat)
    over, under = _power(above), _power(below)
    return f"{over}/{under}" if over and under else None


def _power(text: str) -> str | None:
    if text in SPELLINGS:
        return SPELLINGS[text]
    before, base, *after = POWERED.fullmatch(text).groups() if text else (None, "")
    powers = [POWERS.get(one, one) for one in (before, *after) if one]
    if base not in SPELLINGS or len(powers) > 1:
        return None
    return "^".join([SPELLINGS[base], *powers])


def _are_known(text: str, words: Container[str]) -> bool:
    """Whether a text is made of these words alone."""
    flat = TEXT.sub(r" \1 ", text)
    found = [word.lower() for word in WORD.findall(flat)]
    return bool(BETWEEN.fullmatch(WORD.sub("", flat))) and all(one in words for one in found)


def _plain_fractions(text: str) -> str:
    """The text with \\frac{1}{2} of whole numbers as 1/2, and 3\\frac{1}{2} as 3 1/2."""
    for pattern, space in ((MIXED, " "), (FRACTION, "")):
        text = pattern.sub(lambda m, s=space: f"{s}{m[1] or m[2]}/{m[3] or m[4]}", text)
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of NUMBER, without its sign; None when it has none or is too long."""
    if len(match[0]) > LONGEST:
        return None
    if (repeated := match["repeated"]) is not None:
        head = match["cycle"]
        below = (10 ** len(repeated) - 1) * 10 ** len(head.partition(".")[2])
        return Fraction(f"0{head}0") + Fraction(int(repeated), below)
    if match["above"] is not None:
        whole, above, below = (
            Fraction((match[name] or "0").replace(",", "")) for name in ("whole", "above", "below")
        )
        return whole + above / below if below else None
    ten = match["e"] or (match["ten"] or "0").strip("{} ")
    if len(ten) > 4:
        return None
    return Fraction(match["value"].replace(",", "")) * Fraction(10) ** int(ten)


def _places(decimal: str) -> int:
    """The places of a decimal that has enough of them, and enough significant digits, to stand for other numbers; else 0."""
    whole, _, places = decimal.partition(".")
    is_long = min(len(places), len((whole + places).lstrip("0,"))) >= PLACES
    return len(places) if is_long else 0


def _signed(text: str, match: re.Match[str]) -> Fraction | None:
    value, start = _value(match), match.start()
    if value is None:
        return None
    while start and text[start - 1] in CURRENCY:
        start -= 1

    # "- 5" has a dash; "-5", "-$5" and "$ -5" have signs, unless after a number, word or bracket.
    has_sign = start > 0 and text[start - 1] in "-−" and not text[start:].startswith(" ")
    if not has_sign or (start > 1 and (text[start - 2].isalnum() or text[start - 2] in ")]}")):
        return value
    return -value
