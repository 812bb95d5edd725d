"""Read YAML that a person wrote: plain values only, of bounded size, and no key twice."""

from __future__ import annotations

from typing import Any

import yaml

from macbook_optimization.errors import ConfigError

MAX_LENGTH = 100_000
_MAX_BRACKETS = 1000
_MERGE = "tag:yaml.org,2002:merge"  # `<<`, whose keys may be overridden on purpose
# The last three come from values that do not fit their tag: 2024-99-99, `!!bool x`, `!!timestamp x`.
_NOT_VALID = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse plain values only. The parser takes quadratic time for nested text, so nesting is bounded."""
    if len(text) > MAX_LENGTH or text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ConfigError(f"{origin} is too large or too deeply nested for a recipe")
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - derived from the safe loader
    except _DuplicateKeyError as error:
        raise ConfigError(f"{origin}: {error}", hint="Remove one of them.") from error
    except _NOT_VALID as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from error


class _DuplicateKeyError(yaml.YAMLError):
    pass


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, which on its own keeps the last of several values silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compare keys before merge keys are resolved: what they add may be overridden."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE:
                continue  # a list or a mapping is refused as a key later
            key = self.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if key in lines:
                raise _DuplicateKeyError(
                    f"the key {key_node.value} is given twice, {_where(lines[key], line)}"
                )
            lines[key] = line
        return node


def _where(first: int, second: int) -> str:
    return f"in line {first}" if first == second else f"in lines {first} and {second}"
