"""The documentation site: `make docs` builds it from the pages of this folder and from docstrings.

The pages are plain Markdown, which also reads well without the site. So the navigation is made from the lists of links
in index.md, and a link that leaves this folder becomes a download or, for a folder, its path.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util import logging

import statelink

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

HERE = Path(__file__).parent
logger = logging.getLogger(__name__)

project = "Statelink"
author = "the Statelink authors"
project_copyright = author
version = release = statelink.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"Statelink {version}"
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []
html_static_path: list[str] = []

# The same anchors as the ones that Markdown viewers make.
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []

PUBLIC = (
    "statelink.errors",
    "statelink",
    "statelink.state",
    "statelink.backend",
    "statelink.rendezvous",
    "statelink.telemetry",
    "statelink.testing",
    "statelink_conformance",
    "statelink.backend.native",
)
autodoc_default_options = {"members": True}
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# A single backtick in a docstring names something of the API, and has to lead somewhere. Types in signatures need not.
default_role = "py:obj"
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", r".*\.(Remote|Place)T")]

LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>\.\./[^)#]+)(?:#[^)]*)?\)")
BACK = re.compile(r'(?P<href>class="viewcode-back" href="[^"#]*#)(?P<name>[^"]+)')
LISTED = re.compile(r"^- \[[^]]+\]\((?P<page>[\w/.-]+)\.md\)", re.MULTILINE)


def on_read(app: Sphinx, page: str, source: list[str]) -> None:
    """Rewrite what only the folder needs, and give index.md its navigation."""

    def outside(match: re.Match[str]) -> str:
        path = (HERE / Path(page).parent / match["target"]).resolve()
        shown = path.relative_to(HERE.parent).as_posix()
        if HERE in path.parents or (path.is_file() and path.suffix != ".md"):
            return match[0]
        return f"`{shown}`" if match["text"].strip("`") in (shown, match["target"]) else f"{match['text']} (`{shown}`)"

    source[0] = LINK.sub(outside, source[0])
    if page == "index":
        source[0] = "".join(with_toctree(part) for part in re.split(r"(?m)^(?=## )", source[0]))


def with_toctree(section: str) -> str:
    """A section of index.md, and a hidden list of the pages that it links to."""
    pages = LISTED.findall(section)
    if not pages:
        return section
    caption = section.partition("\n")[0].lstrip("# ")
    entries = "\n".join(pages)
    return f"{section}\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n\n"


def public_name(name: str) -> str | None:
    """Where a private path or a short name is documented; ``None`` where it is not public."""
    first, _, member = name.rpartition(".")
    for candidate, rest in ((name.rpartition(".")[2], ""), (first.rpartition(".")[2], member)):
        for module in PUBLIC:
            if candidate in importlib.import_module(module).__all__:
                return ".".join(filter(None, (module, candidate, rest)))
    return None


def inherited(node: pending_xref) -> str | None:
    """Where a member of the class at hand is documented that the class has from a public base."""
    module, name = node.get("py:module"), node["reftarget"]
    kind = getattr(importlib.import_module(module), node.get("py:class") or "", None) if module in PUBLIC else None
    for base in getattr(kind, "__mro__", ())[1:]:
        public = public_name(base.__name__)
        if name in vars(base) and public is not None:
            return f"{public}.{name}"
    return None


def on_missing(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Resolve names of the API that are written without their public module."""
    if node.get("refdomain") != "py":
        return None
    target = inherited(node) or public_name(node["reftarget"])
    if target is None or target == node["reftarget"]:
        return None
    domain: Any = env.get_domain("py")
    found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)
    return found if isinstance(found, nodes.Element) else None


def on_source_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Lead each link from a page of source back to where its name is documented.

    ``viewcode`` takes all names of a private module for those of one public module, and two may share it.
    """
    if not page.startswith("_modules/"):
        return
    domain: Any = app.env.get_domain("py")

    def documented(match: re.Match[str]) -> str:
        name = match["name"] if match["name"] in domain.objects else public_name(match["name"])
        if name not in domain.objects:
            logger.warning("%s links back to %s, which is documented nowhere", page, match["name"])
        return f"{match['href']}{name}"

    context["body"] = BACK.sub(documented, context["body"])


def on_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking the first words of a property's docstring for a type, where a colon follows them."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", on_docstring, priority=400)
    app.connect("source-read", on_read)
    app.connect("missing-reference", on_missing)
    app.connect("html-page-context", on_source_page)
