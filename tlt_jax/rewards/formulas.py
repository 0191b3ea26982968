"""Whether an answer equals a reference: as text, as an amount, or as a formula of bounded size. No JAX.

math-verify's parser reads LaTeX, and nothing of a model's text is evaluated as Python. What is long, deeply nested, leaves its
work undone (a sum), or stands for a number of too many digits is not computed: it equals only the same text.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy2, normalize_latex
from latex2sympy2_extended.logic import And
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from tlt_jax.data import answers

# Limits of a formula: characters, nested brackets, "|", "^" and "_" in a row, elements of a set, list or matrix.
LONGEST, DEEPEST, BARS, TOWER, ELEMENTS = 300, 6, 6, 4, 32
LONGEST_TEXT = 2000  # characters of an answer that is read at all
DIGITS = 3000  # of a number that is computed
LARGEST = 1000  # argument of a function that grows as fast as a power
# Decimal digits of a value beyond those of the largest number in it, and the last of them, which equal values need not share.
PRECISION, SPARE = 60, 20
PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
POINTS = 3  # where formulas with variables are compared

UNDONE = re.compile(
    r"\\(?:sum|prod|i*nt|lim|operatorname|det|gcd|lcm|xrightarrow|partial|[lcd]?dots)(?![a-z])|\.\.|…"
)
PROSE = re.compile(r"(?<![A-Za-z\\])(?!sqrt|infinity|frac|[pbvBV]?matrix)[A-Za-z]{4,}")
IN_A_ROW = re.compile(rf"(?:[\^_]\s*(?:\\[A-Za-z]+|\w)\s*){{{TOWER}}}")
BASE = re.compile(r"[0-9]\s*_\s*\{?\s*([0-9A-Za-z]+)")
IMAGINARY = re.compile(r"(?<![A-Za-z])i(?![A-Za-z])")
ANGLE = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
PROPER = re.compile(r"\\frac\{?([0-9]+)\}?\{?([0-9]+)\}?")
SPACE = re.compile(r"(?<![0-9,]) | (?![0-9])")
CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}.*")
SET, PLUS_MINUS = "\\{", "\\pm"
LETTER = re.compile(r"\(([A-Za-z])\)")
LOOKS = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
SETTINGS = latex2sympy2.ConversionConfig(lowercase_symbols=False)

# math-verify warns that its timeouts are off; the scorer has its own.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal(reference: str, answer: str) -> bool:
    """Whether an answer is the reference: the same text, the same amount, or an equal formula.

    Decimals are exact; one of at least 6 places and significant digits may be rounded. Never raises: a text that is no
    formula equals only itself.
    """
    if len(answer) > LONGEST_TEXT:
        return answer.strip() == reference.strip()
    return _equal(answers.cleaned(reference), answers.cleaned(answer))


@lru_cache(4096)
def _equal(reference: str, answer: str) -> bool:
    wanted, given = map(_spelled, (reference, answer))
    if wanted == given or (wanted.isalpha() and wanted.casefold() == given.casefold()):
        return bool(given)
    amounts = [answers.amount(text) for text in (reference, answer)]
    if all(amounts):
        return answers.same(*amounts)
    (reference, unit), (answer, other) = map(_without_unit, (reference, answer))
    if not answers.are_compatible(unit, other) or not _are_alike(reference, answer):
        return False
    is_real = not any(map(IMAGINARY.search, (reference, answer)))
    wanted, given = (
        _number(amount) if amount else read(text, is_real)
        for amount, text in zip(amounts, (reference, answer), strict=True)
    )
    if wanted is None or given is None:
        return False
    try:
        wanted, given = _stated(wanted, given)
        if any(amount and amount.places for amount in amounts):
            one, value = (amounts[0], given) if amounts[0] else (amounts[1], wanted)
            return _is_rounded(one, value)
        return same(wanted, given)
    except Exception:  # the boundary where model text meets a library
        return False


def _number(amount: answers.Amount) -> sympy.Rational:
    return sympy.Rational(amount.value.numerator, amount.value.denominator)


def _spelled(text: str) -> str:
    """A cleaned text without \\text{...}, and without spaces but those before a number's digits; (A) is A."""
    text = SPACE.sub("", answers.TEXT.sub(r"\1", text))
    letter = LETTER.fullmatch(text)
    return letter[1] if letter else text


def _without_unit(text: str) -> tuple[str, str]:
    """A text without the unit at its end; the degrees of an angle belong to its function."""
    rest, unit = answers.split_unit(text)
    return (text, "") if unit == "degree" and ANGLE.search(rest) else (rest, unit)


