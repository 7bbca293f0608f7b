"""Names of the element types that keys, values and states are kept in, and their bytes."""

from __future__ import annotations

from ..errors import InvalidArgument

#: Bytes of an element. The scales of a float8 cache are one number a tensor or a head, and are not counted.
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float8": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}


def dtype_name(name: str, value: object) -> str:
    """`value`, a name or anything whose string is one ("torch.bfloat16"), without its module.

    name: the argument or field, for the error. Raises `InvalidArgument` for a type that `DTYPE_BYTES` does not list.
    """
    text = str(value).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise InvalidArgument(f"{name} is {value!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    return text


def dtype_bytes(name: str, value: object) -> int:
    """Bytes of one element of the type called `value`; raises as `dtype_name`."""
    return DTYPE_BYTES[dtype_name(name, value)]
