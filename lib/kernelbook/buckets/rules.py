"""Ordered rules from kernel names to buckets, read from a YAML file that a user can edit."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

DEFAULT = Path(__file__).with_name("rules.yaml")
"""Rules for this collection's kernels, the article's engine, llama.cpp and the usual libraries."""

RESERVED = "unbucketed", "idle", "overlap", "wall", "total", "rest"
"""Names of a breakdown's own lines, which no bucket may have."""


@dataclass(frozen=True)
class Rule:
    bucket: str
    patterns: tuple[re.Pattern, ...]


@dataclass(frozen=True)
class Rules:
    source: str
    rules: tuple[Rule, ...]

    def bucket(self, name: str) -> str | None:
        """The bucket of the first rule with a pattern found in a kernel's name; None where there is none."""
        return next((rule.bucket for rule in self.rules if any(p.search(name) for p in rule.patterns)), None)


def load(path: str | Path | None = None) -> Rules:
    """The rules of a file, by default those of this package.

    Raises OSError where the file cannot be read; ValueError, naming file and line, for what is not YAML, no rules, an
    unknown or missing key, a name that a breakdown needs itself, and a pattern that is no regular expression or is
    found in every name.
    """
    path = Path(path or DEFAULT)
    try:
        top = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: no YAML: {error.problem}; patterns belong in single quotes") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML: {error}") from None
    if not isinstance(top, yaml.SequenceNode) or not top.value:
        raise ValueError(f"{path}: expected a list of rules, each `- bucket: NAME` with `patterns: [...]`")
    return Rules(str(path), tuple(_rule(node, path) for node in top.value))


def _rule(node: yaml.Node, path: Path) -> Rule:
    entries = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value not in ("bucket", "patterns"):
            raise _error(path, key, f"unknown key {key.value!r}; a rule has `bucket` and `patterns`")
        if key.value in entries:
            raise _error(path, key, f"{key.value!r} stands twice in one rule")
        entries[key.value] = value
    if len(entries) < 2:
        raise _error(path, node, f"a rule has `bucket` and `patterns`; this one has {', '.join(entries) or 'neither'}")
    bucket = _text(entries["bucket"], path, "a bucket's name")
    if bucket in RESERVED:
        raise _error(path, entries["bucket"], f"{bucket!r} is a line of every breakdown; no bucket can be called so")
    patterns = entries["patterns"]
    if not isinstance(patterns, yaml.SequenceNode) or not patterns.value:
        raise _error(path, patterns, f"the patterns of {bucket!r} must be a list such as ['^gemm_', '^gemv_']")
    return Rule(bucket, tuple(_pattern(item, path, bucket) for item in patterns.value))


def _pattern(node: yaml.Node, path: Path, bucket: str) -> re.Pattern:
    text = _text(node, path, f"a pattern of {bucket!r}")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise _error(path, node, f"the pattern {text!r} of {bucket!r} is no regular expression: {error}") from None
    if pattern.search(""):
        raise _error(path, node, f"the pattern {text!r} of {bucket!r} is found in every name, even an empty one")
    return pattern


def _text(node: yaml.Node, path: Path, what: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
        raise _error(path, node, f"{what} must be text")
    return node.value


def _error(path: Path, node: yaml.Node, message: str) -> ValueError:
    return ValueError(f"{path}, line {node.start_mark.line + 1}: {message}")