def _are_alike(reference: str, answer: str) -> bool:
    """Whether two formulas may be compared: not a set in braces and one in brackets, numbers of two bases, a function and its
    derivative, a ratio and a number, and times of day."""
    if reference.count(":") != answer.count(":") or CLOCK.fullmatch(reference):
        return False
    if SET in (kinds := {*map(_outer, (reference, answer))} - {""}) and len(kinds) > 1:
        return False
    ours, theirs = (BASE.findall(text) for text in (reference, answer))
    if theirs and ours != theirs:
        return False
    first, second = (text.count("'") + text.count("\\prime") for text in (reference, answer))
    return first == second


def _outer(text: str) -> str:
    """The bracket around a whole formula, without \\left; "" for none."""
    depth, opened = 0, next((one for one in ("(", "[", SET) if text.startswith(one)), "")
    for match in re.finditer(r"\\?[{}]|[()\[\]]", text):
        depth += 1 if match[0][-1] in "([{" else -1
        if depth == 0:
            return opened if match.end() == len(text) else ""
    return ""


@lru_cache(1024)
def read(text: str, is_real: bool = True) -> Any:
    """The formula of a cleaned text without unit, a SymPy object, unevaluated; None when it is none, or beyond the limits."""
    if not is_bounded(text):
        return None
    latex = text.replace("°", "^{\\circ} ").replace("\\varnothing", "\\emptyset")
    if latex.count(PLUS_MINUS) == 1 and "," not in latex:
        latex = f"{latex.replace(PLUS_MINUS, '+')}, {latex.replace(PLUS_MINUS, '-')}"
    try:
        converter = Converter(is_real=is_real, convert_degrees="°" in text, config=SETTINGS)
        found = converter.parse(normalize_latex(latex, LOOKS))
        size(found)
        if not is_real:
            found = found.xreplace({one: sympy.I for one in found.free_symbols if one.name == "i"})
    except Exception:  # the boundary where model text meets a parser
        return None
    return found


def is_bounded(text: str) -> bool:
    """Whether a text is short and flat enough to be parsed as a formula, has its brackets in pairs and is no prose."""
    if len(text) > LONGEST or text.count("|") > BARS or UNDONE.search(text):
        return False
    if PROSE.search(answers.TEXT.sub("", text)) or IN_A_ROW.search(text):
        return False
    opened: list[str] = []
    for bracket in re.findall(r"[()\[\]{}]", text):
        if bracket in "([{":
            opened.append("}" if bracket == "{" else ")]")
        elif not opened or bracket not in opened.pop():
            return False
        if len(opened) > DEEPEST:
            return False
    return not opened


class Converter(latex2sympy2._Latex2Sympy):
    """math-verify's converter, with exact decimals, powers and binomials of bounded size, and products.

    Its own takes every whole number before a whole number or fraction as a mixed number: 2(3) is 5 there.
    """

    def convert_expr(self, expr):
        found = super().convert_expr(expr)
        size(found)  # before what contains it is evaluated
        return found

    def convert_binom(self, binom):
        upper, lower = self.convert_expr(binom.upper), self.convert_expr(binom.lower)
        return sympy.binomial(upper, lower, evaluate=False)

    def parse_number(self, text: str):
        found = answers.amount(text)
        if found is None:
            raise ValueError(text)
        return _number(found)

    def convert_postfix_list(self, arr, i=0):
        factors, texts = [self.convert_postfix(one) for one in arr], [one.getText() for one in arr]
        if len(factors) == 1:
            return factors[0]
        if any(a[-1].isdigit() and (b[0].isdigit() or b[0] == ".") for a, b in pairwise(texts)):
            raise ValueError("two numbers without an operation")
        proper = PROPER.fullmatch(texts[1])
        if len(texts) == 2 and texts[0].isdigit() and proper and int(proper[1]) < int(proper[2]):
            return factors[0] + factors[1]
        if not all(isinstance(one, sympy.Expr | sympy.MatrixBase) for one in factors):
            raise ValueError("factors that are no numbers")
        product = factors[-1]
        for one in reversed(factors[:-1]):
            has_matrix = one.is_Matrix or product.is_Matrix
            product = (self.mat_mul_flat if has_matrix else self.mul_flat)(one, product)
        return product


