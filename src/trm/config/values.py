"""Values that every section shares: number types with a range, without NaN, Inf and booleans; suggestions."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)


def _not_boolean(value: object) -> object:
    if isinstance(value, bool):  # pydantic would accept `true` as 1
        raise ValueError("Input should be a number, not true or false")
    return value


def _whole_number(value: object) -> object:
    """Accept 1e3 for 1000. YAML reads it as text, because its numbers with an exponent need a point."""
    value = _not_boolean(value)
    if not isinstance(value, str):
        return value
    try:
        number = Decimal(value.strip())
    except InvalidOperation:
        return value
    if number.is_finite() and number.adjusted() >= _MAX_DIGITS:  # 1e999999999 must not be expanded
        raise ValueError(f"Input should be an integer of at most {_MAX_DIGITS} digits")
    if not number.is_finite() or number != number.to_integral_value():
        raise ValueError("Input should be a valid integer")
    return int(number)


_MAX_DIGITS = 19  # of the largest integer that is accepted, 2^63 - 1
_Number = BeforeValidator(_not_boolean)
_Integer = BeforeValidator(_whole_number)
Count = Annotated[int, _Integer, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, _Integer, Field(ge=0, lt=2**63)]
Positive = Annotated[float, _Number, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, _Number, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, _Number, Field(ge=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, _Number, Field(gt=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, _Number, Field(gt=0, lt=1, allow_inf_nan=False)]
BelowOne = Annotated[float, _Number, Field(ge=0, lt=1, allow_inf_nan=False)]


def _each_key_once(mapping: object, validate: ValidatorFunctionWrapHandler) -> object:
    validated = validate(mapping)
    if isinstance(mapping, Mapping) and len(validated) < len(mapping):  # 1000 and 1e3 are the same step
        raise ValueError("Input should not have the same step twice")
    return validated


OncePerStep = WrapValidator(_each_key_once)


_MAX_EXPONENT = 10


def _class_weights(value: object) -> object:
    """Report one problem for a value that is neither; the types alone would report one for each."""
    weights = list(value.values()) if isinstance(value, dict) else [value]
    limit = sys.float_info.max if isinstance(value, dict) else _MAX_EXPONENT
    for weight in weights:
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight <= limit
        if not is_number:
            raise ValueError(
                f"Input should be an exponent from 0 to {_MAX_EXPONENT}, or a weight of at least 0 for each "
                "category"
            )
    return value


_Exponent = Annotated[PositiveOrZero, Field(le=_MAX_EXPONENT)]
_Name = Annotated[str, Field(min_length=1)]
ClassWeights = Annotated[_Exponent | dict[_Name, PositiveOrZero], BeforeValidator(_class_weights)]


class Section(BaseModel):
    """Part of a recipe. The sentence under a field becomes its entry in the key reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
