"""HTML from runs and records: an index that starts with the claims, and a page for each notebook.

Pages open offline and load nothing: no script, style and pictures inline, formulas rendered ahead to MathML, and a
content security policy that forbids the rest.
"""

import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jinja2
import latex2mathml.converter
import markupsafe
import nbformat
from bs4 import BeautifulSoup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.ansi import strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from kernelbook import claims, records, runner

TEMPLATES = Path(__file__).parent / "templates"
LOG_LINES = 25
"""How much of a failed notebook's log the index shows."""

_ACTIVE = ["script", "iframe", "object", "embed", "link", "base", "form", "frame", "portal"]
_LOADING = ["src", "srcset", "poster", "data", "background", "ping"]
_STYLE_LOADS = re.compile(r"@import[^;]*;?|url\(\s*(?!['\"]?data:)[^)]*\)", re.I)


@dataclass
class Entry:
    """One notebook of one folder, as the index shows it. URLs are relative to the index."""

    name: str
    folder: Path
    place: str  # the folder's name, where the report covers more than one
    status: str = "passed"
    reason: str | None = None
    record: dict | None = None
    page: str | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.place}-{self.name}" if self.place else self.name

    @property
    def prefix(self) -> str:
        return f"{self.place}/" if self.place else ""

    @cached_property
    def notebook(self) -> nbformat.NotebookNode | None:
        """The executed notebook, if the run got so far as to write it whole."""
        path = self.folder / f"{self.name}.ipynb"
        try:
            return nbformat.read(path, 4) if path.exists() else None
        except (ValueError, nbformat.reader.NotJSONError):
            return None

    @property
    def title(self) -> str:
        cells = self.notebook.cells if self.notebook else []
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        heading = re.search(r"^# +(.+)$", text, re.M)
        return heading[1].strip() if heading else self.name

    @property
    def log_tail(self) -> str:
        path = self.folder / f"{self.name}.log"
        if not path.exists():
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace")[-20_000:].splitlines()
        return strip_ansi("\n".join(lines[-LOG_LINES:]))


def build(folders: Path | list[Path], out: Path | None = None) -> Path:
    """Write the report of run folders or folders of records; returns the path of its index.html.

    out: where the pages go, with copies of the records, logs and executed notebooks they link to; a single run
    folder may take them itself (None). Raises ValueError for a folder that is not there or holds neither a run nor
    records, for a committed record that is not valid, for folders of the same name, and for several folders
    without `out`.
    """
    folders = [Path(folder).resolve() for folder in ([folders] if isinstance(folders, Path | str) else folders)]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; a report is made of run folders (runs/latest) or of "
                             "folders of records (results/nvidia-h200)")
    names = Counter(folder.name for folder in folders)
    if max(names.values()) > 1:
        raise ValueError(f"two folders are called {names.most_common(1)[0][0]!r}; their pages would mix")
    if out is None:
        if len(folders) > 1 or not (folders[0] / "run.json").exists():
            raise ValueError("say where the report goes (--out): only that of one run folder goes into the folder")
        out = folders[0]
    out = Path(out).resolve()
    entries = [entry for folder in folders for entry in _entries(folder, folder.name if len(folders) > 1 else "")]
    for entry in entries:
        _publish(entry, out)
    index = out / "index.html"
    records.write(index, _index(entries).encode())
    return index


def _entries(folder: Path, place: str) -> list[Entry]:
    if (folder / "run.json").exists():
        return [Entry(name, folder, place, state["status"], state.get("reason"), _run_record(folder, name))
                for name, state in runner.read_state(folder)["notebooks"].items()]
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} holds neither a run (run.json) nor records (*.json)")
    return [Entry(path.stem, folder, place, record=records.load(path)) for path in paths]


def _run_record(folder: Path, name: str) -> dict | None:
    try:
        return records.load(folder / f"{name}.json")
    except (FileNotFoundError, ValueError):
        return None  # the run's state says that it failed, and why


def _publish(entry: Entry, out: Path) -> None:
    """Write an entry's page and put the files it links to beside it."""
    for label, suffix in (("record", ".json"), ("log", ".log"), ("executed notebook", ".ipynb")):
        source = entry.folder / f"{entry.name}{suffix}"
        if source.exists():
            entry.files[label] = f"{entry.prefix}{source.name}"
            target = out / entry.files[label]
            if target != source:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    if entry.notebook:
        entry.page = f"{entry.prefix}{entry.name}.html"
        records.write(out / entry.page, _page(entry).encode())