def size(formula: Any) -> float:
    """An upper bound of log10 of the numbers that computing a formula makes, at least 0. Raises ValueError beyond DIGITS."""
    if isinstance(formula, sympy.Rational):
        found = max(abs(formula.p).bit_length(), formula.q.bit_length()) * math.log10(2)
        found = math.log10(max(abs(formula.p), formula.q)) if found < 300 else found
    elif isinstance(formula, sympy.MatrixBase):
        found = max(map(size, formula.flat()), default=0.0)
        if len(formula.flat()) > ELEMENTS:
            raise ValueError("a large matrix")
    else:
        found = _size(formula, [size(one) for one in getattr(formula, "args", ())])
    if found > DIGITS:
        raise ValueError(f"a number of {found:.0f} digits")
    return found


def _size(formula: Any, parts: Sequence[float]) -> float:
    """`size` of a formula that has these of its arguments."""
    if isinstance(formula, sympy.Pow):
        base, exponent = parts
        is_unit = formula.base in (0, 1, -1)
        least = 1.0 if formula.base.free_symbols else 0.0
        return 0.0 if is_unit else max(base, least) * _power(exponent)
    if isinstance(formula, sympy.factorial | sympy.exp | sympy.gamma | sympy.sinh | sympy.cosh):
        value = _power(parts[0])
        if value > LARGEST:
            raise ValueError("a large argument")
        return value * max(1.0, math.log10(max(value, 1.0)))
    if isinstance(formula, sympy.binomial):
        return _power(parts[0]) * math.log10(2)
    if isinstance(formula, sympy.Add):
        return max(parts) + math.log10(len(parts))
    if isinstance(formula, sympy.Mul | sympy.MatMul):
        return sum(parts)
    if len(parts) > ELEMENTS:
        raise ValueError("many elements")
    return max(parts, default=1.0)


def _power(exponent: float) -> float:
    """10**exponent. Raises ValueError when it is too large for any exponent."""
    if exponent > 5:
        raise ValueError("a large exponent")
    return 10.0**exponent


def _stated(wanted: Any, given: Any) -> tuple[Any, Any]:
    """What is compared of the two: of x = 5 and 5 the right side. Raises ValueError for a false equation of numbers, 6 = 5."""
    if _is_equation(given) and not _is_equation(wanted):
        parts = _sides(given)
        for one in parts[:-1]:
            is_number = isinstance(one, sympy.Expr) and not one.free_symbols
            if is_number and not one.has(AppliedUndef) and not same(one, parts[-1]):
                raise ValueError("a false equation")
        return wanted, parts[-1]
    if _is_equation(wanted) and not _is_equation(given):
        parts = _sides(wanted)
        if latex2sympy2.is_expr_of_only_symbols(parts[0]) or parts[0].has(AppliedUndef):
            return parts[-1], given
    return wanted, given


def _is_equation(formula: Any) -> bool:
    parts = formula.args if isinstance(formula, And) else [formula]
    return all(isinstance(one, sympy.Eq) for one in parts)


def _sides(equation: Any) -> list[Any]:
    """The sides of a = b = c."""
    every = getattr(equation, "_unsorted_args", [equation])
    return [every[0].lhs, *(one.rhs for one in every)]


def same(wanted: Any, given: Any) -> bool:
    """Whether two formulas are equal; variables are real unless one of them has an imaginary unit."""
    wanted, given = (_only(one) for one in (wanted, given))
    kinds = sympy.Expr, sympy.MatrixBase, sympy.Interval, Relational
    kind = next((one for one in kinds if isinstance(wanted, one) and isinstance(given, one)), None)
    if kind is sympy.Expr:
        names = wanted.free_symbols | given.free_symbols  # at three points where there are any
        values = (_values(one, names) for one in (wanted, given))
        return wanted == given or all(map(_are_close, *values))
    if kind is sympy.MatrixBase:
        return wanted.shape == given.shape and all(map(same, wanted.flat(), given.flat()))
    if kind is sympy.Interval:
        is_open = (wanted.left_open, wanted.right_open) == (given.left_open, given.right_open)
        return is_open and same(wanted.start, given.start) and same(wanted.end, given.end)
    if kind is Relational:
        return _is_multiple(wanted, given)
    ours, theirs = _elements(wanted), _elements(given)
    are_alike = isinstance(wanted, And) == isinstance(given, And)
    if ours is not None and theirs is not None and are_alike:
        is_ordered = isinstance(wanted, sympy.Tuple | sympy.Interval)
        ours, theirs = _unnamed(ours, theirs), _unnamed(theirs, ours)
        return len(ours) == len(theirs) and (
            all(map(same, ours, theirs)) if is_ordered else _are_permuted(ours, theirs)
        )
    if any(isinstance(one, sympy.Expr | sympy.MatrixBase) for one in (wanted, given)):
        return False
    is_point = ours is not None and isinstance(wanted, sympy.Interval) and wanted.measure.is_finite
    options = {"allow_set_relation_comp": not is_point, "timeout_seconds": None}
    return bool(math_verify.verify(wanted, given, **options))


