"""From folders and labels to categories.

Without a mapping, the folder or the column of a message is its category. A mapping file says which folders
and labels stand for which category:

    categories:
      work: [Inbox/Work, "label:Projects"]
      spam: [Spam, Junk*]
    ignore: [Sent]
    unmatched: skip

The order counts: the first category that matches wins, so a message with many labels has one category.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path

import yaml

from macbook_optimization.errors import ConfigError, DataError
from trm.tasks.documents.folders import open_regular

CATEGORIES = (
    "newsletter", "work", "personal", "spam", "promotional", "social", "finance", "travel", "shopping",
    "other",
)  # fmt: skip
SKIP = "skip"
MAX_MAPPING_BYTES = 256 * 2**10
_MAX_BRACKETS = 2000
_KINDS = ("folder", "label")
_FOLDED_I = str.maketrans({"I": "i", "İ": "i", "ı": "i"})

# Gmail's own labels, and folders that people have, in English and Turkish. The Turkish names of Gmail's
# categories are assumed. More specific categories come first.
_READY_CATEGORIES = {
    "spam": (
        "Spam", "Junk", "Junk E-mail", "Junk Email", "Bulk", "Bulk Mail", "Gereksiz", "Gereksiz E-posta",
        "Önemsiz", "Önemsiz E-posta", "İstenmeyen*",
    ),
    "finance": (
        "Finance", "Bank", "Banking", "Banks", "Bills", "Invoices", "Taxes", "Category Finance", "Finans",
        "Banka", "Fatura", "Faturalar", "Vergi",
    ),
    "travel": (
        "Travel", "Trips", "Flights", "Hotels", "Category Travel", "Category Reservations", "Seyahat",
        "Seyahatler", "Uçuşlar", "Oteller",
    ),
    "shopping": (
        "Shopping", "Orders", "Purchases", "Receipts", "Category Purchases", "Alışveriş", "Siparişler",
        "Sipariş",
    ),
    "work": ("Work", "Office", "Job", "Business", "Projects", "İş", "Ofis", "Projeler"),
    "social": ("Category Social", "Social", "Social Networks", "Kategori Sosyal", "Sosyal"),
    "newsletter": (
        "Newsletter", "Newsletters", "Lists", "Mailing Lists", "Category Forums", "Bülten", "Bültenler",
        "Kategori Forumlar", "Forumlar",
    ),
    "promotional": (
        "Category Promotions", "Promotions", "Offers", "Deals", "Ads", "Kategori Tanıtımlar", "Tanıtımlar",
        "Promosyonlar", "Kampanyalar", "Reklam",
    ),
    "personal": (
        "Category Personal", "Personal", "Private", "Family", "Friends", "Kategori Kişisel",
        "Kategori Birincil", "Kişisel", "Aile", "Arkadaşlar",
    ),
    "other": ("Category Updates", "Updates", "Other", "Kategori Güncellemeler", "Güncellemeler", "Diğer"),
}  # fmt: skip
_READY_IGNORE = (
    "Sent", "Sent Items", "Sent Mail", "Sent Messages", "Drafts", "Trash", "Deleted Items",
    "Deleted Messages", "Chat", "Outbox", "Templates", "Gönderilmiş*", "Gönderilen*", "Taslaklar", "Çöp*",
    "Silinmiş*", "Giden Kutusu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CategoryMap:
    """A mapping of folders and labels to categories."""

    categories: Mapping[str, tuple[str, ...]]  # patterns; the first category that matches wins
    ignore: tuple[str, ...] = ()  # messages to leave out, whatever else matches
    unmatched: str = SKIP  # or the category of everything else
    _matchers: tuple[tuple[str | None, _Matcher], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = [(None, self.ignore), *self.categories.items()]
        matchers = tuple((name, _Matcher.of(patterns)) for name, patterns in named)
        object.__setattr__(self, "_matchers", matchers)

    def category(self, folders: Iterable[str], labels: Iterable[str] = ()) -> str | None:
        """Return the category of a message with these folders and Gmail labels, or None to leave it out."""
        names = [*_names("folder", folders), *_names("label", labels)]
        for category, matcher in self._matchers:
            if matcher.matches(names):
                return category
        return None if self.unmatched == SKIP else self.unmatched


def ready_map() -> CategoryMap:
    """Return the mapping to the ten categories."""
    return CategoryMap(_READY_CATEGORIES, _READY_IGNORE)


def category_of(folders: Sequence[str], labels: Sequence[str], mapping: CategoryMap | None) -> str | None:
    """Return the category of a message. Without a mapping it is its folder or column."""
    if mapping is not None:
        return mapping.category(folders, labels)
    return folders[0] if folders else None


def describe_unused(mapping: CategoryMap, counts: LabelCounts) -> list[str]:
    """Return a sentence about each pattern of a mapping that no folder and no label matches."""
    names = {*_names("folder", counts.folders), *_names("label", counts.labels)}
    return [
        f"no folder and no label matches {pattern!r}, which the mapping has in {where!r}"
        for where, patterns in _patterns(mapping)
        for pattern in patterns
        if not _Matcher.of([pattern]).matches(names)
    ]


def _patterns(mapping: CategoryMap) -> Iterable[tuple[str, tuple[str, ...]]]:
    yield from mapping.categories.items()
    yield "ignore", mapping.ignore


def default_map(counts: LabelCounts) -> CategoryMap | None:
    """Return the mapping to use where none is given: the ready one for mail with labels but no folders."""
    return ready_map() if len(counts.folders) < 2 and counts.labels else None


@dataclass(slots=True)
class LabelCounts:
    """The number of messages with each folder and each label."""

    num_messages: int = 0
    folders: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)

    def add(self, folders: Iterable[str], labels: Iterable[str]) -> None:
        self.num_messages += 1
        self.folders.update(set(folders))
        self.labels.update(set(labels))


def starter_map(counts: LabelCounts) -> str:
    """Return a mapping of what was found, for the user to edit. Folders of unknown names are categories."""
    ready = ready_map()
    placed: dict[str, list[str]] = {}
    ignored: list[str] = []
    left: list[str] = []
    for kind, counter in (("folder", counts.folders), ("label", counts.labels)):
        for name, count in sorted(counter.items(), key=lambda pair: (-pair[1], pair[0])):
            line = f"- {_quoted(f'{kind}:{name}')}  # {count}"
            category = ready.category(*([name], []) if kind == "folder" else ([], [name]))
            if category is not None:
                placed.setdefault(category, []).append(line)
            elif _Matcher.of(ready.ignore).matches([*_names(kind, [name])]):
                ignored.append(line)
            elif kind == "folder" and len(counts.folders) > 1:
                placed.setdefault(_category_name(name), []).append(line)
            else:
                left.append(line)
    return "\n".join(_map_lines(counts.num_messages, placed, ignored, left)) + "\n"


def write_starter_map(path: Path, counts: LabelCounts) -> None:
    """Write a mapping to edit. An existing file, which the user may have edited, is never replaced."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(starter_map(counts))
    except FileExistsError as error:
        raise DataError(f"{path} exists already.", hint="Choose another name, or delete it.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}.") from error


