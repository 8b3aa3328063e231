"""Tasks of arithmetic: sums, formulas for a calculator, and numbers to be combined until they give a target."""

import ast
import operator
import random
from collections.abc import Sequence
from fractions import Fraction

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_LONGEST = 200  # characters of a formula that are read


def draw_addition(rng: random.Random, digits: int) -> dict[str, object]:
    """Returns a sum of two numbers of up to `digits` digits."""
    a, b = (rng.randrange(10 ** rng.randint(1, digits)) for _ in range(2))
    return {"prompt": f"{a} + {b}", "completion": str(a + b), "answer": str(a + b)}


def addition(completion: str, answer: str) -> float:
    """Returns 1 for the right number, otherwise 0."""
    return float(completion.strip() == answer)


def draw_countdown(rng: random.Random, count: int) -> dict[str, object]:
    """Returns `count` numbers from 1 to 9 and a target from 1 to 99 that a formula reaches.

    The completion is the formula with which the target was made; others may be right, too.
    """
    while True:
        numbers = [rng.randint(1, 9) for _ in range(count)]
        value = numbers[0]
        formula = str(numbers[0])
        for number in numbers[1:]:
            sign = rng.choice([*_SIGNS])
            bracketed = sign == "*" and not formula.isdigit()
            formula = f"({formula}) {sign} {number}" if bracketed else f"{formula} {sign} {number}"
            value = _SIGNS[sign](value, number)
        if 1 <= value <= 99:
            break
    shown = rng.sample(numbers, count)
    prompt = f"Make {value} from {' '.join(map(str, shown))}"
    return {"prompt": prompt, "completion": formula, "numbers": shown, "target": value}


CALL = "calc "
"""What a call of the calculator begins with; a formula follows."""


def draw_calculator(rng: random.Random, digits: int) -> dict[str, object]:
    """Returns a formula of three numbers of up to `digits` digits, and a conversation that calls the calculator."""
    numbers = [rng.randrange(1, 10 ** rng.randint(1, digits)) for _ in range(3)]
    first, second = (rng.choice([*_SIGNS]) for _ in range(2))
    formula = f"{numbers[0]} {first} {numbers[1]} {second} {numbers[2]}"
    answer = calculate(f"{CALL}{formula}")
    asked = [
        ("user", f"What is {formula}?"),
        ("assistant", f"{CALL}{formula}"),
        ("user", answer),
        ("assistant", answer),
    ]
    messages = [{"role": role, "content": content} for role, content in asked]
    return {"prompt": messages[0]["content"], "messages": messages, "answer": answer}


def calculate(text: str) -> str | None:
    """Returns the value of the formula in a call of the calculator, or `None` if the text is not a call.

    The value is a whole number or a fraction. A formula that has no value gives `error`.
    """
    if not text.startswith(CALL):
        return None
    formula = text.removeprefix(CALL).strip()
    if len(formula) > _LONGEST:
        return "error"
    try:
        return str(_value(ast.parse(formula, mode="eval").body, []))
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return "error"


def calculator(completion: str, answer: str) -> float:
    """Returns 1 for the right number as the last answer, otherwise 0."""
    return float(completion.strip() == answer)


def countdown(completion: str, numbers: Sequence[int], target: int) -> float:
    """Returns 1 for a formula with + - * / that has every number once and gives the target, otherwise 0."""
    text = completion.strip()
    if len(text) > _LONGEST:
        return 0.0
    try:
        used: list[int] = []
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return 0.0
    return float(value == target and sorted(used) == sorted(numbers))


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Returns the value of a formula, and adds its numbers to `used`.

    Raises:
      ValueError: it has anything but whole numbers and the four operations.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _value(node.left, used)
        return Fraction(_OPERATORS[type(node.op)](left, _value(node.right, used)))
    raise ValueError