def _only(formula: Any) -> Any:
    """The element of a set of one."""
    is_single = isinstance(formula, sympy.FiniteSet) and len(_elements(formula)) == 1
    return formula.args[0] if is_single else formula


def _elements(formula: Any) -> list[Any] | None:
    """The elements in order of a finite set, a tuple, a chain of relations, or (a, b), which may be a point; else None."""
    if isinstance(formula, sympy.Interval):
        return [formula.start, formula.end] if formula.is_open else None
    if isinstance(formula, sympy.Tuple):
        return list(formula.args)
    if isinstance(formula, sympy.FiniteSet | And):
        return list(getattr(formula, "_unsorted_args", formula.args))
    return None


def _unnamed(one: list[Any], other: list[Any]) -> list[Any]:
    """The elements of a list without "x =", when all have the same and the other list has none."""
    names = {element.lhs if isinstance(element, sympy.Eq) else None for element in one}
    is_named = len(names) == 1 and isinstance(*names, sympy.Symbol)
    if is_named and not any(isinstance(element, sympy.Eq) for element in other):
        return [element.rhs for element in one]
    return one


def _are_permuted(ours: Sequence[Any], theirs: Iterable[Any]) -> bool:
    """Whether two lists of equal length have equal elements, in any order."""
    left = list(theirs)
    for one in ours:
        found = next((i for i, other in enumerate(left) if same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _is_multiple(wanted: Relational, given: Relational) -> bool:
    """Whether two relations are of one kind, and the difference of their sides in one is a multiple of that in the other."""
    first, second = (_below(one) for one in (wanted, given))
    if first[0] is not second[0]:
        return False
    names = wanted.free_symbols | given.free_symbols
    if not names:
        return False
    ours, theirs = (_values(one[1], names) for one in (first, second))
    ratio = ours[0] / theirs[0]
    is_ordered = first[0] not in (sympy.Eq, sympy.Ne)
    return bool(not is_ordered or ratio > 0) and all(
        _are_close(one, ratio * other) for one, other in zip(ours, theirs, strict=True)
    )


def _below(relation: Relational) -> tuple[type, sympy.Expr]:
    """The kind of a relation, > turned into <, and the difference of its sides."""
    turned = {sympy.StrictGreaterThan: sympy.StrictLessThan, sympy.GreaterThan: sympy.LessThan}
    kind = type(relation)
    difference = sympy.Add(relation.lhs, -relation.rhs, evaluate=False)
    return (turned[kind], -difference) if kind in turned else (kind, difference)


def _values(formula: sympy.Expr, names: Iterable[sympy.Symbol]) -> list[sympy.Expr]:
    """The exact values of a formula at fixed points, one without variables; f(x) is a variable."""
    known = {one: sympy.Symbol(str(one)) for one in formula.atoms(AppliedUndef)}
    formula = formula.subs(known) if known else formula
    names = sorted({*names, *formula.free_symbols}, key=str)
    points = range(POINTS if names else 1)
    return [
        formula.subs({name: _coordinate(name, point) for name in names}).doit() for point in points
    ]


def _coordinate(name: sympy.Symbol, point: int) -> sympy.Rational:
    """A variable's value at a point: a fixed fraction that depends on its name, positive at the first point."""
    code = sum(ord(c) * 31**i for i, c in enumerate(str(name))) + 7 * point
    sign = -1 if point and code % 2 == point % 2 else 1
    return sympy.Rational(sign * PRIMES[code % 12], PRIMES[(code // 12) % 5] - 6 + code % 97)


def _are_close(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether two values are equal: fractions exactly, others to at least 40 digits. Raises TypeError for what is no number."""
    if one == other or (one.is_Rational and other.is_Rational):
        return one == other
    digits = PRECISION + int(size(one) + size(other))
    if 0 in (one, other):
        return sympy.N(one - other, digits)._prec == 1  # SymPy cannot tell it from zero
    first, second = sympy.N(one, digits), sympy.N(other, digits)
    return bool(
        abs(first - second) < max(abs(first), abs(second)) * sympy.Float(10) ** (SPARE - digits)
    )


def _is_rounded(decimal: answers.Amount, value: sympy.Expr) -> bool:
    """Whether a long decimal is rounded or cut from a number."""
    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return False
    found = sympy.N(value, PRECISION)
    return bool(found.is_real) and answers.stands_for(decimal, Fraction(str(found)))