def load_map(path: Path) -> CategoryMap:
    """Read a mapping file, and report all of its problems together."""
    with open_regular(path) as file:
        content = file.read(MAX_MAPPING_BYTES + 1)
    brackets = content.count(b"[") + content.count(b"{")
    if len(content) > MAX_MAPPING_BYTES or brackets > _MAX_BRACKETS:  # the parser is quadratic in nested text
        raise ConfigError(f"{path} is too large or too deeply nested for a mapping of categories.")
    try:
        text = content.decode("utf-8-sig")
        repeated = [*_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))]
        tree = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    problems = [f"{key} is there twice" for key in repeated] or _problems(tree)
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems[:8])}.", hint="See docs/email.md for an example.")
    categories = {name: tuple(map(str, patterns)) for name, patterns in tree["categories"].items()}
    ignore = tuple(map(str, tree.get("ignore") or ()))
    return CategoryMap(categories, ignore, tree.get("unmatched", SKIP))


@dataclass(frozen=True, slots=True)
class _Matcher:
    """Patterns, ready to be compared: `kind:name` in folded letters."""

    exact: frozenset[str]
    globs: re.Pattern[str] | None

    @classmethod
    def of(cls, patterns: Iterable[str]) -> _Matcher:
        exact: set[str] = set()
        globs: list[str] = []
        for pattern in patterns:
            kind, colon, name = pattern.partition(":")
            has_kind = bool(colon) and kind in _KINDS
            for each in (kind,) if has_kind else _KINDS:
                folded = f"{each}:{fold((name if has_kind else pattern).strip())}"
                if "*" in folded:
                    globs.append(translate(folded.replace("[", "[[]")))
                else:
                    exact.add(folded)
        return cls(frozenset(exact), re.compile("|".join(globs)) if globs else None)

    def matches(self, names: Iterable[str]) -> bool:
        globs = self.globs
        return any(name in self.exact or (globs is not None and globs.match(name)) for name in names)


