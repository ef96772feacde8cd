"""Strict parsing of YAML from outside."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


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
    """safe_load that refuses a repeated key. YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)
