"""Trees of plain values and tensors as JSON and a dictionary of tensors, so that loading them executes nothing.

What JSON has no word for is an object with one key that begins with ``$``:

    {"$tuple": [...]}   {"$dict": [[key, value], ...]}   {"$int": "0x..."}   {"$float": "inf"}   {"$bytes": "base64"}
    {"$text": "base64 of UTF-8 with surrogates"}         {"$tensor": "name"}   {"$tensor": "name", "$order": [1, 0]}

A dict whose keys are all texts that do not begin with ``$`` is a plain object. A dense tensor whose dimensions lie in memory in
another order than they are counted (channels last) is stored as it lies; ``$order`` says how to permute them back.
"""

from __future__ import annotations

import base64
import binascii
import math
import string
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hvd_ckpt.json_file import Wrong, shown
from hvd_ckpt.snapshots.hashed_file import DAMAGED
from hvd_ckpt.snapshots.tensor_file import check_tensor

__all__ = ["decode", "encode"]

MAX_NESTING = 100
MAX_JSON_INT = 2**63
_KEYS = "a text, a whole number, a float, a truth value, None, or a tuple of such"
_PLAIN = frozenset(string.ascii_letters + string.digits + "_-")


def encode(value: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """A tree as a value for JSON, and its tensors by name.

    A tree is made of dict, list, tuple, str, int, float, bool, None, bytes and tensors. Numbers of NumPy become Python's, an
    OrderedDict a dict.

    Args:
        name: what to call the tree in messages.

    Raises:
        Wrong: it has something else in it, or is nested more than 100 deep.
    """
    encoder = _Encoder()
    return encoder.encode(value, name, 0), encoder.tensors


def decode(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that :func:`encode` was given.

    Raises:
        Wrong: the document is none of :func:`encode`'s, or the tensors are not its tensors.
    """
    decoder = _Decoder(tensors)
    value = decoder.decode(document, 0)
    if decoder.unused:
        raise _wrong(f"the tensor {shown(min(decoder.unused))} belongs nowhere")
    return value


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, place: str, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise Wrong(
                f"{place[:100]}... is nested more than {MAX_NESTING} deep, or within itself: store it flat"
            )
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if _is_unicode(value) else {"$text": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind is int:
            return value if -MAX_JSON_INT <= value < MAX_JSON_INT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": _base64(value)}
        if kind is list:
            return self._entries(value, place, depth)
        if kind is tuple:
            return {"$tuple": self._entries(value, place, depth)}
        if kind in (dict, OrderedDict):
            return self._dict(value, place, depth)
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        way_out = (
            "store it as a tensor" if kind is np.ndarray else "store numbers, texts, lists, dicts or tensors"
        )
        raise Wrong(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which snapshots do not hold: {way_out}"
        )

    def _entries(self, values: list[Any] | tuple[Any, ...], place: str, depth: int) -> list[Any]:
        return [self.encode(one, f"{place}[{at}]", depth + 1) for at, one in enumerate(values)]

    def _dict(self, value: dict[Any, Any], place: str, depth: int) -> Any:
        for key in value:
            if not _is_key(key):
                raise Wrong(
                    f"{place} has the key {ascii(key)[:60]} of {type(key).__name__}, and a key must be {_KEYS}"
                )
        pairs = [(key, self.encode(one, _place(place, key), depth + 1)) for key, one in value.items()]
        if all(type(key) is str and key[:1] != "$" and _is_unicode(key) for key in value):
            return dict(pairs)
        return {"$dict": [[self.encode(key, f"a key of {place}", depth + 1), one] for key, one in pairs]}

    def _tensor(self, tensor: Tensor, place: str) -> dict[str, Any]:
        reason = check_tensor(tensor)
        if reason is not None:
            raise Wrong(f"{place} {reason}")
        name = place
        while name in self.tensors:
            name += "'"
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
        lying = tensor.detach().permute(order)
        if tensor.is_contiguous() or not lying.is_contiguous():
            self.tensors[name] = tensor.detach()
            return {"$tensor": name}
        self.tensors[name] = lying
        return {"$tensor": name, "$order": [order.index(dimension) for dimension in range(tensor.dim())]}


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.unused = set(tensors)

    def decode(self, value: Any, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise _wrong("it is nested too deeply")
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong("it has a number that is too large")
        if isinstance(value, list):
            return [self.decode(one, depth + 1) for one in value]
        if not isinstance(value, dict):
            return value
        special = [key for key in value if key[:1] == "$"]
        if not special:
            return {key: self.decode(one, depth + 1) for key, one in value.items()}
        if set(value) <= {"$tensor", "$order"}:
            return self._tensor(value)
        if len(value) > 1 or not isinstance(value[special[0]], (str, list)):
            raise _wrong(f"an object with the key {shown(special[0])} is none of those that it may be")
        return self._special(special[0], value[special[0]], depth)

    def _special(self, kind: str, value: str | list[Any], depth: int) -> Any:
        try:
            if isinstance(value, list):
                if kind == "$tuple":
                    return tuple(self.decode(one, depth + 1) for one in value)
                if kind == "$dict":
                    return self._dict(value, depth)
            elif kind == "$int" and not value.lstrip("-").startswith("0x"):
                raise ValueError
            elif kind == "$int":
                return int(value, 16)
            elif kind == "$float" and value in ("inf", "-inf", "nan"):
                return float(value)
            elif kind == "$bytes":
                return base64.b64decode(value, validate=True)
            elif kind == "$text":
                return base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass")
        except (ValueError, binascii.Error):
            pass
        raise _wrong(f"{shown(kind)} with the value {shown(value)} is nothing that it may be")

    def _dict(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _wrong("a dict has an entry that is no pair")
            key = self.decode(pair[0], depth + 1)
            if not _is_key(key) or key in found:
                raise _wrong(f"a dict has the key {ascii(key)[:60]}, which is none or is there twice")
            found[key] = self.decode(pair[1], depth + 1)
        return found

    def _tensor(self, value: dict[str, Any]) -> Tensor:
        name, order = value.get("$tensor"), value.get("$order")
        if not isinstance(name, str) or name not in self.unused:
            raise _wrong(f"the tensor {shown(name)} is not in the file beside it, or is used twice")
        self.unused.remove(name)
        tensor = self.tensors[name]
        if "$order" not in value:
            return tensor
        dimensions = list(range(tensor.dim()))
        if (
            not isinstance(order, list)
            or any(type(one) is not int for one in order)
            or sorted(order) != dimensions
        ):
            raise _wrong(f"the order {shown(order)} is none of the dimensions of the tensor {shown(name)}")
        return tensor.permute(order)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(one) for one in key)
    return key is None or type(key) in (str, int, float, bool)


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8; file names of the system need not."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _place(place: str, key: Any) -> str:
    """The name of an entry: plain characters only, so that it can stand in messages and in any tool's list of tensors."""
    if type(key) in (str, int) and 0 < len(text := str(key)[:60]) < 60 and _PLAIN.issuperset(text):
        return f"{place}.{text}"
    return f"{place}[{ascii(key)[:60]}]"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _wrong(what: str) -> Wrong:
    return Wrong(f"{what}: {DAMAGED}")