def fold(name: str) -> str:
    """Return a name without differences of case, and without those between the Turkish letters i."""
    composed = unicodedata.normalize("NFC", name)  # macOS may decompose the names of folders
    return " ".join(composed.translate(_FOLDED_I).casefold().split())


def _names(kind: str, names: Iterable[str]) -> Iterable[str]:
    """Yield what a pattern may match: the name, and for a folder also its last part."""
    for name in names:
        yield f"{kind}:{fold(name)}"
        if kind == "folder" and "/" in name:
            yield f"{kind}:{fold(name.rpartition('/')[2])}"


def _map_lines(
    num_messages: int, placed: Mapping[str, list[str]], ignored: list[str], left: list[str]
) -> Iterable[str]:
    yield f"# Categories of {num_messages} messages. The number after a folder or label is how many have it."
    yield "# Move lines between the categories, rename them, add your own. The first match wins."
    yield "categories:"
    order = {name: position for position, name in enumerate(_READY_CATEGORIES)}
    for name in sorted(placed, key=lambda name: (order.get(name, -1), name)):
        yield f"  {_quoted(name)}:"
        yield from (f"    {line}" for line in placed[name])
    yield "# Messages that are left out, whatever else they match."
    yield "ignore:" if ignored else "ignore: []"
    yield from (f"  {line}" for line in ignored)
    yield "# What nothing matches: skip, or the name of a category."
    yield f"unmatched: {SKIP}"
    if left:
        yield "# Not used so far:"
        yield from (f"#   {line}" for line in left)


def _category_name(folder: str) -> str:
    last = folder.rpartition("/")[2][:100]
    return "".join(letter if letter.isprintable() else " " for letter in last).strip() or "unnamed"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _repeated_keys(root: yaml.Node | None) -> Iterable[str]:
    """Yield keys that YAML would silently overwrite."""
    nodes = [root]
    if isinstance(root, yaml.MappingNode):
        nodes += [value for key, value in root.value if key.value == "categories"]
    for node in nodes:
        if isinstance(node, yaml.MappingNode):
            counts = Counter(str(key.value) for key, _ in node.value)
            yield from (key for key, count in counts.items() if count > 1)


def _problems(tree: object) -> list[str]:
    if not isinstance(tree, dict) or not isinstance(tree.get("categories"), dict) or not tree["categories"]:
        return ["it needs `categories:` with at least one category"]
    found = [f"unknown key {key!r}" for key in tree if key not in ("categories", "ignore", "unmatched")]
    for name, patterns in tree["categories"].items():
        if not isinstance(name, str) or not name.strip() or len(name) > 100 or not name.isprintable():
            found.append(f"{name!r} is not a name for a category; put it in quotes")
        found += _problems_of_patterns(str(name), patterns)
    found += _problems_of_patterns("ignore", tree.get("ignore") or [])
    unmatched = tree.get("unmatched", SKIP)
    if unmatched != SKIP and not (isinstance(unmatched, str) and unmatched.strip()):
        found.append(f"unmatched is {unmatched!r}: it should be {SKIP} or a category")
    return found


def _problems_of_patterns(name: str, patterns: object) -> list[str]:
    if not isinstance(patterns, list):
        return [f"{name} should be a list of folders and labels"]
    return [
        f"{pattern!r} of {name} is not text; put it in quotes"
        for pattern in patterns
        if not isinstance(pattern, str | int) or isinstance(pattern, bool) or not str(pattern).strip()
    ]
