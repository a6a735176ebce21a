"""An executed notebook as a page that opens offline and neither runs nor loads anything."""

import re
from pathlib import Path

import jinja2
import latex2mathml.converter
import markupsafe
import nbformat
from bs4 import BeautifulSoup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

TEMPLATES = Path(__file__).parent / "templates"

_ACTIVE = ["script", "iframe", "object", "embed", "link", "base", "form", "frame", "portal"]
_LOADING = ["src", "srcset", "poster", "data", "background", "ping"]
_STYLE_LOADS = re.compile(r"@import[^;]*;?|url\(\s*(?!['\"]?data:)[^)]*\)", re.I)


def page(notebook: nbformat.NotebookNode, title: str, verdicts: list[dict], index: str) -> str:
    """The HTML of an executed notebook. verdicts: of its record. index: URL of the index from this page."""
    resources = {"page": {"title": title, "style": style(), "verdicts": verdicts, "index": index,
                          "policy": templates().get_template("policy.html.j2").render()}}
    html, _ = _Exporter().from_notebook_node(notebook, resources)
    return html


def templates() -> jinja2.Environment:
    """The templates of the report; whatever they are given is escaped."""
    found = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    found.filters["slug"] = lambda text: text.replace(" ", "-")
    return found


def style() -> markupsafe.Markup:
    """The style sheet of every page, with the colours of code in light and dark."""
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("xcode", "github-dark"))
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    return markupsafe.Markup(f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{css}")


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