def _index(entries: list[Entry]) -> str:
    tested, untested = [], []
    for article in claims.articles():
        runs = [entry for entry in entries if entry.name == article.notebook and entry.status != "not run"]
        rows = [{"claim": claim, "entry": entry, "verdict": _verdicts(entry).get(claim.id)}
                for claim in article.claims for entry in runs]
        if rows:
            tested.append((article, rows))
        else:
            untested.append(article)
    verdicts = Counter(row["verdict"]["verdict"] if row["verdict"] else "no verdict"
                       for _, rows in tested for row in rows)
    environments = [entry.record["environment"] for entry in entries if entry.record]
    return _templates().get_template("index.html.j2").render(
        style=_style(), entries=entries, tested=tested, untested=untested,
        failed=[entry for entry in entries if entry.status not in ("passed", "not run")],
        places=any(entry.place for entry in entries),
        counts=[(name, verdicts[name]) for name in (*records.VERDICTS, "no verdict") if verdicts[name]],
        devices=_distinct(environment["device"] for environment in environments),
        simulated=_distinct(e["device"] for e in environments if e["simulated"]),
        environments=_distinct(_facts(environment) for environment in environments))


def _verdicts(entry: Entry) -> dict[str, dict]:
    return {verdict["claim"]: verdict for verdict in entry.record["verdicts"]} if entry.record else {}


def _facts(environment: dict) -> dict[str, str]:
    """An environment in the words of the index; facts that a machine does not have are left out."""
    packages, cuda, commit = environment["packages"], environment["cuda"] or {}, environment["commit"]
    facts = {
        "device": environment["device"],
        "backend": f"{environment['backend']}{', simulated, not timed' if environment['simulated'] else ''}",
        "driver": environment["driver"],
        "NVRTC": cuda.get("nvrtc"),
        "compilers": ", ".join(version for version in environment["compilers"].values() if version),
        "CPU": "{model}, {cores} cores".format(**environment["cpu"]),
        "Python": ", ".join([environment["python"], *(f"{name} {packages[name]}" for name in ("numpy", "torch")
                                                      if name in packages)]),
        "commit": commit and f"{commit}{' with changes that are not committed' if environment['dirty'] else ''}",
    }
    return {name: value for name, value in facts.items() if value}


def _distinct(items) -> list:
    found = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    templates.filters["slug"] = lambda text: text.replace(" ", "-")
    return templates


def _style() -> markupsafe.Markup:
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("xcode", "github-dark"))
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    return markupsafe.Markup(f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{css}")


def _page(entry: Entry) -> str:
    resources = {"page": {
        "title": entry.title, "style": _style(), "verdicts": list(_verdicts(entry).values()),
        "policy": _templates().get_template("policy.html.j2").render(),
        "index": "../index.html" if entry.place else "index.html"}}
    html, _ = _Exporter().from_notebook_node(entry.notebook, resources)
    return html


class _Exporter(HTMLExporter):
    """nbconvert with our template, formulas as MathML, and nothing left in the page that would load or run."""

    @property
    def default_config(self):
        config = Config({"NbConvertBase": {"display_data_priority": [
            "text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/latex", "text/plain"]}})
        base = super().default_config.copy()
        base.merge(config)
        return base

    def __init__(self, **options):
        super().__init__(template_name="notebook", extra_template_basedirs=[str(TEMPLATES)], **options)

    def default_filters(self):
        yield from super().default_filters()
        yield "markdown2html", _markdown
        yield "overwritten", _overwritten

    def from_notebook_node(self, nb, resources=None, **options):
        html, resources = super().from_notebook_node(nb, resources, **options)
        return _inert(html), resources


@jinja2.pass_context
def _markdown(context, source: str) -> str:
    attachments = context.get("cell", {}).get("attachments", {})
    return MarkdownWithMath(renderer=_Renderer(escape=False, attachments=attachments)).render(source)


class _Renderer(IPythonRenderer):
    """Markdown with its formulas rendered to MathML instead of left to a script."""

    def inline_math(self, body):
        return _mathml(body, "inline")

    def block_math(self, body):
        return _mathml(body, "block")

    def latex_environment(self, name, body):
        return _mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


def _mathml(tex: str, display: str) -> str:
    try:
        return latex2mathml.converter.convert(tex.strip(), display=display)
    except Exception:  # its parser raises many kinds; a formula it cannot read is shown as written
        return f"<code>{markupsafe.escape(tex)}</code>"


def _overwritten(text: str) -> str:
    """Printed text as a terminal leaves it: a carriage return starts the line over."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _inert(html: str) -> str:
    """The page without anything that would run or load, whatever a cell's output brought along."""
    soup = BeautifulSoup(html, "html.parser")
    for element in soup.find_all(_ACTIVE):
        element.decompose()
    for element in soup.find_all("meta", attrs={"http-equiv": re.compile("refresh", re.I)}):
        element.decompose()
    for element in soup.find_all(True):
        for name in list(element.attrs):
            value = str(element.attrs[name]).strip()
            loads = name.lower() in _LOADING and not value.startswith("data:")
            script = name.lower().startswith("on") or value.lower().startswith("javascript:")
            if loads or script:
                del element.attrs[name]
            elif name.lower() == "style":
                element.attrs[name] = _STYLE_LOADS.sub("none", value)
        if element.name == "img" and not element.get("src"):
            element.decompose()
        elif element.name == "style" and element.string:
            element.string = _STYLE_LOADS.sub("", element.string)
    return str(soup)
