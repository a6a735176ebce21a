"""The articles' claims, read from notebooks/claims: one TOML file an article, which names the notebook."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from kernelbook import ROOT

FOLDER = ROOT / "notebooks" / "claims"
KINDS = ("speed", "error", "count", "static", "behaviour", "bound", "diagnosis")


@dataclass(frozen=True)
class Claim:
    """One checkable statement: what the article `says`, its figure (`value`) and that figure's condition
    (`where`), and how a notebook can `check` it on whatever machine it runs on."""

    id: str
    kind: str
    says: str
    check: str
    value: str | None = None
    where: str | None = None


@dataclass(frozen=True)
class Article:
    """An article: the file's `name`, its `title` in our words, the `notebook` that tests it, its claims."""

    name: str
    title: str
    notebook: str
    claims: tuple[Claim, ...]


def articles() -> list[Article]:
    """Every article, in the order of the notebooks that test them.

    Raises ValueError naming the file and the entry for a claim with a missing or unknown field, a kind
    that is not one of KINDS, or an id used twice.
    """
    found = sorted((_read(path) for path in FOLDER.glob("*.toml")), key=lambda article: article.notebook)
    owner: dict[str, str] = {}
    for article in found:
        for claim in article.claims:
            if claim.id in owner:
                raise ValueError(f"{article.name}.toml: claim {claim.id} appears twice; the first is in "
                                 f"{owner[claim.id]}.toml")
            owner[claim.id] = article.name
    return found


def load(article: str) -> list[Claim]:
    """The claims of one article ("grouped_gemm"); ValueError with the known names for another."""
    known = {entry.name: entry for entry in articles()}
    if article not in known:
        raise ValueError(f"no article {article!r}; there are: {', '.join(known)}")
    return list(known[article].claims)


def of_notebook(notebook: str) -> list[Claim]:
    """The claims that a notebook ("1_grouped_gemm") must give verdicts on; none if it tests no article."""
    return [claim for article in articles() if article.notebook == notebook for claim in article.claims]


def _read(path: Path) -> Article:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = tuple(_claim(entry) for entry in content["claim"])
        return Article(path.stem, content["title"], content["notebook"], entries)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]!r} is missing") from None
    except ValueError as error:  # what is not TOML comes as a ValueError too
        raise ValueError(f"{path}: {error}") from None


def _claim(entry: dict) -> Claim:
    name = entry.get("id", "without an id")
    try:
        claim = Claim(**entry)
    except TypeError as error:
        raise ValueError(f"claim {name}: {str(error).removeprefix('Claim.__init__() ')}") from None
    if claim.kind not in KINDS:
        raise ValueError(f"claim {name}: kind {claim.kind!r} is none of {', '.join(KINDS)}")
    return claim
