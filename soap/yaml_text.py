"""Strict parsing of YAML from outside."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MOST_VALUES = 1_000_000
MOST_BITS = 4096
"""The most bits of a whole number. Python reads hexadecimal ones of any length, but writes out none of over 4,300 digits."""


def parse_yaml(text: str) -> Any:
    """The value. ValueError, which says where and how in one line, if the text is no YAML or has a key twice."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"no valid YAML{line} ({_one_line(str(error.problem))}); mend it there") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"no valid YAML ({_one_line(str(error))}); mend it") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


class _Loader(yaml.SafeLoader):
    """safe_load that refuses a repeated key, of which YAML would silently keep the last value, and aliases that stand for very much."""

    def compose_document(self) -> yaml.Node | None:
        """The document, if it has few values, each counted as often as aliases name it."""
        found: yaml.Node | None = super().compose_document()
        if found is not None and self._count(found, {}) > MOST_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"more than {MOST_VALUES} values by its aliases", found.start_mark)
        return found

    def _count(self, node: yaml.Node, known: dict[int, int]) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in known:
            known[id(node)] = MOST_VALUES + 1  # if it is in itself
            inside = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
            known[id(node)] = 1 + sum(self._count(part, known) for part in inside)
        return known[id(node)]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number: int = super().construct_yaml_int(node)
        if number.bit_length() > MOST_BITS:
            raise yaml.constructor.ConstructorError(None, None, f"a number of over {MOST_BITS} bits", node.start_mark)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
